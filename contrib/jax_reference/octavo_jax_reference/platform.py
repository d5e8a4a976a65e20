"""`JaxPlatform`: the host's CPU as JAX sees it. Its arrays are JAX's; torch only carries them to and from the caller."""

from __future__ import annotations

import os
import platform as host
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from octavo.api.errors import UsageError
from octavo.api.manifest import Reason
from octavo.api.platform import DeviceInfo, MemoryInfo, Platform, PlatformCapabilities

if TYPE_CHECKING:
    from octavo.api.config import EngineConfig

DTYPES = {
    "float32": jnp.float32,
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
    "int8": jnp.int8,
}
_ACTIVATIONS = ("float32", "bfloat16", "float16")
# Formats that NumPy lacks cross as the integers of their width.
_CARRIERS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_FROM_NUMPY = {np.dtype(extended): (carrier, dtype) for dtype, (carrier, extended) in _CARRIERS.items()}


class JaxPlatform(Platform):
    """One device. 64-bit integers stay 64 bits wide: `bind` turns that on in JAX."""

    name = "jax-cpu"
    device_type = "none"
    capabilities = PlatformCapabilities(dtypes=_ACTIVATIONS)

    def devices(self) -> Sequence[DeviceInfo]:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [DeviceInfo(index=0, name=host.processor() or host.machine(), total_bytes=total, dtypes=_ACTIVATIONS)]

    def bind(self, index: int) -> None:
        if index != 0:
            raise UsageError(f"jax-cpu has no device {index}", hint="its only device is 0")
        jax.config.update("jax_enable_x64", True)

    def memory(self) -> MemoryInfo:
        total = self.devices()[0].total_bytes
        held = sum(array.nbytes for array in jax.live_arrays())
        return MemoryInfo(free_bytes=max(0, total - held), total_bytes=total, peak_bytes=held)

    def reset_peak(self) -> None:
        """Nothing to do: the peak is what is held now, as JAX keeps no record of more on a CPU."""

    def empty_cache(self) -> None:
        """Nothing to do: JAX keeps no cache of freed host memory."""

    def synchronize(self) -> None:
        for array in jax.live_arrays():
            array.block_until_ready()

    def manual_seed(self, seed: int) -> None:
        """Nothing to do: JAX has no default generator, every draw is given its key."""

    def from_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> jax.Array:
        if tensor.dtype in _CARRIERS:
            carrier, extended = _CARRIERS[tensor.dtype]
            return jnp.array(tensor.contiguous().view(carrier).numpy().view(extended))
        return jnp.array(tensor.numpy())

    def to_host(self, array: jax.Array) -> torch.Tensor:
        values = np.array(array)
        if values.dtype in _FROM_NUMPY:
            carrier, dtype = _FROM_NUMPY[values.dtype]
            integers = np.int16 if carrier is torch.int16 else np.uint8
            return torch.from_numpy(values.view(integers)).view(dtype)
        return torch.from_numpy(values)

    def zeros(self, shape: Sequence[int], dtype: str) -> jax.Array:
        return jnp.zeros(tuple(shape), DTYPES[dtype])

    def reject(self, config: EngineConfig) -> Sequence[Reason]:
        return [
            Reason(field="platform", wanted="a model run by a torch worker", supported="attention alone", hint="--platform cpu")
        ]
