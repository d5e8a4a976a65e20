"""The CPU platform: one device whose memory is the process's share of the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.backends.cpu import host
from octavo.backends.cpu.platform import CpuPlatform
from octavo.backends.cpu.probe import probe
from octavo.core.api.errors import UsageError
from octavo.core.config import CacheConfig, EngineConfig
from octavo.core.discovery import installed

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up machine: /proc and /sys/fs/cgroup under a folder."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(host, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n")
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_control_groups_the_machine_is_the_limit(machine: Path) -> None:
    assert (host.total_bytes(), host.available_bytes(), host.cpu_allowance()) == (64 * GIB, 48 * GIB, 8)


def test_a_version_2_group_limits_memory_and_processors(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/job/step")
    group = machine / "cgroup/job"
    write(group / "memory.max", 8 * GIB)
    write(group / "memory.current", 5 * GIB)
    write(group / "memory.stat", f"anon 7\ninactive_file {2 * GIB}")
    write(group / "cpu.max", "250000 100000")
    write(group / "step/memory.max", "max")
    write(group / "step/memory.current", 4 * GIB)
    write(group / "step/cpu.max", "max 100000")
    assert (host.total_bytes(), host.available_bytes(), host.cpu_allowance()) == (8 * GIB, 5 * GIB, 3)


def test_version_1_groups_limit_memory_and_processors(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/job\n0::/")
    memory, cpu = machine / "cgroup/memory", machine / "cgroup/cpu/job"
    write(memory / "memory.limit_in_bytes", 2**63 - 4096)  # what "no limit" looks like
    write(memory / "job/memory.limit_in_bytes", 6 * GIB)
    write(memory / "job/memory.usage_in_bytes", 3 * GIB)
    write(memory / "job/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}")
    write(cpu / "cpu.cfs_quota_us", 100000)
    write(cpu / "cpu.cfs_period_us", 100000)
    assert (host.total_bytes(), host.available_bytes(), host.cpu_allowance()) == (6 * GIB, 4 * GIB, 1)


def test_a_container_whose_group_path_is_the_hosts_still_finds_its_limit(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "4:memory:/docker/abc")
    write(machine / "cgroup/memory/memory.limit_in_bytes", 3 * GIB)
    write(machine / "cgroup/memory/memory.usage_in_bytes", 1 * GIB)
    assert host.available_bytes() == 2 * GIB


def test_a_group_above_its_limit_leaves_nothing(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/")
    write(machine / "cgroup/memory.max", GIB)
    write(machine / "cgroup/memory.current", 2 * GIB)
    assert host.available_bytes() == 0


@pytest.mark.parametrize(
    ("flags", "arch", "fast"),
    [
        ("fpu sse2", "generic", False),
        ("avx avx2", "avx2", False),
        ("avx2 avx512f", "avx512", False),
        ("avx2 avx512f avx512_bf16", "avx512_bf16", True),
        ("avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "amx_bf16", True),
    ],
)
def test_instruction_sets_decide_arch_and_preferred_dtype(machine: Path, flags: str, arch: str, fast: bool) -> None:
    write(machine / "proc/cpuinfo", f"processor\t: 0\nmodel name\t: Made Up 9000\nflags\t\t: {flags}")
    platform = CpuPlatform()
    (device,) = platform.devices()
    assert (device.name, device.arch) == ("Made Up 9000", arch)
    assert platform.capabilities.dtypes[0] == ("bfloat16" if fast else "float32")
    assert set(device.dtypes) == {"float32", "bfloat16", "float16"}
    assert arch in installed().find("platform", "cpu").table.archs


def test_an_arm_machine_is_known_by_its_features(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")
    write(machine / "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd bf16")
    assert (host.architecture(), host.bfloat16_is_fast()) == ("neon", True)


def test_the_cache_takes_half_of_what_is_free_and_at_most_4_gib(machine: Path) -> None:
    (change,) = CpuPlatform().propose(EngineConfig())
    assert (change.path, change.value) == ("cache.kv_cache_memory_bytes", 4 * GIB)
    write(machine / "proc/meminfo", f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {6 * GIB // 1024} kB")
    (change,) = CpuPlatform().propose(EngineConfig())
    assert change.value == 3 * GIB


@pytest.mark.parametrize("cache", [CacheConfig(kv_cache_memory_bytes=GIB), CacheConfig(num_blocks=9)])
def test_the_operators_cache_size_is_left_alone(cache: CacheConfig) -> None:
    assert CpuPlatform().propose(EngineConfig(cache=cache)) == ()


def test_memory_is_this_process() -> None:
    platform = CpuPlatform()
    platform.reset_peak()
    before = platform.memory()
    held = torch.ones(200 << 20, dtype=torch.uint8)
    during = platform.memory()
    assert 0 < during.free_bytes <= during.total_bytes
    assert during.peak_bytes - before.peak_bytes > 150 << 20
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return  # the kernel, or a read-only /proc, keeps the peak of the whole process
    del held
    platform.empty_cache()
    platform.reset_peak()
    assert platform.memory().peak_bytes < during.peak_bytes - (100 << 20)


def test_there_is_one_device() -> None:
    platform = CpuPlatform()
    platform.bind(0)
    with pytest.raises(UsageError, match="no device 1"):
        platform.bind(1)


def test_threads_stay_within_the_allowance(machine: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        CpuPlatform().bind(0)
        assert torch.get_num_threads() == 2  # fewer than allowed is the operator's choice
        write(machine / "proc/self/cgroup", "0::/")
        write(machine / "cgroup/cpu.max", "100000 100000")
        CpuPlatform().bind(0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_tensors_are_on_the_device_already() -> None:
    platform = CpuPlatform()
    tensor = torch.arange(3)
    assert platform.from_host(tensor) is tensor
    assert platform.to_host(tensor) is tensor
    platform.synchronize()


def test_a_seed_gives_the_same_numbers() -> None:
    platform = CpuPlatform()
    platform.manual_seed(4)
    first = torch.rand(3)
    platform.manual_seed(4)
    assert torch.equal(torch.rand(3), first)


def test_the_probe_names_the_processor() -> None:
    (device,) = probe().devices
    assert device.name
    assert device.total_bytes
    assert device.arch in installed().find("platform", "cpu").table.archs


def test_the_probe_imports_no_torch() -> None:
    code = "import sys; from octavo.backends.cpu.probe import probe; probe(); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
