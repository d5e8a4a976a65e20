"""`WorkerPlatform`: the host's memory under another name, with a worker of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from octavo.api.errors import UsageError
from octavo.api.executor import WorkerFactory
from octavo.api.platform import Array, DeviceInfo, MemoryInfo, Platform, PlatformCapabilities

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WorkerPlatform"]

_TOTAL_BYTES = 64 << 20


class WorkerPlatform(Platform):
    name = "seam-worker"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def devices(self) -> Sequence[DeviceInfo]:
        return [DeviceInfo(index=0, name="seam worker 0", total_bytes=_TOTAL_BYTES, dtypes=("float32",))]

    def bind(self, index: int) -> None:
        if index:
            raise UsageError(f"platform 'seam-worker' has one device, 0; there is no device {index}")

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free_bytes=_TOTAL_BYTES, total_bytes=_TOTAL_BYTES, peak_bytes=0)

    def reset_peak(self) -> None:
        """There is none."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def from_host(self, tensor: Tensor, *, non_blocking: bool = False) -> Array:
        return tensor

    def to_host(self, array: Array) -> Tensor:
        tensor: Tensor = array
        return tensor

    def worker_factory(self) -> WorkerFactory:
        from seam_worker.worker import CountingWorker

        return CountingWorker
