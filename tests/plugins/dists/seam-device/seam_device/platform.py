"""`SeamPlatform`: the host's memory under another name. Whatever crosses to it is copied, so nothing can rely on sharing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from octavo.api.config import EngineConfig
from octavo.api.errors import UsageError
from octavo.api.manifest import Reason
from octavo.api.platform import Array, ConfigChange, DeviceInfo, MemoryInfo, Platform, PlatformCapabilities

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SeamPlatform"]

_DTYPES = ("float32", "bfloat16")
_TOTAL_BYTES = 256 << 20
_KV_BYTES = 1 << 20


class SeamPlatform(Platform):
    """Devices 0 and 1, of 256 MiB each by their own account."""

    name = "seam-device"
    device_type = "cpu"
    capabilities = PlatformCapabilities(dtypes=_DTYPES)

    def __init__(self) -> None:
        self.bound: int | None = None
        self._taken_bytes = 0
        self._peak_bytes = 0

    def devices(self) -> Sequence[DeviceInfo]:
        return [
            DeviceInfo(index=index, name=f"seam device {index}", total_bytes=_TOTAL_BYTES, dtypes=_DTYPES) for index in range(2)
        ]

    def bind(self, index: int) -> None:
        if index not in (0, 1):
            raise UsageError(f"platform 'seam-device' has devices 0 and 1; there is no device {index}")
        self.bound = index

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free_bytes=_TOTAL_BYTES - self._taken_bytes, total_bytes=_TOTAL_BYTES, peak_bytes=self._peak_bytes)

    def reset_peak(self) -> None:
        self._peak_bytes = self._taken_bytes

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def from_host(self, tensor: Tensor, *, non_blocking: bool = False) -> Array:
        return tensor.clone()

    def to_host(self, array: Array) -> Tensor:
        copy: Tensor = array.clone()
        return copy

    def propose(self, config: EngineConfig) -> Sequence[ConfigChange]:
        if config.cache.kv_cache_memory_bytes is not None or config.cache.num_blocks is not None:
            return ()
        return [ConfigChange(path="cache.kv_cache_memory_bytes", value=_KV_BYTES, reason="a seam device is small")]

    def reject(self, config: EngineConfig) -> Sequence[Reason]:
        if config.scheduler.max_num_seqs <= 512:
            return ()
        return [Reason(field="max_num_seqs", wanted=str(config.scheduler.max_num_seqs), supported="512 or less")]
