"""Attention one request after another, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.api.attention import AttentionBackend, BufferSpec, GroupBatch, Int32Array, KVBuffers, KVFormat, LayerParams


class Row(NamedTuple):
    """One request of the step."""

    tokens: slice
    blocks: Tensor  # [num_blocks] int64
    num_computed_tokens: int
    seq_len: int


class Plan(NamedTuple):
    rows: list[Row]
    slots: Tensor  # [num_tokens] int64


class FrozenAttention(AttentionBackend):
    """Buffers ``k`` and ``v`` [num_blocks, block_size, num_kv_heads, head_dim]."""

    def kv_format(self) -> KVFormat:
        spec, block_size = self.group.spec, self.group.block_size
        return KVFormat(
            buffers={
                "k": BufferSpec(shape=(block_size, spec.num_kv_heads, spec.head_dim), dtype=spec.kv_dtype),
                "v": BufferSpec(shape=(block_size, spec.num_kv_heads, spec.head_dim_v), dtype=spec.kv_dtype),
            }
        )

    def copy_blocks(self, kv: KVBuffers, pairs: Int32Array) -> KVBuffers:
        for buffer in kv.values():
            buffer[pairs[:, 1]] = buffer[pairs[:, 0]]
        return kv

    def read_blocks(self, kv: KVBuffers, ids: Int32Array) -> Mapping[str, Tensor]:
        return {name: self.platform.to_host(buffer[ids]) for name, buffer in kv.items()}

    def write_blocks(self, kv: KVBuffers, ids: Int32Array, data: Mapping[str, Tensor]) -> KVBuffers:
        for name, buffer in kv.items():
            buffer[ids] = self.platform.from_host(data[name])
        return kv

    def plan(self, batch: GroupBatch) -> Plan:
        starts, computed = batch.query_start_loc.tolist(), batch.num_computed_tokens.tolist()
        rows = [
            Row(slice(starts[row], starts[row + 1]), batch.block_table[row].long(), computed[row], seq_len)
            for row, seq_len in enumerate(batch.seq_lens.tolist())
            if starts[row + 1] > starts[row]
        ]
        return Plan(rows, batch.slot_mapping)

    def write_kv(self, kv: KVBuffers, k: Tensor, v: Tensor, plan: Plan, layer: LayerParams) -> KVBuffers:
        real = plan.slots >= 0
        for name, values in (("k", k), ("v", v)):
            buffer = kv[name]
            buffer.view(-1, *buffer.shape[2:])[plan.slots[real]] = values[real].to(buffer.dtype)
        return kv

    def attend(
        self, q: Tensor, kv: KVBuffers, plan: Plan, layer: LayerParams, out: Tensor, *, lse_out: Tensor | None = None
    ) -> Tensor:
        for row in plan.rows:
            values, lse = self._attend_row(q[row.tokens], kv, row)
            out[row.tokens] = values.to(out.dtype)
            if lse_out is not None:
                lse_out[row.tokens] = lse
        return out

    def _attend_row(self, q: Tensor, kv: KVBuffers, row: Row) -> tuple[Tensor, Tensor]:
        """[query_len, num_heads, head_dim_v] float32, and [query_len, num_heads]."""
        spec = self.group.spec
        repeat = spec.num_heads // spec.num_kv_heads
        query = row.num_computed_tokens + torch.arange(len(q)).unsqueeze(1)
        first = 0 if spec.window is None else max(0, row.num_computed_tokens - spec.window + 1)
        keys, values = (
            kv[name][row.blocks].flatten(0, 1)[first : row.seq_len].float().repeat_interleave(repeat, 1) for name in ("k", "v")
        )
        key = torch.arange(first, row.seq_len)
        scores = torch.einsum("thd,nhd->htn", q.float(), keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        hidden = key > query
        if spec.window is not None:
            hidden = hidden | (key <= query - spec.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        return torch.einsum("htn,nhv->thv", scores.softmax(-1), values), scores.logsumexp(-1).transpose(0, 1)
