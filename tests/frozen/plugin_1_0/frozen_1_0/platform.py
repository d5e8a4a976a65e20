"""The host, under another name."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from octavo.api.errors import UsageError
from octavo.api.platform import DeviceInfo, MemoryInfo, Platform, PlatformCapabilities


class FrozenPlatform(Platform):
    """Every abstract method of 1.0, and nothing that came later."""

    device_type = "cpu"
    capabilities = PlatformCapabilities(dtypes=("float32", "bfloat16"))

    def devices(self) -> Sequence[DeviceInfo]:
        return [DeviceInfo(index=0, name="frozen", total_bytes=_total_bytes(), dtypes=("float32", "bfloat16"), arch="new")]

    def bind(self, index: int) -> None:
        if index != 0:
            raise UsageError(f"frozen-host has no device {index}")

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free_bytes=_total_bytes() // 2, total_bytes=_total_bytes(), peak_bytes=0)

    def reset_peak(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def from_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        return tensor

    def to_host(self, array: torch.Tensor) -> torch.Tensor:
        return array


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
