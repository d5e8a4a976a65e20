"""`Platform`: the devices of one kind, and what they can do. One instance a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.core.api.manifest import Reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.core.api.executor import WorkerFactory
    from octavo.core.config import EngineConfig

__all__ = [
    "Array",
    "ConfigChange",
    "DeviceInfo",
    "MemoryInfo",
    "Platform",
    "PlatformCapabilities",
]

Array: TypeAlias = Any
"""Whatever the platform computes with: a torch tensor, a JAX array, … Opaque to core."""


@dataclass(frozen=True, kw_only=True)
class PlatformCapabilities:
    """What the platform offers; everything defaults to off. Ask these, never the platform's name."""

    dtypes: tuple[str, ...] = ("float32",)  # activation dtypes, best first: ``--dtype auto`` takes the first
    streams: bool = False  # device work is queued: reading a result needs a synchronisation
    pinned_memory: bool = False  # of torch, for the device: steps are sent from it, so that sending need not wait
    async_scheduling: bool = True


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device. ``total_bytes`` is its memory, or the host's where the device is the host."""

    index: int
    name: str
    total_bytes: int
    dtypes: tuple[str, ...]
    uuid: str | None = None
    arch: str | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryInfo:
    """Bytes of the bound device: ``free_bytes`` that this process may still take, and the most it has held at once."""

    free_bytes: int
    total_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class ConfigChange:
    """A change that a platform asks for; core applies and logs it. ``path`` is dotted: ``"cache.block_size"``."""

    path: str
    value: Any
    reason: str


class Platform(ABC):
    """The devices of one kind. Core constructs it without arguments, then calls `bind` once in each worker."""

    name: str
    device_type: str  # a torch device type, or "none" for a platform with arrays of its own
    capabilities: PlatformCapabilities

    @abstractmethod
    def devices(self) -> Sequence[DeviceInfo]:
        """Every device, by index."""

    @abstractmethod
    def bind(self, index: int) -> None:
        """Make device ``index`` this process's device. Raises `UsageError` when there is no such device."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Memory of the bound device now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let ``memory().peak_bytes`` start again from what is held now."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused cached memory back to the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the bound device to finish what was queued."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the bound device's default generator."""

    @abstractmethod
    def from_host(self, tensor: Tensor, *, non_blocking: bool = False) -> Array:
        """A copy of a CPU tensor on the bound device (the tensor itself where the device is the host)."""

    @abstractmethod
    def to_host(self, array: Array) -> Tensor:
        """A CPU tensor with the array's values; waits for them."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """A new zeroed array on the bound device; ``dtype`` is a word (`octavo.core.api.attention.DTYPE_BYTES`).

        Default: torch's. Where the device is the host, memory that the system hands out zeroed is not touched before use:
        a KV cache of gigabytes is there at once.
        """
        import torch

        from octavo.core.layers.dtypes import torch_dtype

        probe = torch.empty(0)
        moved = self.from_host(probe)
        if moved is not probe:  # a thread's current device needn't be the bound one
            return torch.zeros(tuple(shape), dtype=torch_dtype(dtype), device=moved.device)
        return _untouched_zeros(shape, torch_dtype(dtype))

    def fetch(self, array: Array) -> Callable[[], Tensor]:
        """Start copying ``array`` to the host; calling the result waits for it, on any thread.

        Default: copies at once. A platform with streams queues the copy behind the work submitted so far and waits for that
        alone, so that a later step can be launched before this one's result is read.
        """
        tensor = self.to_host(array)
        return lambda: tensor

    def propose(self, config: EngineConfig) -> Sequence[ConfigChange]:
        """Changes to fields that the operator left open. Never mutates ``config``."""
        return ()

    def reject(self, config: EngineConfig) -> Sequence[Reason]:
        """Reasons why the final configuration can't run here; empty when it can."""
        return ()

    def worker_factory(self) -> WorkerFactory | None:
        """A worker of the platform's own, or None for core's torch worker."""
        return None


_CACHE_LINE_BYTES = 64


def _untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the host, aligned to a cache line, in pages that the system maps when they are first written."""
    import numpy as np
    import torch

    size_bytes = prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size_bytes + _CACHE_LINE_BYTES, np.uint8))
    start = -raw.data_ptr() % _CACHE_LINE_BYTES
    return raw[start : start + size_bytes].view(dtype).view(tuple(shape))
