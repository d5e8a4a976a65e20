"""pyaccel as an Octavo plugin: its manifest, its probe, and its platform's methods."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyaccel
import pytest
import torch
from pyaccel.plugin.platform import PyaccelPlatform

from octavo.api.errors import UsageError
from octavo.api.platform import Platform
from octavo.core.discovery import installed
from octavo.core.worker.transfers import Transfers

MIB = 1 << 20


@pytest.fixture
def platform() -> Iterator[PyaccelPlatform]:
    pyaccel.install()
    made = PyaccelPlatform()
    made.bind(1)
    yield made
    torch.pyaccel.set_device(0)


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_manifest_declares_a_platform_that_runs_only_when_named() -> None:
    entry = installed().find("platform", "pyaccel")
    assert entry.distribution == "pyaccel"
    assert entry.table.device_type == "pyaccel"
    assert entry.table.kind == "accelerator"
    assert entry.table.auto is False
    assert "pyaccel" in installed().find("attention", "reference").table.platforms


def test_probe_imports_no_torch_and_tells_the_devices() -> None:
    program = """
import sys
from pyaccel.plugin.probe import probe
print([(device.index, device.total_bytes) for device in probe().devices], "torch" in sys.modules)
"""
    done = run(program, PYACCEL_DEVICES="3", PYACCEL_MEMORY_BYTES="4096")
    assert done.stdout.strip() == "[(0, 4096), (1, 4096), (2, 4096)] False", done.stderr


def test_probe_without_library_and_compiler_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "from pyaccel.plugin.probe import probe; found = probe(); print(len(found.devices), found.reason, '|', found.hint)"
    )
    done = run(program, PYACCEL_CACHE_DIR=str(tmp_path), CXX=str(tmp_path / "missing"))
    assert done.stdout.startswith("0 its library isn't built, and there is no C++ compiler"), done.stderr
    assert "install g++ or clang++" in done.stdout


def test_platform_lists_its_devices_with_their_memory(platform: Platform) -> None:
    pyaccel.memory_limit(1, 64 * MIB)
    first, second = platform.devices()
    assert (first.index, second.index) == (0, 1)
    assert second.total_bytes == 64 * MIB < first.total_bytes
    pyaccel.install()


def test_capabilities_say_what_the_device_has(platform: Platform) -> None:
    assert platform.capabilities.streams
    assert platform.capabilities.pinned_memory
    assert platform.capabilities.dtypes[0] == "float32"


@pytest.mark.parametrize("pinned", [True, False])
def test_a_step_is_sent_from_pinned_memory_where_the_platform_has_it(
    platform: PyaccelPlatform, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    sources: list[torch.Tensor] = []

    def from_host(tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        sources.append(tensor)
        return tensor.to("pyaccel:1", non_blocking=non_blocking)

    monkeypatch.setattr(platform, "capabilities", replace(platform.capabilities, pinned_memory=pinned))
    monkeypatch.setattr(platform, "from_host", from_host)
    transfers = Transfers(platform)
    arrays = {"a": np.arange(5, dtype=np.int32), "b": np.array([[0.5, 2.0]], np.float32), "c": np.array([7], np.int64)}
    with pyaccel.count() as counts:
        sent = [transfers.upload({name: array + step for name, array in arrays.items()}) for step in range(3)]
    assert counts[0].synchronisations == 0, "sending waits for nothing"
    platform.synchronize()  # raises if a buffer was written again while a copy from it was under way
    for step, tensors in enumerate(sent):
        assert {name: tensor.cpu().tolist() for name, tensor in tensors.items()} == {
            name: (array + step).tolist() for name, array in arrays.items()
        }
    assert [source.is_pinned() for source in sources] == [pinned] * 3


def test_binding_chooses_the_device_of_everything_after(platform: Platform) -> None:
    tensor = platform.from_host(torch.arange(3))
    assert tensor.device == torch.device("pyaccel:1")
    assert torch.empty(1, device=platform.device_type).device.index == 1
    assert platform.to_host(tensor).tolist() == [0, 1, 2]


def test_other_threads_reach_the_bound_device_too(platform: Platform) -> None:
    found: list[torch.Tensor] = []

    def make() -> None:
        assert torch.pyaccel.current_device() == 0
        found.extend((platform.from_host(torch.ones(2)), platform.zeros((2,), "float32")))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert [tensor.device.index for tensor in found] == [1, 1]


def test_binding_a_device_that_is_not_there_is_a_usage_error(platform: Platform) -> None:
    with pytest.raises(UsageError, match="has devices 0 to 1; there is no device 2"):
        platform.bind(2)


def test_memory_is_the_bound_devices(platform: Platform) -> None:
    platform.reset_peak()
    before = platform.memory()
    kept = torch.empty(2 * MIB, dtype=torch.uint8, device="pyaccel")
    torch.empty(3 * MIB, dtype=torch.uint8, device="pyaccel")
    torch.empty(9 * MIB, dtype=torch.uint8, device="pyaccel:0")
    after = platform.memory()
    assert before.free_bytes - after.free_bytes == kept.nbytes
    assert after.peak_bytes - before.peak_bytes == 5 * MIB
    assert after.total_bytes == before.total_bytes
    platform.empty_cache()


def test_seed_repeats_the_bound_devices_draws(platform: Platform) -> None:
    platform.manual_seed(4)
    first = platform.to_host(torch.rand(3, device="pyaccel"))
    platform.manual_seed(4)
    assert torch.equal(platform.to_host(torch.rand(3, device="pyaccel")), first)


def test_planned_copy_passes_strict_mode_and_an_unplanned_one_does_not(platform: Platform) -> None:
    tensor = platform.from_host(torch.ones(2))
    with pyaccel.strict(copies=True):
        assert platform.to_host(tensor).tolist() == [1, 1]
        with pytest.raises(RuntimeError, match="strict mode forbids"):
            tensor.cpu()


def test_fetch_brings_the_values_of_its_moment_without_waiting_for_later_work(platform: Platform) -> None:
    tensor = platform.from_host(torch.ones(4))
    with pyaccel.count() as counts, pyaccel.strict(copies=True):
        fetch = platform.fetch(tensor)
        later = torch.empty(4, pin_memory=True)
        tensor.fill_(2)
        with pyaccel.planned():
            later.copy_(tensor, non_blocking=True)
    assert counts[0].synchronisations == 0
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(fetch().tolist()))
    thread.start()
    thread.join()
    assert found == [[1, 1, 1, 1]]
    assert bool(later.isnan().all())
    platform.synchronize()
    assert later.tolist() == [2, 2, 2, 2]


def test_installed_under_another_name_the_platform_is_unavailable() -> None:
    program = """
import pyaccel
from octavo.api.errors import PluginUnavailable
from pyaccel.plugin.platform import PyaccelPlatform
pyaccel.install("npu")
try:
    PyaccelPlatform()
except PluginUnavailable as error:
    print(error)
"""
    done = run(program)
    assert "platform 'pyaccel' needs the device's own name, and it is installed as 'npu'" in done.stdout, done.stderr
