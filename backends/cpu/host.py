"""What the operating system says of this machine and of this process's share of it. No torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "architecture",
    "available_bytes",
    "bfloat16_is_fast",
    "cpu_allowance",
    "cpu_name",
    "peak_bytes",
    "reset_peak",
    "total_bytes",
]

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # cgroup v1 writes a number near 2^63 for "no limit"
_X86_ARCHS = {
    "amx_bf16": "amx_bf16",
    "avx512_bf16": "avx512_bf16",
    "avx512f": "avx512",
    "avx2": "avx2",
}  # flag → word, best first
_ARM_ARCHS = {"bf16": "neon", "asimd": "neon"}


def architecture() -> str:
    """The manifest's word for this processor."""
    flags = cpu_flags()
    known = _X86_ARCHS if platform.machine() in ("x86_64", "AMD64") else _ARM_ARCHS
    return next((word for flag, word in known.items() if flag in flags), "generic")


def bfloat16_is_fast() -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    return not cpu_flags().isdisjoint({"amx_bf16", "avx512_bf16", "bf16"})


def cpu_flags() -> frozenset[str]:
    """Instruction set flags, in the kernel's words."""
    return frozenset((_cpuinfo("flags") or _cpuinfo("Features") or "").split())


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "CPU"


def cpu_allowance() -> int:
    """Processors that this process may keep busy: its affinity, and its control group's quota rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders("cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([affinity, *(-(-int(quota * 1000) // 1000) for quota in quotas)]))


def total_bytes() -> int:
    """Memory of the machine, or the tightest limit of the process's control groups."""
    limits = [limit for folder in _cgroup_folders("memory") if (limit := _memory_limit(folder)) is not None]
    return min([_meminfo("MemTotal"), *limits])


def available_bytes() -> int:
    """Memory that this process may still take without swapping, within its control groups' limits."""
    free = [_meminfo("MemAvailable")]
    for folder in _cgroup_folders("memory"):
        limit = _memory_limit(folder)
        if limit is not None:
            free.append(max(0, limit - _memory_in_use(folder)))
    return min(free)


def peak_bytes() -> int:
    """The most memory this process has had resident since `reset_peak`."""
    status = _read(_PROC / "self/status") or ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def reset_peak() -> None:
    """Let `peak_bytes` start again from what is resident now, where the kernel can."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return  # no such file, or /proc is read-only: the peak stays that of the whole process


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """The process's control groups for a controller, its own first and then the enclosing ones; both versions.

    Inside a container the path in /proc/self/cgroup may be the host's and not exist; then the mounted root is the container's.
    """
    for line in (_read(_PROC / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        own = root / path.strip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root) and folder.is_dir())


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name)
        if text and text.strip().isdigit() and int(text) < _UNLIMITED:
            return int(text)
    return None


def _memory_in_use(folder: Path) -> int:
    """Bytes charged to the group, without file pages that the kernel would drop first."""
    for usage, droppable in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        text = _read(folder / usage)
        if text is not None:
            return max(0, int(text) - _stat(folder / "memory.stat", droppable))
    return 0


def _stat(path: Path, key: str) -> int:
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _cpu_quota(folder: Path) -> float | None:
    """Processors' worth of time that the group may use, or None without a limit."""
    combined = _read(folder / "cpu.max")
    if combined is not None:
        quota, period = combined.split()
        return None if quota == "max" else int(quota) / int(period)
    separate = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if separate[0] is None or separate[1] is None or int(separate[0]) <= 0:
        return None
    return int(separate[0]) / int(separate[1])


def _meminfo(key: str) -> int:
    for line in (_read(_PROC / "meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpuinfo(key: str) -> str | None:
    for line in (_read(_PROC / "cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
