"""``torch.<name>``: the functions that torch and its users expect of a device's module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

__all__ = [
    "DeviceProperties",
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reads_are_errors",
    "reset_peak_memory_stats",
    "seed",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]

Device: TypeAlias = torch.device | int | str | None


@dataclass(frozen=True)
class DeviceProperties:
    """What there is to know of one device."""

    name: str
    total_memory: int  # bytes
    multi_processor_count: int = 1


device_type = ""  # the name that the device was installed under


def _index(device: Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def reads_are_errors() -> bool:
    """Whether this thread may not read device values now."""
    knobs = torch.ops.pyaccel
    return bool(knobs.strictness() > 0 and not knobs.planned())


def init() -> None:
    """Nothing is left to do once the library is loaded."""


_lazy_init = init


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False  # nothing here is lost in a fork


def device_count() -> int:
    return int(torch.ops.pyaccel.device_count())


def current_device() -> int:
    return int(torch.ops.pyaccel.current_device())


def set_device(device: Device) -> None:
    torch.ops.pyaccel.set_device(_index(device))


@contextmanager
def device(device: Device) -> Iterator[None]:
    """Make ``device`` the current one inside."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Device = None) -> str:
    return f"{device_type} test device {_index(device)}"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    return (1, 0)


def get_device_properties(device: Device = None) -> DeviceProperties:
    return DeviceProperties(get_device_name(device), _memory(device)[2])


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


# ---- streams and events


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:  # noqa: N802 - a class elsewhere
    """A new stream of ``device``."""
    return torch.Stream(torch.device(device_type, _index(device)), priority=priority)


def Event(enable_timing: bool = False, **_: Any) -> torch.Event:  # noqa: N802 - a class elsewhere
    """A new event of the current device."""
    return torch.Event(torch.device(device_type, current_device()), enable_timing=enable_timing)


def current_stream(device: Device = None) -> torch.Stream:
    return cast(torch.Stream, torch.ops.pyaccel.current_stream(_index(device)))


def default_stream(device: Device = None) -> torch.Stream:
    return cast(torch.Stream, torch.ops.pyaccel.default_stream(_index(device)))


def set_stream(stream: torch.Stream) -> None:
    """Make ``stream`` and its device current."""
    set_device(stream.device)
    torch.ops.pyaccel.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Queue work on ``stream`` inside; None changes nothing."""
    if stream is None:
        yield
        return
    with device(stream.device):
        before = current_stream()
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


def synchronize(device: Device = None) -> None:
    """Wait for every stream of ``device``."""
    torch.ops.pyaccel.synchronize(_index(device))


# ---- memory, in bytes


def _memory(device: Device) -> tuple[int, int, int, int]:
    held, peak, limit, failures = torch.ops.pyaccel.memory(_index(device))
    return held, peak, limit, failures


def memory_allocated(device: Device = None) -> int:
    return _memory(device)[0]


def max_memory_allocated(device: Device = None) -> int:
    return _memory(device)[1]


memory_reserved = memory_allocated  # nothing is cached
max_memory_reserved = max_memory_allocated


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total)."""
    held, _, limit, _ = _memory(device)
    return max(0, limit - held), limit


def memory_stats(device: Device = None) -> dict[str, int]:
    held, peak, limit, failures = _memory(device)
    return {"allocated_bytes.all.current": held, "allocated_bytes.all.peak": peak, "limit_bytes": limit, "num_ooms": failures}


def reset_peak_memory_stats(device: Device = None) -> None:
    torch.ops.pyaccel.reset_peak(_index(device))


def empty_cache() -> None:
    """Nothing is cached."""


# ---- random numbers


def manual_seed(seed: int) -> None:
    torch.ops.pyaccel.seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        torch.ops.pyaccel.seed(index, seed)


def seed() -> None:
    manual_seed(torch.seed())


def initial_seed() -> int:
    return int(torch.ops.pyaccel.initial_seed(current_device()))


def get_rng_state(device: Device = None) -> torch.Tensor:
    state: torch.Tensor = torch.ops.pyaccel.rng_state(_index(device))
    return state


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    torch.ops.pyaccel.set_rng_state(_index(device), new_state)
