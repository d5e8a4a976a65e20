"""`InputBatch`: what the worker knows of each running request, in NumPy arrays by slot; and the layout of a step made from it.

A `StepPlan` carries differences; `InputBatch.apply` brings the arrays up to date and returns the step's `StepLayout`. After the
step is launched, `advance` moves the requests on. A token that is sampled but still on the device is −1 in ``token_ids`` until
`settle` brings its value. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.kv_cache import NULL_BLOCK, KVGroupInfo, RecurrentState
from octavo.core.api.scheduling import Drafts, IntArray, NewRequest, StepPlan, TableUpdate

__all__ = ["ON_DEVICE", "Advanced", "InputBatch", "StepLayout"]

ON_DEVICE = -1
"""An input token that only the device knows yet: the last one sampled for its slot."""


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """One step, row by row and token by token, on the host."""

    step: int
    slots: IntArray  # [num_reqs] int32
    query_start_loc: IntArray  # [num_reqs + 1] int32
    num_computed_tokens: IntArray  # [num_reqs] int32, before the step
    seq_lens: IntArray  # [num_reqs] int32, after it
    token_ids: IntArray  # [num_tokens] int32, `ON_DEVICE` where only the device knows
    token_slots: IntArray  # [num_tokens] int32, the slot of each token
    positions: NDArray[np.int64]  # [num_tokens]
    slot_mappings: tuple[NDArray[np.int64], ...]  # one a KV group, [num_tokens]; of a recurrent one: the states' blocks
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    has_unknown_tokens: bool
    sampled: IntArray  # [m] int32, the rows that are sampled
    draft_counts: IntArray | None  # [m] int32, drafts that each sampled row verifies; None = no drafts in the step
    logit_tokens: NDArray[np.int64]  # [L] the tokens whose logits are sampled from: 1 + drafts for each sampled row
    logit_positions: IntArray  # [L] int32, the position of the token that is sampled there
    logit_owners: IntArray  # [L] int32, index into ``sampled``
    same_requests: (
        bool  # the same requests in the same rows, sampled in the same rows, as in the step before; no drafts in either
    )

    @property
    def num_reqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """What a launched step will append once its tokens are known."""

    slots: IntArray  # [m] int32
    positions: IntArray  # [m] int32, where the first sampled token goes
    epochs: IntArray  # [m] int32, of the slots when the step was launched
    has_drafts: bool


class InputBatch:
    """Persistent host state of up to ``max_num_seqs`` requests."""

    def __init__(
        self, groups: Sequence[KVGroupInfo], *, max_num_seqs: int, max_model_len: int, num_speculative_tokens: int = 0
    ) -> None:
        # Drafts may reach past the context's end, and so does the token after them; neither is ever kept.
        width = max_model_len + num_speculative_tokens + 1
        # How many tokens a table's column stands for, and how many places a block has for them: a state takes in all of them.
        self._strides = tuple(
            (width, 1) if isinstance(group.spec, RecurrentState) else (group.block_size, group.block_size) for group in groups
        )
        self.token_ids = np.zeros((max_num_seqs, width), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_cached_tokens = np.zeros(max_num_seqs, np.int32)
        self.epochs = np.zeros(max_num_seqs, np.int32)  # counts the owners that a slot has had
        self.tables = tuple(np.zeros((max_num_seqs, -(-width // stride)), np.int32) for stride, _ in self._strides)
        self.tables_changed = [True] * len(self.tables)  # since the caller last cleared it
        self._rows: IntArray = np.zeros(0, np.int32)
        self._counts: IntArray = np.zeros(0, np.int32)
        self._all_sampled = False

    def apply(self, plan: StepPlan) -> StepLayout:
        """Bring the arrays up to date with ``plan``, in the order of its fields, and lay its step out."""
        if plan.released is not None:
            self.epochs[plan.released] += 1
        for request in plan.new:
            self._enter(request)
        for group, update in enumerate(plan.tables):
            if update is not None:
                self._update_table(group, update)
        same_requests = plan.rows is None and not plan.new and plan.drafts is None and self._all_sampled
        if plan.rows is not None:
            self._rows = plan.rows
            self._counts = np.ones(len(plan.rows), np.int32)
            self.tables_changed = [True] * len(self.tables)
        elif self._counts.max(initial=1) > 1 or plan.new:
            self._counts = np.ones(len(self._rows), np.int32)
        if plan.num_scheduled_tokens is not None:
            self._counts = plan.num_scheduled_tokens
        assert len(self._counts) == len(self._rows), "a count for every row"
        drafts = self._write_drafts(plan.drafts)
        return self._lay_out(plan, drafts, same_requests)

    def advance(self, layout: StepLayout) -> Advanced:
        """Move the step's requests on as far as is known before its tokens are."""
        slots, drafts = layout.slots, layout.draft_counts
        self.num_computed_tokens[slots] = layout.seq_lens
        sampled = slots[layout.sampled]
        positions = self.num_tokens[sampled]
        if drafts is None:
            self.token_ids[sampled, positions] = ON_DEVICE
            self.num_tokens[sampled] += 1
        else:
            self.num_computed_tokens[sampled] -= drafts
        return Advanced(slots=sampled, positions=positions, epochs=self.epochs[sampled], has_drafts=drafts is not None)

    def settle(self, advanced: Advanced, sampled: IntArray, num_accepted: IntArray | None) -> None:
        """Append the tokens of a step, ``sampled`` [m, 1 + k] and ``num_accepted`` [m]; slots with a new owner are left alone.

        A row that failed has no token (all below 0) and gets token 0: its request ends, but a step with it may be on its way.
        """
        owned = self.epochs[advanced.slots] == advanced.epochs
        slots, positions, tokens = advanced.slots[owned], advanced.positions[owned], np.maximum(sampled[owned], 0)
        if num_accepted is None:
            self.token_ids[slots, positions] = tokens[:, 0]
            return
        accepted = num_accepted[owned]
        for column in range(tokens.shape[1]):
            kept = accepted >= column
            self.token_ids[slots[kept], positions[kept] + column] = tokens[kept, column]
        self.num_tokens[slots] += accepted + 1
        self.num_computed_tokens[slots] += accepted

    def block_table(self, group: int, slots: IntArray, max_seq_len: int) -> IntArray:
        """The tables of ``slots``, as wide as the longest sequence needs, a few columns more so that it can be kept."""
        table = self.tables[group]
        needed = -(-max_seq_len // self._strides[group][0])
        return table[slots, : min(-(-needed // 8) * 8, table.shape[1])]

    def _enter(self, request: NewRequest) -> None:
        slot, known = request.slot, len(request.token_ids)
        assert 0 <= request.num_computed_tokens < known <= self.token_ids.shape[1], "a request has a token to run, and fits"
        self.epochs[slot] += 1
        self.token_ids[slot, :known] = request.token_ids
        self.num_tokens[slot] = known
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        self.num_cached_tokens[slot] = request.num_cached_tokens
        for group, (table, block_ids) in enumerate(zip(self.tables, request.block_ids, strict=True)):
            table[slot, : len(block_ids)] = block_ids
            table[slot, len(block_ids) :] = NULL_BLOCK
            self.tables_changed[group] = True

    def _update_table(self, group: int, update: TableUpdate) -> None:
        self.tables[group][update.slots, update.columns] = update.block_ids
        self.tables_changed[group] = True

    def _write_drafts(self, drafts: Drafts | None) -> IntArray | None:
        """Put draft tokens behind the known ones; returns the drafts of each row [num_reqs], or None."""
        if drafts is None:
            return None
        slots = self._rows[drafts.rows]
        owners = np.repeat(np.arange(len(slots)), drafts.counts)
        offsets = np.arange(len(owners)) - np.repeat(np.cumsum(drafts.counts) - drafts.counts, drafts.counts)
        self.token_ids[slots[owners], self.num_tokens[slots[owners]] + offsets] = drafts.token_ids
        counts = np.zeros(len(self._rows), np.int32)
        counts[drafts.rows] = drafts.counts
        return counts

    def _lay_out(self, plan: StepPlan, drafts: IntArray | None, same_requests: bool) -> StepLayout:
        slots, counts = self._rows, self._counts
        start = self.num_computed_tokens[slots]
        seq_lens = start + counts
        known = self.num_tokens[slots]
        ends = known if drafts is None else known + drafts
        is_sampled = seq_lens == ends
        assert len(slots) > 0, "a step has rows"
        assert bool((counts > 0).all()), "every row runs at least one token"
        assert bool((seq_lens <= ends).all()), "a row runs tokens that are known"
        query_start_loc = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        max_query_len = int(counts.max())
        if max_query_len == 1:
            token_slots, positions = slots, start
        else:
            token_slots = np.repeat(slots, counts)
            positions = np.arange(query_start_loc[-1], dtype=np.int32) + np.repeat(start - query_start_loc[:-1], counts)
        token_ids = self.token_ids[token_slots, positions]
        sampled = np.flatnonzero(is_sampled).astype(np.int32)
        all_sampled = len(sampled) == len(slots) and drafts is None
        same_requests, self._all_sampled = same_requests and all_sampled, all_sampled
        draft_counts = None if drafts is None else drafts[sampled]
        logit_tokens, logit_positions, logit_owners = _logit_rows(query_start_loc, known, sampled, draft_counts)
        return StepLayout(
            step=plan.step,
            slots=slots,
            query_start_loc=query_start_loc,
            num_computed_tokens=start,
            seq_lens=seq_lens,
            token_ids=token_ids,
            token_slots=token_slots,
            positions=positions.astype(np.int64),
            slot_mappings=self._slot_mappings(slots, start, token_slots, positions),
            max_query_len=max_query_len,
            max_seq_len=int(seq_lens.max()),
            num_decodes=len(slots) if plan.rows is None else plan.num_decodes,
            has_unknown_tokens=bool((token_ids == ON_DEVICE).any()),
            sampled=sampled,
            draft_counts=draft_counts,
            same_requests=same_requests,
            logit_tokens=logit_tokens,
            logit_positions=logit_positions,
            logit_owners=logit_owners,
        )

    def _slot_mappings(
        self, slots: IntArray, start: IntArray, token_slots: IntArray, positions: IntArray
    ) -> tuple[NDArray[np.int64], ...]:
        """Where each token's K and V (or the state after it) go in each group; −1 for a token that the cache holds already."""
        cached = self.num_cached_tokens
        rewrites = bool((start < cached[slots]).any())
        mappings = []
        for table, (stride, places) in zip(self.tables, self._strides, strict=True):
            column, offset = np.divmod(positions, np.int32(stride))
            blocks = table[token_slots, column].astype(np.int64)
            mapping = blocks * places + (offset if places > 1 else 0)
            if rewrites:
                mapping[positions < cached[token_slots]] = -1
            assert bool(((blocks != NULL_BLOCK) | (mapping < 0)).all()), "nothing is written to the null block"
            mappings.append(mapping)
        return tuple(mappings)


def _logit_rows(
    query_start_loc: IntArray, known: IntArray, sampled: IntArray, draft_counts: IntArray | None
) -> tuple[NDArray[np.int64], IntArray, IntArray]:
    """The tokens that are sampled from, the positions sampled, and which sampled row each belongs to."""
    last = query_start_loc[sampled + 1].astype(np.int64) - 1
    positions = known[sampled]
    owners = np.arange(len(sampled), dtype=np.int32)
    if draft_counts is not None:
        width = draft_counts + 1
        owners = np.repeat(owners, width)
        offsets = np.arange(len(owners), dtype=np.int32) - np.repeat(np.cumsum(width) - width, width).astype(np.int32)
        last = (last - draft_counts)[owners] + offsets
        positions = positions[owners] + offsets
    return last, positions, owners
