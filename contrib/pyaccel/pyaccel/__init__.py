"""pyaccel: a torch device that isn't a CPU, on a CPU.

Its tensors live at addresses that the host can't read; its memory is limited and accounted; it has several devices, streams,
events and generators; it counts what crosses between host and device, and in strict mode refuses the reads that make the host
wait. `install` makes it a device of this process; importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyaccel.build import BuildError
from pyaccel.settings import Settings, Strictness

if TYPE_CHECKING:
    import torch

__all__ = [
    "BuildError",
    "Counters",
    "Settings",
    "count",
    "counters",
    "install",
    "installed",
    "memory_limit",
    "planned",
    "reset_counters",
    "strict",
]

_LEVELS: dict[Strictness, int] = {False: 0, True: 1, "copies": 2}
_installed: Settings | None = None


@dataclass(frozen=True)
class Counters:
    """What happened since the last `reset_counters`. A blocking copy is a copy and a synchronisation."""

    host_to_device: int
    device_to_host: int
    device_to_device: int  # between two devices
    synchronisations: int
    fallback_ops: int  # ops that ran on the device: nearly all run a host kernel behind it

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(mine - theirs for mine, theirs in zip(_fields(self), _fields(other), strict=True)))


def _fields(counters: Counters) -> tuple[int, ...]:
    return tuple(dataclasses.astuple(counters))


def install(
    name: str | None = None,
    *,
    devices: int | None = None,
    memory_bytes: int | None = None,
    strict: Strictness | None = None,
    reserve_bytes: int | None = None,
) -> Settings:
    """Make the device one of this process's, as ``torch.device(name)`` and ``torch.<name>``; returns its settings.

    What isn't given comes from the environment (`Settings.from_environment`), or on a second call stays. A second call may
    change everything but the name: torch allows one such device in a process. Raises `BuildError` where the library is yet to
    be built and can't be, and `RuntimeError` where another device has taken torch's slot for one.
    """
    global _installed
    before = _installed or Settings.from_environment()
    settings = Settings(
        name=before.name if name is None else name,
        devices=before.devices if devices is None else devices,
        memory_bytes=before.memory_bytes if memory_bytes is None else memory_bytes,
        strict=before.strict if strict is None else strict,
        reserve_bytes=before.reserve_bytes if reserve_bytes is None else reserve_bytes,
    )
    if _installed is None:
        from pyaccel.registration import register

        register(settings.name)
    elif settings.name != _installed.name:
        raise RuntimeError(f"the device is called {_installed.name!r} in this process and can't become {settings.name!r}")
    _knobs().configure(settings.devices, settings.memory_bytes, settings.reserve_bytes)
    _knobs().set_strictness(_LEVELS[settings.strict])
    _installed = settings
    return settings


def installed() -> Settings | None:
    """What `install` set, or None before it."""
    return _installed


@contextmanager
def strict(*, copies: bool = False) -> Iterator[None]:
    """Make reads that the host must wait for errors; with ``copies``, also each copy to the host outside `planned`."""
    before = _knobs().strictness()
    _knobs().set_strictness(_LEVELS["copies" if copies else True])
    try:
        yield
    finally:
        _knobs().set_strictness(before)


@contextmanager
def planned() -> Iterator[None]:
    """What this thread reads in here is meant: strict mode lets it pass (and it is counted)."""
    _knobs().plan(1)
    try:
        yield
    finally:
        _knobs().plan(-1)


def counters() -> Counters:
    """The counts of all devices and threads so far."""
    return Counters(*_knobs().counters())


def reset_counters() -> None:
    """Start every count at 0 again."""
    _knobs().reset_counters()


@contextmanager
def count() -> Iterator[list[Counters]]:
    """Count what happens inside: the list yielded holds the one result afterwards."""
    before = counters()
    result: list[Counters] = []
    yield result
    result.append(counters() - before)


def memory_limit(index: int, memory_bytes: int) -> None:
    """Change one device's memory. What is held already stays, over the limit or not."""
    _knobs().set_memory_limit(index, memory_bytes)


def _knobs() -> torch._ops._OpNamespace:
    import torch

    return torch.ops.pyaccel
