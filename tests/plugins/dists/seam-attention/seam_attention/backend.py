"""`PackedAttention`: one buffer for K and V, heads before tokens; writing and attending are fused into `forward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.api.attention import (
    AttentionBackend,
    AttentionResult,
    BufferSpec,
    GroupBatch,
    Int32Array,
    KVBuffers,
    KVFormat,
    LayerParams,
)

__all__ = ["PackedAttention"]


class Row(NamedTuple):
    tokens: slice
    blocks: Tensor  # [num_blocks] int64, the ones that any query sees
    first_key: int  # position of the first key in them
    seq_len: int
    num_computed: int


class PackedPlan(NamedTuple):
    rows: list[Row]
    blocks: Tensor  # [num_tokens] int64, where each token goes; the null block for those that aren't written
    offsets: Tensor


class PackedAttention(AttentionBackend):
    """``kv`` [num_blocks, 2, num_kv_heads, block_size, head_dim]."""

    def kv_format(self) -> KVFormat:
        spec = self.group.spec
        shape = (2, spec.num_kv_heads, self.group.block_size, spec.head_dim)
        return KVFormat(buffers={"kv": BufferSpec(shape=shape, dtype=spec.kv_dtype)})

    def copy_blocks(self, kv: KVBuffers, pairs: Int32Array) -> KVBuffers:
        sources, targets = torch.from_numpy(pairs.astype(np.int64)).T
        kv["kv"][targets] = kv["kv"][sources]
        return kv

    def read_blocks(self, kv: KVBuffers, ids: Int32Array) -> Mapping[str, Tensor]:
        blocks = self.platform.to_host(kv["kv"][torch.from_numpy(ids.astype(np.int64))]).transpose(2, 3)
        return {"k": blocks[:, 0].contiguous(), "v": blocks[:, 1].contiguous()}

    def write_blocks(self, kv: KVBuffers, ids: Int32Array, data: Mapping[str, Tensor]) -> KVBuffers:
        blocks = torch.stack([data["k"], data["v"]], dim=1).transpose(2, 3)
        kv["kv"][torch.from_numpy(ids.astype(np.int64))] = self.platform.from_host(blocks)
        return kv

    def plan(self, batch: GroupBatch) -> PackedPlan:
        size, window = self.group.block_size, self.group.spec.window
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        computed, rows = batch.num_computed_tokens.tolist(), []
        for row in range(batch.num_reqs):
            if starts[row + 1] == starts[row]:
                continue
            first = 0 if window is None else max(0, computed[row] - window + 1) // size
            blocks = batch.block_table[row, first : -(-lengths[row] // size)].long()
            rows.append(Row(slice(starts[row], starts[row + 1]), blocks, first * size, lengths[row], computed[row]))
        slots = batch.slot_mapping.clamp(min=0)
        return PackedPlan(rows, slots // size, slots % size)

    def write_kv(self, kv: KVBuffers, k: Tensor, v: Tensor, plan: PackedPlan, layer: LayerParams) -> KVBuffers:
        kv["kv"][plan.blocks, 0, :, plan.offsets] = k
        kv["kv"][plan.blocks, 1, :, plan.offsets] = v
        return kv

    def attend(
        self, q: Tensor, kv: KVBuffers, plan: PackedPlan, layer: LayerParams, out: Tensor, *, lse_out: Tensor | None = None
    ) -> Tensor:
        for row in plan.rows:
            values, lse = self._row(q[row.tokens], kv["kv"], row)
            out[row.tokens] = values
            if lse_out is not None:
                lse_out[row.tokens] = lse
        return out

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv: KVBuffers,
        plan: PackedPlan,
        layer: LayerParams,
        out: Tensor,
        *,
        lse_out: Tensor | None = None,
    ) -> AttentionResult:
        if k is not None and v is not None:
            kv["kv"].transpose(2, 3)[plan.blocks, :, plan.offsets] = torch.stack([k, v], dim=1)
        return AttentionResult(self.attend(q, kv, plan, layer, out, lse_out=lse_out), kv, lse_out)

    def _row(self, q: Tensor, cache: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """[query_len, num_heads, head_dim] and the log-sum-exp [query_len, num_heads]."""
        spec = self.group.spec
        count = row.seq_len - row.first_key
        k, v = cache[row.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :count]
        k, v = (part.repeat_interleave(spec.num_heads // spec.num_kv_heads, 0) for part in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * spec.scale
        behind = torch.arange(row.num_computed, row.seq_len).unsqueeze(1) - torch.arange(row.first_key, row.seq_len)
        hidden = behind < 0
        if spec.window is not None:
            hidden |= behind >= spec.window
            unseen = hidden.all(0)
            v = v.masked_fill(unseen.unsqueeze(1), 0.0)  # behind every window: whatever lies there has no weight
        scores = scores.masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)
