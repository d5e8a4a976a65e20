"""Moving small arrays between host and device in one copy: every transfer costs more than its bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.api.platform import Platform

__all__ = ["Download", "Transfers"]

_ALIGN_BYTES = 16
_TORCH: Mapping[Any, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Transfers:
    """Copies of one worker between host and device, counted."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.host_to_device = 0
        self.device_to_host = 0

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """The arrays (int32, int64, float32) on the device, sent as one buffer; each result is a view of it."""
        words = [-(-array.nbytes // _ALIGN_BYTES) * (_ALIGN_BYTES // 4) for array in arrays.values()]
        # A new buffer each time: on a host platform the device's tensor is this very memory, and may be kept.
        memory = torch.empty(sum(words), dtype=torch.int32, pin_memory=self._platform.capabilities.pinned_memory)
        buffer: NDArray[np.int32] = memory.numpy()
        start = 0
        for array, size in zip(arrays.values(), words, strict=True):
            buffer[start : start + array.nbytes // 4].view(array.dtype)[:] = array.reshape(-1)
            start += size
        self.host_to_device += 1
        pieces = self._platform.from_host(memory, non_blocking=True).split(words)
        return {
            name: piece[: array.nbytes // 4].view(_TORCH[array.dtype]).view(array.shape)
            for (name, array), piece in zip(arrays.items(), pieces, strict=True)
        }

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start copying device tensors (int32, float32) to the host in one copy."""
        self.device_to_host += 1
        flat = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat)
        layout = [(tuple(tensor.shape), np.float32 if tensor.is_floating_point() else np.int32) for tensor in tensors]
        return Download(self._platform.fetch(packed), layout)


class Download:
    """Tensors on their way to the host."""

    def __init__(self, fetch: Callable[[], Tensor], layout: Sequence[tuple[tuple[int, ...], type[np.generic]]]) -> None:
        self._fetch = fetch
        self._layout = layout

    def wait(self) -> list[NDArray[Any]]:
        """The tensors' values, in the order given, once they are here."""
        buffer: NDArray[np.int32] = self._fetch().numpy()
        arrays, start = [], 0
        for shape, dtype in self._layout:
            size = prod(shape)
            arrays.append(buffer[start : start + size].view(dtype).reshape(shape))
            start += size
        return arrays
