"""`ChunkedAttention`: a query sees its own chunk. ``spec.window`` is the chunk's length, in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.api.attention import AttentionBackend, BufferSpec, GroupBatch, Int32Array, KVBuffers, KVFormat, LayerParams
from octavo.api.kv_cache import CustomSpec, KVSpec

__all__ = ["ChunkedAttention"]


class Row(NamedTuple):
    tokens: slice
    slots: Tensor  # [num_keys] int64, of the keys from the first query's chunk on
    first_key: int
    num_computed: int


class ChunkedAttention(AttentionBackend):
    @property
    def chunk(self) -> int:
        length = self.group.spec.window
        assert length is not None, "a chunked layer says how long its chunks are"
        return length

    def kv_format(self) -> KVFormat:
        spec = self.group.spec
        shape = (self.group.block_size, spec.num_kv_heads, spec.head_dim)
        return KVFormat(buffers={name: BufferSpec(shape=shape, dtype=spec.kv_dtype) for name in ("k", "v")})

    def kv_spec(self, bytes_per_block: int) -> KVSpec:
        return CustomSpec(
            block_size=self.group.block_size,
            bytes_per_block=bytes_per_block,
            kind="ChunkedLocal",
            manager="seam-chunks",
            parameters={"chunk": self.chunk},
            kept_tokens=self.chunk,
        )

    def copy_blocks(self, kv: KVBuffers, pairs: Int32Array) -> KVBuffers:
        sources, targets = torch.from_numpy(pairs.astype(np.int64)).T
        for buffer in kv.values():
            buffer[targets] = buffer[sources]
        return kv

    def read_blocks(self, kv: KVBuffers, ids: Int32Array) -> Mapping[str, Tensor]:
        indices = torch.from_numpy(ids.astype(np.int64))
        return {name: self.platform.to_host(buffer[indices]) for name, buffer in kv.items()}

    def write_blocks(self, kv: KVBuffers, ids: Int32Array, data: Mapping[str, Tensor]) -> KVBuffers:
        for name, buffer in kv.items():
            buffer[torch.from_numpy(ids.astype(np.int64))] = self.platform.from_host(data[name])
        return kv

    def plan(self, batch: GroupBatch) -> tuple[list[Row], Tensor]:
        size, rows = self.group.block_size, []
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        computed = batch.num_computed_tokens.tolist()
        for row in range(batch.num_reqs):
            first = computed[row] // self.chunk * self.chunk
            keys = torch.arange(first, lengths[row])
            slots = batch.block_table[row].long()[keys // size] * size + keys % size
            rows.append(Row(slice(starts[row], starts[row + 1]), slots, first, computed[row]))
        return rows, batch.slot_mapping

    def write_kv(self, kv: KVBuffers, k: Tensor, v: Tensor, plan: tuple[list[Row], Tensor], layer: LayerParams) -> KVBuffers:
        kept = plan[1] >= 0
        for buffer, new in ((kv["k"], k), (kv["v"], v)):
            buffer.flatten(0, 1)[plan[1][kept]] = new[kept]
        return kv

    def attend(
        self,
        q: Tensor,
        kv: KVBuffers,
        plan: tuple[list[Row], Tensor],
        layer: LayerParams,
        out: Tensor,
        *,
        lse_out: Tensor | None = None,
    ) -> Tensor:
        spec = self.group.spec
        for row in plan[0]:
            queries, shared = q[row.tokens], spec.num_heads // spec.num_kv_heads
            k, v = (kv[name].flatten(0, 1)[row.slots].repeat_interleave(shared, 1) for name in ("k", "v"))
            own = torch.arange(row.num_computed, row.num_computed + len(queries)).unsqueeze(1)
            keys = torch.arange(row.first_key, row.first_key + len(k))
            seen = (keys <= own) & (keys // self.chunk == own // self.chunk)
            scores = torch.einsum("qhd,khd->hqk", queries, k) * spec.scale
            out[row.tokens] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return out
