"""`ReferenceAttention`: attention in plain torch, on any device that torch knows; correct before fast.

Keys and values are gathered block by block, scores and softmax are float32, and what no query sees is replaced before use,
so whatever lies in the null block or behind a request's last token stays without effect.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from octavo.api.attention import AttentionBackend, BufferSpec, GroupBatch, Int32Array, KVBuffers, KVFormat, LayerParams
from octavo.api.errors import Unsupported
from octavo.plugins.attention.reference.plan import Part, ReferencePlan, make_plan

__all__ = ["ReferenceAttention"]


class ReferenceAttention(AttentionBackend):
    """Buffers ``k`` and ``v`` [num_blocks, block_size, num_kv_heads, ·] in the cache's dtype; MLA has ``k`` alone."""

    def kv_format(self) -> KVFormat:
        spec, block_size = self.group.spec, self.group.block_size
        buffers = {"k": BufferSpec(shape=(block_size, spec.num_kv_heads, spec.head_dim), dtype=spec.kv_dtype)}
        if spec.kind != "mla":
            buffers["v"] = BufferSpec(shape=(block_size, spec.num_kv_heads, spec.head_dim_v), dtype=spec.kv_dtype)
        return KVFormat(buffers=buffers)

    def copy_blocks(self, kv: KVBuffers, pairs: Int32Array) -> KVBuffers:
        sources, targets = self._indices(pairs[:, 0]), self._indices(pairs[:, 1])
        for buffer in map(_movable, kv.values()):
            buffer.index_copy_(0, targets, buffer.index_select(0, sources))
        return kv

    def read_blocks(self, kv: KVBuffers, ids: Int32Array) -> Mapping[str, Tensor]:
        indices = self._indices(ids)
        return {
            name: self.platform.to_host(_movable(buffer).index_select(0, indices)).view(buffer.dtype)
            for name, buffer in kv.items()
        }

    def write_blocks(self, kv: KVBuffers, ids: Int32Array, data: Mapping[str, Tensor]) -> KVBuffers:
        indices = self._indices(ids)
        for name, buffer in kv.items():
            _movable(buffer).index_copy_(0, indices, _movable(self.platform.from_host(data[name])))
        return kv

    def plan(self, batch: GroupBatch) -> ReferencePlan:
        return make_plan(self.group.spec, self.group.block_size, batch, self.platform)

    def write_kv(self, kv: KVBuffers, k: Tensor, v: Tensor, plan: ReferencePlan, layer: LayerParams) -> KVBuffers:
        self._store(kv["k"], k, plan.slots, layer.k_scale)
        if "v" in kv:
            self._store(kv["v"], v, plan.slots, layer.v_scale)
        return kv

    def attend(
        self, q: Tensor, kv: KVBuffers, plan: ReferencePlan, layer: LayerParams, out: Tensor, *, lse_out: Tensor | None = None
    ) -> Tensor:
        self._check(layer)
        for part in plan.parts:
            values, lse = self._attend_part(q, kv, part, layer, with_lse=lse_out is not None)
            _put(out, part.tokens, values)
            if lse_out is not None and lse is not None:
                _put(lse_out, part.tokens, lse)
        return out

    def _attend_part(
        self, q: Tensor, kv: KVBuffers, part: Part, layer: LayerParams, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """[tokens, num_heads, head_dim_v] float32, and the log-sum-exp [tokens, num_heads]."""
        spec = self.group.spec
        rows, length, kv_heads, shared = part.num_rows, part.query_len, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        queries = _take(q, part.tokens).view(rows, length, kv_heads, shared, spec.head_dim).permute(0, 2, 3, 1, 4)
        queries = queries.float().reshape(rows, kv_heads, shared * length, spec.head_dim) * (spec.scale * layer.k_scale)
        keys = self._gather(kv["k"], part)
        values = self._gather(kv["v"], part) if "v" in kv else keys[..., : spec.head_dim_v].clone()
        scores = torch.matmul(queries, keys.transpose(2, 3)).view(rows, kv_heads, shared, length, -1)
        if spec.soft_cap is not None:
            scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
        if part.distance is not None:
            assert layer.alibi_slopes is not None
            scores = scores + layer.alibi_slopes.view(kv_heads, shared, 1, 1) * part.distance
        scores = scores.masked_fill(part.hidden, -torch.inf)
        sinks = layer.sinks.float().view(kv_heads, shared, 1, 1) if spec.sinks and layer.sinks is not None else None
        weights, lse = _softmax(scores, sinks, every_query_sees=spec.causal and not with_lse)
        mixed = torch.matmul(weights.view(rows, kv_heads, shared * length, -1), values.masked_fill_(part.dead, 0.0))
        mixed = mixed.view(rows, kv_heads, shared, length, spec.head_dim_v).permute(0, 3, 1, 2, 4)
        mixed = mixed.reshape(rows * length, spec.num_heads, spec.head_dim_v)
        value_scale = layer.v_scale if "v" in kv else layer.k_scale
        if value_scale != 1.0:
            mixed = mixed * value_scale
        if lse is not None:
            lse = lse.permute(0, 3, 1, 2, 4).reshape(rows * length, spec.num_heads)
        return mixed, lse

    def _gather(self, buffer: Tensor, part: Part) -> Tensor:
        """The part's cached entries, [num_rows, num_kv_heads, num_keys, ·] float32, a copy."""
        blocks = _movable(buffer).index_select(0, part.blocks).view(buffer.dtype)
        entries = blocks.view(part.num_rows, -1, *buffer.shape[2:]).permute(0, 2, 1, 3)
        return torch.empty(entries.shape, dtype=torch.float32, device=entries.device).copy_(entries)

    def _store(self, buffer: Tensor, values: Tensor, slots: Tensor, scale: float) -> None:
        stored = _quantise(values, buffer.dtype, scale)
        _movable(buffer).view(-1, *buffer.shape[2:]).index_copy_(0, slots, _movable(stored))

    def _indices(self, ids: Int32Array) -> Tensor:
        indices: Tensor = self.platform.from_host(torch.from_numpy(ids.astype(np.int64)))
        return indices

    def _check(self, layer: LayerParams) -> None:
        spec = self.group.spec
        for wanted, name, array in (("sinks", "sinks", layer.sinks), ("alibi", "alibi_slopes", layer.alibi_slopes)):
            if getattr(spec, wanted) and array is None:
                raise Unsupported(f"layer {layer.index} has {wanted} but no {name}", hint=f"set LayerParams.{name}")


def _softmax(scores: Tensor, sinks: Tensor | None, *, every_query_sees: bool) -> tuple[Tensor, Tensor | None]:
    """Weights over the keys and the natural log of the denominator [..., 1]; a query that sees nothing gets weights 0."""
    if sinks is None and every_query_sees:
        return scores.softmax(-1), None
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.clamp(min=torch.finfo(top.dtype).min)  # -inf where nothing is seen: -inf - -inf has no value
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    return weights / total.clamp(min=torch.finfo(total.dtype).tiny), top + total.log()


def _quantise(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """``values / scale`` in the cache's dtype, saturated where the dtype has 8 bits."""
    if dtype.itemsize > 1:
        return (values if scale == 1.0 else values / scale).to(dtype)
    scaled = values.float() / scale
    if not dtype.is_floating_point:
        return scaled.round().clamp(-torch.iinfo(dtype).max, torch.iinfo(dtype).max).to(dtype)
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype)


def _movable(buffer: Tensor) -> Tensor:
    """The same bytes in a dtype that torch can index: 8-bit floats have few kernels."""
    return buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer


def _take(source: Tensor, tokens: slice | Tensor) -> Tensor:
    return source[tokens] if isinstance(tokens, slice) else source.index_select(0, tokens)


def _put(target: Tensor, tokens: slice | Tensor, values: Tensor) -> None:
    if isinstance(tokens, slice):
        target[tokens] = values.to(target.dtype)
    else:
        target.index_copy_(0, tokens, values.to(target.dtype))
