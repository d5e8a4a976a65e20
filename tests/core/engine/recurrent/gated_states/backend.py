"""`GatedStates`: one state a request, in the block that its table names; and checks on what it is asked to do.

A state is S [num_heads, head_dim, head_dim_v]. For each token S becomes ``gate * S + k vᵀ``, and its output is ``scale * q S``.
The gate comes as the last column of ``k``. Beside S lies how many tokens are in it: a step that finds another state than
the one it goes on from fails at once; and caches start as NaN, so that nothing is read that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.api.attention import (
    AttentionResult,
    BufferSpec,
    CacheBackend,
    GroupBatch,
    Int32Array,
    KVBuffers,
    KVFormat,
    LayerParams,
)

__all__ = ["GatedStates", "InBlocks", "Unfinished"]


@dataclass(frozen=True)
class Plan:
    blocks: Tensor  # [num_reqs] int64, the block of each request's state
    starts: Tensor  # [num_reqs] int64, tokens in the state before the step
    tokens: Tensor  # [num_reqs, max_query_len] int64, each request's tokens; behind its last one: its last one again
    alive: Tensor  # [num_reqs, max_query_len] bool, up to its last one


class GatedStates(CacheBackend):
    num_copies = 0  # of blocks, by all instances

    def kv_format(self) -> KVFormat:
        spec = self.group.spec
        state = BufferSpec(shape=(spec.num_heads, spec.head_dim, spec.head_dim_v), dtype=spec.kv_dtype)
        return KVFormat(buffers={"state": state, "num_tokens": BufferSpec(shape=(1,), dtype="int64")}, unit="request")

    def allocate_kv(self, num_units: int) -> Sequence[KVBuffers]:
        made = super().allocate_kv(num_units)
        for kv in made:
            kv["state"].fill_(torch.nan)
            kv["num_tokens"].fill_(-1)
        return made

    def copy_blocks(self, kv: KVBuffers, pairs: Int32Array) -> KVBuffers:
        sources, targets = torch.from_numpy(pairs.T.astype("int64"))
        assert not set(sources.tolist()) & set(targets.tolist()), f"sources and targets overlap: {pairs.tolist()}"
        assert len(set(targets.tolist())) == len(targets), f"two copies to one block: {pairs.tolist()}"
        for buffer in kv.values():
            buffer[targets] = buffer[sources]
        type(self).num_copies += len(pairs)
        return kv

    def read_blocks(self, kv: KVBuffers, ids: Int32Array) -> Mapping[str, Tensor]:
        return {name: buffer[torch.from_numpy(ids.astype("int64"))] for name, buffer in kv.items()}

    def write_blocks(self, kv: KVBuffers, ids: Int32Array, data: Mapping[str, Tensor]) -> KVBuffers:
        for name, buffer in kv.items():
            buffer[torch.from_numpy(ids.astype("int64"))] = data[name]
        return kv

    def plan(self, batch: GroupBatch) -> Plan:
        first, last = batch.query_start_loc[:-1].long(), batch.query_start_loc[1:].long() - 1
        starts, ends, size = batch.num_computed_tokens.long(), batch.seq_lens.long(), self.group.block_size
        blocks = batch.block_table[:, 0].long()
        assert batch.block_table.shape == (batch.num_reqs, 1)
        assert (blocks != 0).all(), "a state in the null block"
        assert len(blocks.unique()) == len(blocks), f"two requests write one block: {blocks.tolist()}"
        assert (starts // size == (ends - 1) // size).all(), "a row crosses a block's edge"
        assert torch.equal(batch.slot_mapping, blocks.repeat_interleave(ends - starts)), "a token's slot is its state's block"
        columns = torch.arange(batch.max_query_len)
        tokens = torch.minimum(first[:, None] + columns, last[:, None])
        return Plan(blocks, starts, tokens, columns < (ends - starts)[:, None])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVBuffers, plan: Plan, layer: LayerParams, out: Tensor
    ) -> AttentionResult:
        state, in_state = kv["state"][plan.blocks], kv["num_tokens"][plan.blocks, 0]
        fresh = plan.starts == 0
        found = torch.where(fresh, 0, in_state)
        assert torch.equal(found, plan.starts), f"states of {found.tolist()} tokens where {plan.starts.tolist()} are computed"
        state = torch.where(fresh[:, None, None, None], 0.0, state)
        k, gate = k[..., :-1], k[..., -1]
        for tokens, alive in zip(plan.tokens.T, plan.alive.T, strict=True):
            grown = gate[tokens][..., None, None] * state + k[tokens].unsqueeze(-1) * v[tokens].unsqueeze(-2)
            state = torch.where(alive[:, None, None, None], grown, state)
            read = torch.einsum("rhd,rhde->rhe", q[tokens], state) * self.group.spec.scale
            out[tokens[alive]] = read[alive]
        kv["state"][plan.blocks] = state
        kv["num_tokens"][plan.blocks, 0] = plan.starts + plan.alive.sum(1)
        return AttentionResult(out, kv)


class InBlocks(GatedStates):
    def kv_format(self) -> KVFormat:
        return KVFormat(buffers=super().kv_format().buffers)


class Unfinished(GatedStates):
    forward = None  # type: ignore[assignment]
