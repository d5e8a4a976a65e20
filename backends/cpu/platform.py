"""`CpuPlatform`: the machine's processors as one device, whose memory is the process's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from octavo.api.errors import UsageError
from octavo.api.platform import Array, ConfigChange, DeviceInfo, MemoryInfo, Platform, PlatformCapabilities
from octavo.backends.cpu import host

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.core.config import EngineConfig

__all__ = ["CpuPlatform"]

_MOST_KV_BYTES = 4 * 2**30


class CpuPlatform(Platform):
    """One device, index 0. ``from_host`` and ``to_host`` give the tensor itself."""

    name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        fast_first = ("bfloat16", "float32", "float16") if host.bfloat16_is_fast() else ("float32", "bfloat16", "float16")
        self.capabilities = PlatformCapabilities(dtypes=fast_first)

    def devices(self) -> Sequence[DeviceInfo]:
        device = DeviceInfo(
            index=0,
            name=host.cpu_name(),
            total_bytes=host.total_bytes(),
            dtypes=self.capabilities.dtypes,
            arch=host.architecture(),
        )
        return (device,)

    def bind(self, index: int) -> None:
        """Torch counts the machine's cores; a container or taskset may allow fewer, and more threads than that only wait."""
        if index != 0:
            raise UsageError(f"platform 'cpu' has one device, 0; there is no device {index}")
        allowed = host.cpu_allowance()
        if torch.get_num_threads() > allowed:
            torch.set_num_threads(allowed)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free_bytes=host.available_bytes(), total_bytes=host.total_bytes(), peak_bytes=host.peak_bytes())

    def reset_peak(self) -> None:
        host.reset_peak()

    def empty_cache(self) -> None:
        """Nothing is cached: freed memory is the allocator's at once."""

    def synchronize(self) -> None:
        """Nothing is queued: an operation is done when its call returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def from_host(self, tensor: Tensor, *, non_blocking: bool = False) -> Array:
        return tensor

    def to_host(self, array: Array) -> Tensor:
        tensor: Tensor = array
        return tensor

    def propose(self, config: EngineConfig) -> Sequence[ConfigChange]:
        """Main memory is everybody's: the cache takes the lesser of 4 GiB and half of what is free, unless told otherwise."""
        if config.cache.kv_cache_memory_bytes is not None or config.cache.num_blocks is not None:
            return ()
        size_bytes = min(_MOST_KV_BYTES, host.available_bytes() // 2)
        reason = "the lesser of 4 GiB and half of the free memory"
        return (ConfigChange(path="cache.kv_cache_memory_bytes", value=size_bytes, reason=reason),)
