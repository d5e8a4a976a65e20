"""What pyaccel catches: reads through a pointer fault, reads that make the host wait are counted, and errors in strict mode."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyaccel
import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    pyaccel.install()
    torch.pyaccel.set_device(1)
    yield
    torch.pyaccel.set_device(0)


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, without a core dump."""
    quiet = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    return subprocess.run(
        [sys.executable, "-c", quiet + program],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ---- pointers

PLACES = {
    "host tensor": "host",
    "tensor": "tensor",
    "view": "tensor[500:]",
    "result of an op": "kept.append(tensor + 1) or kept[-1]",
    "other device": "kept.append(torch.ones(10, device='pyaccel:0')) or kept[-1]",
    "freed tensor": "torch.ones(1000, device='pyaccel:1')",
    "storage": "tensor.untyped_storage()",
}
TOUCHES = {
    "read with ctypes": "ctypes.c_float.from_address(address).value",
    "write with ctypes": "setattr(ctypes.c_float.from_address(address), 'value', 2)",
    "memmove out": "ctypes.memmove(ctypes.create_string_buffer(16), address, 16)",
    "memmove in": "ctypes.memmove(address, b'1' * 16, 16)",
    "numpy array on it": "numpy.ctypeslib.as_array((ctypes.c_float * 4).from_address(address)).sum()",
    "host tensor on it": "torch.frombuffer((ctypes.c_float * 4).from_address(address), dtype=torch.float32).sum()",
    "kernel with a C interface": "ctypes.CDLL(None).memcmp(ctypes.c_void_p(address), b'1', 1)",
}
# Each touch in a fork of its own: what becomes of it is its wait status.
TOUCH_ALL = """
import ctypes, json, numpy, os, torch, pyaccel
torch.set_num_threads(1)
pyaccel.install()
host = torch.ones(1000)
tensor = host.to("pyaccel:1")
outcomes = {{}}
for place, where in {places}.items():
    for touch, how in {touches}.items():
        kept = []
        address = eval(where).data_ptr()
        child = os.fork()
        if child == 0:
            eval(how)
            os._exit(0)
        outcomes[place + ": " + touch] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(outcomes))
"""


def test_following_a_device_pointer_faults_and_a_host_pointer_does_not() -> None:
    done = run(TOUCH_ALL.format(places=PLACES, touches=TOUCHES))
    assert done.returncode == 0, done.stderr
    want = {
        f"{place}: {touch}": 0 if place == "host tensor" else -signal.SIGSEGV
        for place, touch in itertools.product(PLACES, TOUCHES)
    }
    assert json.loads(done.stdout) == want


# ---- counting

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t[0].item(),
    "int": lambda t: int(t[0]),
    "float": lambda t: float(t[0]),
    "bool": lambda t: bool((t > 0).any()),
    "if": lambda t: 1 if t[0] > 0 else 2,
    "index": lambda t: [1, 2, 3, 4][t.long()[0]],
    "range": lambda t: range(t.long()[1]),
    "slice": lambda t: torch.ones(3)[: t.long()[1]],
    "tolist": lambda t: t.tolist(),
    "iteration to numbers": lambda t: [float(v) for v in t],
    "in": lambda t: 1.0 in t,
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
    "argwhere": lambda t: torch.argwhere(t > 0),
    "boolean mask": lambda t: t[t > 0],
    "setitem with a boolean mask and values": lambda t: t.__setitem__(t > 0, t[:3].clone()),
    "masked_select": lambda t: t.masked_select(t > 0),
    "unique": lambda t: t.unique(),
    "unique_consecutive": lambda t: t.unique_consecutive(),
    "equal": lambda t: torch.equal(t, t.clone()),
    "allclose": lambda t: torch.allclose(t, t),
    "bincount": lambda t: t.long().bincount(),
    "repeat_interleave by a tensor": lambda t: t.repeat_interleave(t.long()),
}


def values() -> Tensor:
    return torch.tensor([3.0, 1.0, 0.0, 2.0], device="pyaccel:1")


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_read_that_makes_the_host_wait_is_counted_and_an_error_in_strict_mode(read: Callable[[Tensor], Any]) -> None:
    tensor = values()
    with pyaccel.count() as counts:
        read(tensor.clone())
    assert counts[0].synchronisations >= 1
    assert counts[0].device_to_host >= 1
    with pyaccel.strict(), pytest.raises(RuntimeError, match="strict mode forbids"):
        read(tensor)
    with pyaccel.strict(), pyaccel.planned():
        read(tensor.clone())
    read(tensor)


FINE: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda t: (t + 1) @ t,
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "masked_fill": lambda t: t.masked_fill(t > 0, 1.0),
    "setitem with a boolean mask and one value": lambda t: t.__setitem__(t > 0, 1.0),
    "index by a tensor": lambda t: t[t.long()],
    "argmax": lambda t: t.argmax(),
    "sort and cumsum": lambda t: t.sort().values.cumsum(0),
    "multinomial": lambda t: t.multinomial(1),
    "repeat_interleave of known size": lambda t: t.repeat_interleave(t.long(), output_size=6),
    "shape": lambda t: (len(t), t.shape, t.stride(), t.is_contiguous(), t.data_ptr()),
    "repr": repr,
}


