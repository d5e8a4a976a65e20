"""`StepContext`: what a model sees of the step it runs, and how it reaches attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.api.attention import AttentionBackend, KVBuffers, LayerParams, Plan
from octavo.core.api.platform import Array

if TYPE_CHECKING:
    from octavo.core.layers.ops import Ops


@dataclass(slots=True)
class LayerCache:
    """A layer's place in the step: its backend, its group's plan, its cache (rebound after every call)."""

    backend: AttentionBackend
    params: LayerParams
    kv: KVBuffers
    plan: Plan = None


@dataclass(slots=True)
class StepContext:
    """Positions, ops and caches of one step. Models pass it on and call nothing else."""

    ops: Ops
    positions: Array  # [num_tokens] int64
    layers: Sequence[LayerCache]  # by layer index

    def attend(self, layer: int, q: Array, k: Array | None, v: Array | None, out: Array) -> Array:
        """Attention of one layer: ``q`` [n, num_heads, head_dim], ``out`` [n, num_heads, head_dim_v] is where it may go."""
        cache = self.layers[layer]
        source = cache if cache.params.kv_source_layer is None else self.layers[cache.params.kv_source_layer]
        result = cache.backend.forward(q, k, v, source.kv, cache.plan, cache.params, out)
        source.kv = result.kv
        return result.out
