"""`PyaccelPlatform`: Octavo on a device that isn't a CPU, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

import pyaccel
from octavo.api.errors import PluginUnavailable, UsageError
from octavo.api.platform import Array, ConfigChange, DeviceInfo, MemoryInfo, Platform, PlatformCapabilities
from pyaccel import device_module

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.api.config import EngineConfig

__all__ = ["PyaccelPlatform"]

_DTYPES = ("float32", "bfloat16", "float16")
_MOST_KV_BYTES = 256 << 20


class PyaccelPlatform(Platform):
    """The devices that `pyaccel.install` made (or makes now, as the environment says)."""

    name = "pyaccel"
    device_type = "pyaccel"
    capabilities = PlatformCapabilities(dtypes=_DTYPES, streams=True, pinned_memory=True, async_scheduling=True)

    def __init__(self) -> None:
        try:
            self._settings = pyaccel.installed() or pyaccel.install(self.device_type)
        except pyaccel.BuildError as error:
            raise PluginUnavailable(str(error)) from error
        if self._settings.name != self.device_type:
            raise PluginUnavailable(
                f"platform 'pyaccel' needs the device's own name, and it is installed as {self._settings.name!r}",
                hint="unset PYACCEL_NAME",
            )
        self._device = torch.device(self.device_type, device_module.current_device())

    def devices(self) -> Sequence[DeviceInfo]:
        return tuple(
            DeviceInfo(
                index=index,
                name=device_module.get_device_name(index),
                total_bytes=device_module.mem_get_info(index)[1],
                dtypes=_DTYPES,
            )
            for index in range(device_module.device_count())
        )

    def bind(self, index: int) -> None:
        count = device_module.device_count()
        if not 0 <= index < count:
            raise UsageError(f"platform 'pyaccel' has devices 0 to {count - 1}; there is no device {index}")
        device_module.set_device(index)
        self._device = torch.device(self.device_type, index)

    def memory(self) -> MemoryInfo:
        free_bytes, total_bytes = device_module.mem_get_info(self._device)
        peak_bytes = device_module.max_memory_allocated(self._device)
        return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes, peak_bytes=peak_bytes)

    def reset_peak(self) -> None:
        device_module.reset_peak_memory_stats(self._device)

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def synchronize(self) -> None:
        device_module.synchronize(self._device)

    def manual_seed(self, seed: int) -> None:
        with device_module.device(self._device):
            device_module.manual_seed(seed)

    def from_host(self, tensor: Tensor, *, non_blocking: bool = False) -> Array:
        return tensor.to(self._device, non_blocking=non_blocking)

    def to_host(self, array: Array) -> Tensor:
        """The one place where a copy to the host is planned: strict mode lets it pass."""
        with pyaccel.planned():
            tensor: Tensor = array.cpu()
        return tensor

    def fetch(self, array: Array) -> Callable[[], Tensor]:
        """Queued on the current stream; what the host sees before it waits is junk."""
        target = torch.empty_like(array, device="cpu", pin_memory=True)
        with pyaccel.planned():
            target.copy_(array, non_blocking=True)
        arrived = device_module.Event()
        arrived.record(device_module.current_stream(self._device))

        def wait() -> Tensor:
            arrived.synchronize()
            return target

        return wait

    def propose(self, config: EngineConfig) -> Sequence[ConfigChange]:
        """Device memory is borrowed from the host's: the cache takes a small part of it, unless told otherwise."""
        if config.cache.kv_cache_memory_bytes is not None or config.cache.num_blocks is not None:
            return ()
        size_bytes = min(_MOST_KV_BYTES, self.memory().free_bytes // 2)
        reason = "the lesser of 256 MiB and half of the free device memory, which is really the host's"
        return (ConfigChange(path="cache.kv_cache_memory_bytes", value=size_bytes, reason=reason),)