@pytest.mark.parametrize("use", FINE.values(), ids=FINE.keys())
def test_what_needs_no_wait_neither_counts_nor_fails(use: Callable[[Tensor], Any]) -> None:
    tensor = values()
    with pyaccel.count() as counts, pyaccel.strict(copies=True):
        use(tensor)
    assert counts[0].synchronisations == counts[0].device_to_host == counts[0].host_to_device == 0


def test_copies_are_counted_by_direction_and_blocking_ones_wait() -> None:
    host = torch.ones(4)
    with pyaccel.count() as counts:
        tensor = host.to("pyaccel:1")
        tensor.copy_(host, non_blocking=True)
        tensor.cpu()
        tensor.to("cpu", non_blocking=True)
        tensor.clone()
        torch.pyaccel.synchronize()
    assert counts[0].host_to_device == 2
    assert counts[0].device_to_host == 2
    assert counts[0].synchronisations == 3
    assert counts[0].fallback_ops == 0


def test_counts_start_again_on_reset() -> None:
    values().cpu()
    assert pyaccel.counters().device_to_host > 0
    pyaccel.reset_counters()
    assert pyaccel.counters() == pyaccel.Counters(0, 0, 0, 0, 0)


def test_copies_to_the_host_are_errors_only_where_strictness_includes_them() -> None:
    tensor = values()
    with pyaccel.strict():
        tensor.cpu()
    with pyaccel.strict(copies=True):
        for copy in (lambda: tensor.cpu(), lambda: torch.empty(4).copy_(tensor), lambda: tensor.to("cpu", non_blocking=True)):
            with pytest.raises(RuntimeError, match="isn't planned, which strict mode forbids"):
                copy()
        with pyaccel.planned():
            assert tensor.cpu()[0] == 3


def test_repr_reads_values_only_outside_strict_mode() -> None:
    tensor = values()
    assert repr(tensor) == "tensor([3., 1., 0., 2.], device='pyaccel:1')"
    with pyaccel.strict():
        assert repr(tensor) == "tensor(<[4] not read: strict mode>, device='pyaccel:1', dtype=torch.float32)"


def test_strictness_ends_with_its_region_even_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="strict"), pyaccel.strict():
        values()[0].item()
    assert values()[0].item() == 3


# ---- names, settings, building


def test_importing_pyaccel_imports_no_torch() -> None:
    done = run("import sys, pyaccel; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_device_and_module_can_have_another_name() -> None:
    program = """
import pyaccel, torch
pyaccel.install("npu", devices=3, memory_bytes=1 << 20)
import torch.npu
tensor = torch.ones(2).npu() + 1
print(tensor.device, tensor.is_npu, torch.npu.device_count(), torch.npu.mem_get_info()[1], torch.device("npu:2"))
try:
    pyaccel.install("hpu")
except RuntimeError as error:
    print(error)
"""
    done = run(program)
    assert done.stdout.splitlines() == [
        "npu:0 True 3 1048576 npu:2",
        "the device is called 'npu' in this process and can't become 'hpu'",
    ], done.stderr


def test_environment_sets_what_install_does_not() -> None:
    program = "import pyaccel, torch; print(pyaccel.install(devices=4)); torch.ones(2, device='hpu').tolist()"
    done = run(program, PYACCEL_NAME="hpu", PYACCEL_DEVICES="1", PYACCEL_MEMORY_BYTES="4096", PYACCEL_STRICT="1")
    assert done.returncode == 1
    assert "name='hpu', devices=4, memory_bytes=4096, strict=True" in done.stdout
    assert ".tolist() makes the host wait for hpu:0, which strict mode forbids" in done.stderr
    wrong = run("import pyaccel; pyaccel.install()", PYACCEL_DEVICES="many")
    assert "PYACCEL_DEVICES must be a positive number, not 'many'" in wrong.stderr


def test_a_small_address_space_gets_a_small_reservation() -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
import pyaccel, torch
pyaccel.install()
print(sum(torch.ones(1 << 20, device="pyaccel:1").sum().item() for _ in range(3)) / (1 << 20))
"""
    done = run(program)
    assert done.stdout.strip() == "3.0", done.stderr


def test_addresses_go_on_when_a_reservation_is_used_up() -> None:
    program = """
import pyaccel, torch
pyaccel.install(reserve_bytes=1 << 20)
kept = torch.ones(1000, device="pyaccel:1")
addresses = {torch.ones(100000, device="pyaccel:1").data_ptr() for _ in range(50)}
print(len(addresses), kept.sum().item(), torch.pyaccel.memory_allocated(1))
"""
    done = run(program)
    assert done.stdout.split() == ["50", "1000.0", "4096"], done.stderr


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path) -> None:
    program = """
import pyaccel
try:
    pyaccel.install()
except pyaccel.BuildError as error:
    print(error)
"""
    done = run(program, PYACCEL_CACHE_DIR=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert done.stdout.strip() == "pyaccel needs a C++ compiler and found none: install g++ or clang++ (C++20), or set CXX"
    assert not list(tmp_path.glob("*.so"))


def test_a_failed_build_shows_the_compilers_words_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'library.cpp:1: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run("import pyaccel; pyaccel.install()", PYACCEL_CACHE_DIR=str(tmp_path / "cache"), CXX=str(compiler))
    assert done.returncode == 1
    assert "pyaccel's library doesn't build" in done.stderr
    assert "library.cpp:1: no such header" in done.stderr
    assert not list((tmp_path / "cache").glob("*.so"))
