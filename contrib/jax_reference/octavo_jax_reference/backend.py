"""`JaxAttention`: pure functions of arrays. A write returns a new cache, attention a new output; nothing changes in place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from octavo.api.attention import (
    AttentionBackend,
    AttentionResult,
    AttentionSpec,
    BufferSpec,
    GroupBatch,
    Int32Array,
    KVBuffers,
    KVFormat,
    LayerParams,
)

if TYPE_CHECKING:
    from torch import Tensor


class JaxPlan(NamedTuple):
    """The step, told token by token."""

    slots: jax.Array  # [num_tokens], -1 = don't write
    positions: jax.Array  # [num_tokens]
    seq_lens: jax.Array  # [num_tokens], of the token's request
    tables: jax.Array  # [num_tokens, max_blocks], of the token's request


class JaxAttention(AttentionBackend):
    """Buffers ``k`` and ``v`` [num_blocks, block_size, num_kv_heads, ·] in the cache's dtype; MLA has ``k`` alone."""

    def kv_format(self) -> KVFormat:
        spec, block_size = self.group.spec, self.group.block_size
        widths = {"k": spec.head_dim} if spec.kind == "mla" else {"k": spec.head_dim, "v": spec.head_dim_v}
        return KVFormat(
            buffers={
                name: BufferSpec(shape=(block_size, spec.num_kv_heads, width), dtype=spec.kv_dtype)
                for name, width in widths.items()
            }
        )

    def copy_blocks(self, kv: KVBuffers, pairs: Int32Array) -> KVBuffers:
        return {name: buffer.at[pairs[:, 1]].set(buffer[pairs[:, 0]]) for name, buffer in kv.items()}

    def read_blocks(self, kv: KVBuffers, ids: Int32Array) -> Mapping[str, Tensor]:
        return {name: self.platform.to_host(buffer[ids]) for name, buffer in kv.items()}

    def write_blocks(self, kv: KVBuffers, ids: Int32Array, data: Mapping[str, Tensor]) -> KVBuffers:
        return {name: buffer.at[ids].set(self.platform.from_host(data[name])) for name, buffer in kv.items()}

    def plan(self, batch: GroupBatch) -> JaxPlan:
        return _plan(batch.slot_mapping, batch.query_start_loc, batch.num_computed_tokens, batch.seq_lens, batch.block_table)

    def write_kv(self, kv: KVBuffers, k: jax.Array, v: jax.Array, plan: JaxPlan, layer: LayerParams) -> KVBuffers:
        new = {"k": _store(kv["k"], k, plan.slots, layer.k_scale)}
        if "v" in kv:
            new["v"] = _store(kv["v"], v, plan.slots, layer.v_scale)
        return new

    def attend(
        self, q: jax.Array, kv: KVBuffers, plan: JaxPlan, layer: LayerParams, out: jax.Array, *, lse_out: Any = None
    ) -> jax.Array:
        return self._attend(q, kv, plan, layer)[0]

    def forward(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        kv: KVBuffers,
        plan: JaxPlan,
        layer: LayerParams,
        out: jax.Array,
        *,
        lse_out: jax.Array | None = None,
    ) -> AttentionResult:
        if k is not None and v is not None:
            kv = self.write_kv(kv, k, v, plan, layer)
        values, lse = self._attend(q, kv, plan, layer)
        return AttentionResult(values, kv, None if lse_out is None else lse)

    def _attend(self, q: jax.Array, kv: KVBuffers, plan: JaxPlan, layer: LayerParams) -> tuple[jax.Array, jax.Array]:
        v_scale = layer.v_scale if "v" in kv else layer.k_scale
        values = kv["v"] if "v" in kv else kv["k"][..., : self.group.spec.head_dim_v]
        return _attention(self.group.spec, q, kv["k"], values, plan, layer.k_scale, v_scale, layer.sinks, layer.alibi_slopes)


@jax.jit
def _plan(slots: jax.Array, starts: jax.Array, computed: jax.Array, seq_lens: jax.Array, tables: jax.Array) -> JaxPlan:
    token = jnp.arange(len(slots))
    row = jnp.minimum(jnp.searchsorted(starts, token, side="right"), len(seq_lens)) - 1  # padded tokens: the last row
    return JaxPlan(slots, computed[row] + token - starts[row], seq_lens[row], tables[row])


@jax.jit
def _store(buffer: jax.Array, values: jax.Array, slots: jax.Array, scale: float) -> jax.Array:
    """``buffer`` with ``values / scale`` in its slots, saturated."""
    slots = jnp.where(slots < 0, buffer.shape[0] * buffer.shape[1], slots)  # out of range, where "drop" drops it
    scaled = values.astype(jnp.float32) / scale
    if jnp.issubdtype(buffer.dtype, jnp.integer):
        scaled = jnp.clip(jnp.round(scaled), jnp.iinfo(buffer.dtype).min, jnp.iinfo(buffer.dtype).max)
    elif buffer.dtype.itemsize == 1:
        scaled = jnp.clip(scaled, -float(jnp.finfo(buffer.dtype).max), float(jnp.finfo(buffer.dtype).max))
    entries = buffer.reshape(-1, *buffer.shape[2:]).at[slots].set(scaled.astype(buffer.dtype), mode="drop")
    return entries.reshape(buffer.shape)


@partial(jax.jit, static_argnums=0)
def _attention(
    spec: AttentionSpec,
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    plan: JaxPlan,
    k_scale: float,
    v_scale: float,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Out [num_tokens, num_heads, head_dim_v] in q's dtype and lse [num_tokens, num_heads] float32."""
    tokens, kv_heads, shared = q.shape[0], spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    keys = k_cache[plan.tables].astype(jnp.float32).reshape(tokens, -1, kv_heads, spec.head_dim)
    values = v_cache[plan.tables].astype(jnp.float32).reshape(tokens, -1, kv_heads, spec.head_dim_v)
    distance = jnp.arange(keys.shape[1]) - plan.positions[:, None]  # [t, n]
    seen = (distance <= 0) & (jnp.arange(keys.shape[1]) < plan.seq_lens[:, None])
    if spec.window is not None:
        seen &= distance > -spec.window
    queries = q.astype(jnp.float32).reshape(tokens, kv_heads, shared, spec.head_dim)
    logits = jnp.einsum("tkgd,tnkd->tkgn", queries, keys, precision="highest") * (spec.scale * k_scale)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    if slopes is not None:
        logits += slopes.reshape(kv_heads, shared, 1) * distance[:, None, None]
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    top = jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    sink = None if sinks is None else sinks.reshape(kv_heads, shared, 1)
    if sink is not None:
        top = jnp.maximum(top, sink)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True) + (0.0 if sink is None else jnp.exp(sink - top))
    values = jnp.where(seen[:, :, None, None], values, 0.0)
    out = jnp.einsum("tkgn,tnkv->tkgv", weights, values, precision="highest") * (v_scale / total)
    lse = (top + jnp.log(total)).reshape(tokens, spec.num_heads)
    return out.reshape(tokens, spec.num_heads, spec.head_dim_v).astype(q.dtype), lse.astype(jnp.float32)
