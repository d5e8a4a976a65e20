"""Calls into plugins: what their code raises or returns wrongly becomes an error that names who it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from octavo.core.api.attention import DTYPE_BYTES, AttentionBackend, BufferSpec, KVBuffers, KVFormat
from octavo.core.api.errors import OctavoError, PluginError
from octavo.core.api.platform import MemoryInfo, Platform
from octavo.core.discovery.loading import root_cause

__all__ = ["allocated", "free_memory", "is_out_of_memory", "kv_format", "named"]

_T = TypeVar("_T")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed; the host's has no exception of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def named(who: str, method: str, call: Callable[[], _T]) -> _T:
    """``call()``. Raises `PluginError` with ``who`` in it; typed errors and an allocator's failure stay what they are."""
    try:
        return call()
    except OctavoError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise PluginError(f"{who} failed in {method}: {root_cause(error)}") from error


def free_memory(platform: Platform) -> MemoryInfo:
    """The bound device's memory. Raises `PluginError` for anything but a `MemoryInfo` of whole numbers."""
    who = f"platform {platform.name!r}"
    memory = named(who, "memory()", platform.memory)
    if not isinstance(memory, MemoryInfo) or not all(
        isinstance(size, int) for size in (memory.free_bytes, memory.total_bytes, memory.peak_bytes)
    ):
        raise PluginError(f"{who} answers memory() with {memory!r}, not a MemoryInfo of whole numbers")
    return memory


def kv_format(backend: AttentionBackend) -> KVFormat:
    """What a layer's cache is made of. Raises `PluginError` for what isn't a `KVFormat` that takes some bytes."""
    who = f"attention backend {backend.manifest.name!r}"
    found: Any = named(who, "kv_format()", backend.kv_format)
    if not isinstance(found, KVFormat) or not isinstance(found.buffers, Mapping) or not found.buffers:
        raise PluginError(f"{who} answers kv_format() with {found!r}, not a KVFormat with named buffers")
    if found.unit not in ("block", "request"):
        raise PluginError(f"{who} answers kv_format() with unit {found.unit!r}, expected 'block' or 'request'")
    for name, buffer in found.buffers.items():
        if not isinstance(buffer, BufferSpec) or buffer.dtype not in DTYPE_BYTES or not _is_shape(buffer.shape):
            raise PluginError(
                f"{who} answers kv_format() with {buffer!r} as buffer {name!r}, not a BufferSpec with a shape and a dtype"
            )
    return found


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, Sequence) and all(isinstance(size, int) and size > 0 for size in shape)


def allocated(backend: AttentionBackend, num_units: int, layers: Sequence[int], own: Sequence[int]) -> Sequence[KVBuffers]:
    """One cache for each of ``layers``, or for each of ``own`` alone. Raises `PluginError` for any other number."""
    who = f"attention backend {backend.manifest.name!r}"
    buffers: Any = named(who, "allocate_kv()", lambda: backend.allocate_kv(num_units))
    if not isinstance(buffers, Sequence) or len(buffers) not in (len(layers), len(own)):
        given = f"{len(buffers)} caches" if isinstance(buffers, Sequence) else f"a {type(buffers).__name__}"
        raise PluginError(f"{who} answers allocate_kv() with {given}, expected {len(own)}: one a layer")
    return buffers
