"""`FunctionalAttention`: nothing is written in place, every step gives new arrays, as in array libraries without mutation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.api.attention import AttentionBackend, BufferSpec, GroupBatch, Int32Array, KVBuffers, KVFormat, LayerParams

__all__ = ["FunctionalAttention"]


@dataclass(frozen=True)
class Row:
    """One request's part of a step."""

    tokens: slice
    blocks: Tensor  # [num_blocks] int64
    seq_len: int
    num_computed: int


@dataclass(frozen=True)
class StepRows:
    rows: tuple[Row, ...]
    slots: Tensor  # [num_tokens] int64, -1 = not written


class FunctionalAttention(AttentionBackend):
    """``k`` and ``v`` [num_blocks, block_size, num_kv_heads, head_dim]."""

    def kv_format(self) -> KVFormat:
        spec, size = self.group.spec, self.group.block_size
        shape = (size, spec.num_kv_heads, spec.head_dim)
        return KVFormat(
            buffers={name: BufferSpec(shape=shape, dtype=spec.kv_dtype) for name in ("k", "v")},
        )

    def copy_blocks(self, kv: KVBuffers, pairs: Int32Array) -> KVBuffers:
        sources, targets = torch.from_numpy(pairs.astype(np.int64)).T
        return {name: buffer.index_copy(0, targets, buffer[sources]) for name, buffer in kv.items()}

    def read_blocks(self, kv: KVBuffers, ids: Int32Array) -> Mapping[str, Tensor]:
        indices = torch.from_numpy(ids.astype(np.int64))
        return {name: self.platform.to_host(buffer[indices]) for name, buffer in kv.items()}

    def write_blocks(self, kv: KVBuffers, ids: Int32Array, data: Mapping[str, Tensor]) -> KVBuffers:
        indices = torch.from_numpy(ids.astype(np.int64))
        return {name: buffer.index_copy(0, indices, data[name]) for name, buffer in kv.items()}

    def plan(self, batch: GroupBatch) -> StepRows:
        starts = self.platform.to_host(batch.query_start_loc).tolist()
        lengths = self.platform.to_host(batch.seq_lens).tolist()
        computed = self.platform.to_host(batch.num_computed_tokens).tolist()
        tables = self.platform.to_host(batch.block_table).long()
        rows = [
            Row(slice(starts[row], starts[row + 1]), tables[row], lengths[row], computed[row])
            for row in range(batch.num_reqs)
            if starts[row + 1] > starts[row]
        ]
        return StepRows(tuple(rows), batch.slot_mapping)

    def write_kv(self, kv: KVBuffers, k: Tensor, v: Tensor, plan: StepRows, layer: LayerParams) -> KVBuffers:
        kept = plan.slots >= 0
        return {
            name: kv[name].flatten(0, 1).index_copy(0, plan.slots[kept], new[kept].to(kv[name].dtype)).view_as(kv[name])
            for name, new in (("k", k), ("v", v))
        }

    def attend(
        self, q: Tensor, kv: KVBuffers, plan: StepRows, layer: LayerParams, out: Tensor, *, lse_out: Tensor | None = None
    ) -> Tensor:
        parts = [self._row(q, kv, row) for row in plan.rows]
        padding = q.new_zeros((q.shape[0] - sum(len(part) for part in parts), *out.shape[1:]))
        return torch.cat([*parts, padding])

    def _row(self, q: Tensor, kv: KVBuffers, row: Row) -> Tensor:
        """[query_len, num_heads, head_dim_v] of one request."""
        spec = self.group.spec
        blocks = row.blocks[: -(-row.seq_len // self.group.block_size)]
        shared = spec.num_heads // spec.num_kv_heads
        k, v = (kv[name][blocks].flatten(0, 1)[: row.seq_len].float().repeat_interleave(shared, 1) for name in ("k", "v"))
        queries = q[row.tokens].float()
        scores = torch.einsum("qhd,khd->hqk", queries, k) * spec.scale
        if spec.causal:
            own = torch.arange(row.num_computed, row.num_computed + len(queries)).unsqueeze(1)
            scores = scores.masked_fill(torch.arange(row.seq_len) > own, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
