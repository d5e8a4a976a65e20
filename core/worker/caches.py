"""`GroupCaches`: one attention group at run time: its backend, its layers' caches, its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from octavo.core.api.attention import (
    AttentionBackend,
    AttentionGroup,
    AttentionResult,
    GroupBatch,
    Int32Array,
    KVBuffers,
    LayerParams,
    Plan,
)
from octavo.core.api.errors import OctavoError, Unsupported
from octavo.core.api.kv_cache import NULL_BLOCK
from octavo.core.api.platform import Array
from octavo.core.discovery.loading import root_cause
from octavo.core.layers.context import LayerCache
from octavo.core.worker.named import allocated, is_out_of_memory, named

__all__ = ["GroupCaches"]


class GroupCaches:
    """The layers of one group with their caches. ``runs`` tells, by layer, which backend really ran it."""

    def __init__(self, group: AttentionGroup, backend: AttentionBackend, params: Sequence[LayerParams], num_units: int) -> None:
        """Allocate ``num_units`` blocks (or states) a layer. ``params`` are those of every layer of the model."""
        self.group = group
        self.backend = backend
        self.runs: dict[int, str] = {}
        self.num_bytes = 0
        own = [index for index in group.layers if params[index].kv_source_layer is None]
        buffers = allocated(backend, num_units, group.layers, own) if own else ()
        self.num_bytes = backend.kv_format().bytes_per_unit * num_units * len(buffers)
        # A backend gives one cache a layer, and may leave out those that share another's.
        layers = group.layers if len(buffers) == len(group.layers) else own
        caches: Mapping[int, KVBuffers] = dict(zip(layers, buffers, strict=True))
        self.layers = [
            LayerCache(backend=backend, params=params[index], kv=caches[index] if index in own else {})
            for index in group.layers
        ]
        for layer in self.layers:
            layer.backend = _FirstRun(layer, backend, self)  # type: ignore[assignment]

    def copy_blocks(self, pairs: Int32Array) -> None:
        """Copy whole blocks of every layer, ``pairs`` [n, 2] = (source, target); every source is read as it was before."""
        for wave in in_waves(pairs):
            for layer in self.layers:
                if layer.kv:
                    layer.kv = self.backend.copy_blocks(layer.kv, wave)

    def plan(self, batch: GroupBatch) -> None:
        """Plan the step, once for all layers."""
        plan = named(f"attention backend {self.backend.manifest.name!r}", "plan()", lambda: self.backend.plan(batch))
        for layer in self.layers:
            layer.plan = plan


def in_waves(pairs: Int32Array) -> Iterator[Int32Array]:
    """The pairs (source, target) in parts, one after the other, within each of which no source is a target.

    A step may copy into a block that it also copies from, when the block was given back in between. A ring of such copies goes
    through the null block, whose content is nobody's. Targets are distinct.
    """
    left = pairs[pairs[:, 0] != pairs[:, 1]]
    while len(left):
        waiting = np.isin(left[:, 1], left[:, 0])  # somebody has yet to read what lies there
        if waiting.all():
            source = left[0, 0]
            yield np.array([[source, NULL_BLOCK]], np.int32)
            left[left[:, 0] == source, 0] = NULL_BLOCK
        else:
            yield left[~waiting]
            left = left[waiting]


class _FirstRun:
    """Stands in a layer's place for its backend until the layer has run once: notes who ran it, and checks what it gave.

    A backend that declares more than it can do fails here, with its name, before anything depends on its output. Later runs
    reach the backend directly.
    """

    def __init__(self, layer: LayerCache, backend: AttentionBackend, caches: GroupCaches) -> None:
        self._layer = layer
        self._backend = backend
        self._caches = caches

    def forward(
        self, q: Array, k: Array | None, v: Array | None, kv: KVBuffers, plan: Plan, params: LayerParams, out: Array
    ) -> AttentionResult:
        index, spec = params.index, self._caches.group.spec
        name = self._backend.manifest.name
        try:
            result = self._backend.forward(q, k, v, kv, plan, params, out)
        except OctavoError:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            raise Unsupported(
                f"attention backend {name!r} failed in layer {index}, which its manifest declares to support "
                f"({spec.kind}, head_dim {spec.head_dim}, {spec.dtype}, KV {spec.kv_dtype}): {root_cause(error)}",
                hint="choose another with --attention-backend, and tell the backend's makers",
            ) from error
        given = _described(result)
        expected = f"{(q.shape[0], spec.num_heads, spec.head_dim_v)} {q.dtype} on {q.device}"
        if given != expected:
            raise Unsupported(f"attention backend {name!r} gave {given} in layer {index}, expected {expected}")
        self._caches.runs[index] = name
        self._layer.backend = self._backend
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def _described(result: Any) -> str:
    """Shape, dtype and device of what a backend gave; its type where it isn't an array with a cache."""
    if not isinstance(result, AttentionResult):
        return f"a {type(result).__name__}, no AttentionResult,"
    out, kv = result.out, cast("Any", result.kv)
    if not all(hasattr(out, name) for name in ("shape", "dtype", "device")):
        return f"a {type(out).__name__}"
    if not isinstance(kv, Mapping):
        return f"a {type(kv).__name__} as its cache"
    return f"{tuple(out.shape)} {out.dtype} on {out.device}"
