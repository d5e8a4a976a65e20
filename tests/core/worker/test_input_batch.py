from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.api.kv_cache import FullAttention, KVGroupInfo, RecurrentState, SlidingWindow
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import Drafts, NewRequest, StepPlan, TableUpdate
from octavo.core.worker.input_batch import InputBatch, StepLayout

MAX_SEQS, MAX_LEN, MOST_DRAFTS = 5, 40, 3
SIZES = (4, 3)


def _batch(most_drafts: int = MOST_DRAFTS) -> InputBatch:
    groups = [
        KVGroupInfo(spec=FullAttention(block_size=SIZES[0], bytes_per_block=1), num_blocks=999, pool_id=0),
        KVGroupInfo(spec=SlidingWindow(block_size=SIZES[1], bytes_per_block=1, window=8), num_blocks=999, pool_id=1),
    ]
    return InputBatch(groups, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, num_speculative_tokens=most_drafts)


@dataclass
class Naive:
    """One request, kept the plain way."""

    tokens: list[int]
    num_prompt: int
    computed: int
    cached: int
    tables: list[dict[int, int]] = field(default_factory=lambda: [{}, {}])

    def slot_of(self, group: int, position: int) -> int:
        if position < self.cached:
            return -1
        return self.tables[group][position // SIZES[group]] * SIZES[group] + position % SIZES[group]


class Simulation:
    """Random plans for an `InputBatch`, and what each must give, request by request."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch = _batch()
        self.requests: dict[int, Naive] = {}
        self.next_block = 1
        self.last_rows: list[int] = []
        self.step = 0

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def new_blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def run_step(self) -> None:
        released = [slot for slot in self.requests if len(self.requests[slot].tokens) > 30 or self.integer(0, 9) == 0]
        for slot in released:
            del self.requests[slot]
        new = [self.enter(slot) for slot in range(MAX_SEQS) if slot not in self.requests and self.integer(0, 1)]
        if not self.requests:
            new.append(self.enter(0))
        steady = self.last_rows and not new and not released and self.integer(0, 1)
        steady = steady and all(self.known(slot) == 1 for slot in self.last_rows)
        rows = self.last_rows if steady else [int(slot) for slot in self.rng.permutation(sorted(self.requests))]
        if not steady:
            rows = rows[: self.integer(1, len(rows))]
        drafts = {} if steady else {slot: self.drafts() for slot in rows if self.integer(0, 2) == 0}
        counts = {slot: 1 if steady else self.integer(1, self.known(slot)) for slot in rows}
        drafts = {slot: ids for slot, ids in drafts.items() if counts[slot] == self.known(slot) and ids}
        plan = StepPlan(
            step=self.step,
            released=np.array(released, np.int32) if released else None,
            new=new,
            tables=self.grow(rows, counts, drafts),
            rows=None if steady else np.array(rows, np.int32),
            num_scheduled_tokens=None
            if steady
            else np.array([counts[slot] + len(drafts.get(slot, ())) for slot in rows], np.int32),
            drafts=self.message(rows, drafts),
        )
        self.step += 1
        self.last_rows = rows
        layout = self.batch.apply(plan)
        self.check(layout, rows, counts, drafts)
        self.finish(layout, rows, counts, drafts)

    def known(self, slot: int) -> int:
        return len(self.requests[slot].tokens) - self.requests[slot].computed

    def drafts(self) -> list[int]:
        return [self.integer(0, 99) for _ in range(self.integer(0, MOST_DRAFTS))]

    def enter(self, slot: int) -> NewRequest:
        tokens = [self.integer(0, 99) for _ in range(self.integer(1, 20))]
        request = Naive(tokens, self.integer(1, len(tokens)), self.integer(0, len(tokens) - 1), 0)
        request.cached = self.integer(request.computed, len(tokens))
        blocks = []
        for group, size in enumerate(SIZES):
            held = self.new_blocks(-(-len(tokens) // size) if self.integer(0, 1) else -(-request.cached // size))
            request.tables[group] = dict(enumerate(held))
            blocks.append(np.array(held, np.int32))
        self.requests[slot] = request
        return NewRequest(
            slot=slot,
            request_id=f"{slot}",
            index=0,
            token_ids=np.array(tokens, np.int32),
            num_prompt_tokens=request.num_prompt,
            num_computed_tokens=request.computed,
            num_cached_tokens=request.cached,
            block_ids=tuple(blocks),
            sampling=SamplingParams(),
        )

    def grow(self, rows: list[int], counts: dict[int, int], drafts: dict[int, list[int]]) -> tuple[TableUpdate | None, ...]:
        """Blocks for the tokens of the step, in both groups."""
        updates: list[TableUpdate | None] = []
        for group, size in enumerate(SIZES):
            entries = []
            for slot in rows:
                request = self.requests[slot]
                end = request.computed + counts[slot] + len(drafts.get(slot, ()))
                for column in range(-(-end // size)):
                    if column not in request.tables[group]:
                        (request.tables[group][column],) = self.new_blocks(1)
                        entries.append((slot, column, request.tables[group][column]))
            slots, columns, blocks = np.array(entries, np.int32).reshape(-1, 3).T
            updates.append(TableUpdate(slots=slots, columns=columns, block_ids=blocks) if entries else None)
        return tuple(updates) if any(updates) else ()

    def message(self, rows: list[int], drafts: dict[int, list[int]]) -> Drafts | None:
        if not drafts:
            return None
        chosen = [row for row, slot in enumerate(rows) if slot in drafts]
        return Drafts(
            rows=np.array(chosen, np.int32),
            counts=np.array([len(drafts[rows[row]]) for row in chosen], np.int32),
            token_ids=np.array([token for row in chosen for token in drafts[rows[row]]], np.int32),
        )

    def check(self, layout: StepLayout, rows: list[int], counts: dict[int, int], drafts: dict[int, list[int]]) -> None:
        tokens, positions, starts, sampled, logit_tokens, logit_positions = [], [], [0], [], [], []
        mappings: list[list[int]] = [[], []]
        for row, slot in enumerate(rows):
            request, guesses = self.requests[slot], drafts.get(slot, [])
            known = request.tokens + guesses
            end = request.computed + counts[slot] + len(guesses)
            for position in range(request.computed, end):
                tokens.append(known[position])
                positions.append(position)
                for group in range(2):
                    mappings[group].append(request.slot_of(group, position))
            starts.append(len(tokens))
            if end == len(known):
                sampled.append(row)
                for position in range(len(request.tokens), len(known) + 1):
                    logit_tokens.append(starts[row] + position - 1 - request.computed)
                    logit_positions.append(position)
        assert layout.token_ids.tolist() == tokens
        assert layout.positions.tolist() == positions
        assert layout.query_start_loc.tolist() == starts
        assert layout.slots.tolist() == rows
        assert layout.num_computed_tokens.tolist() == [self.requests[slot].computed for slot in rows]
        ends = [self.requests[slot].computed + counts[slot] + len(drafts.get(slot, ())) for slot in rows]
        assert layout.seq_lens.tolist() == ends
        assert [mapping.tolist() for mapping in layout.slot_mappings] == mappings
        assert layout.sampled.tolist() == sampled
        assert layout.logit_tokens.tolist() == logit_tokens
        assert layout.logit_positions.tolist() == logit_positions
        assert (layout.draft_counts is None) == (not drafts)
        assert layout.max_query_len == max(np.diff(starts))
        assert layout.max_seq_len == max(ends)
        assert not layout.has_unknown_tokens
        for group, size in enumerate(SIZES):
            table = self.batch.block_table(group, layout.slots, layout.max_seq_len)
            for row, slot in enumerate(rows):
                held = self.requests[slot].tables[group]
                assert table[row].tolist() == [held.get(column, 0) for column in range(table.shape[1])]
            assert table.shape[1] * size >= layout.max_seq_len

    def finish(self, layout: StepLayout, rows: list[int], counts: dict[int, int], drafts: dict[int, list[int]]) -> None:
        """Sample random tokens, accept a random part of the drafts, and move on in both worlds."""
        width = 1 if layout.draft_counts is None else 1 + MOST_DRAFTS
        tokens = np.full((len(layout.sampled), width), -1, np.int32)
        accepted = np.zeros(len(layout.sampled), np.int32)
        for slot in rows:
            self.requests[slot].computed += counts[slot]
        for index, row in enumerate(layout.sampled):
            slot = rows[row]
            guesses = drafts.get(slot, [])
            accepted[index] = self.integer(0, len(guesses))
            kept = [*guesses[: accepted[index]], self.integer(0, 99)]
            tokens[index, : len(kept)] = kept
            self.requests[slot].tokens += kept
            self.requests[slot].computed += int(accepted[index])
        advanced = self.batch.advance(layout)
        self.batch.settle(advanced, tokens, accepted if layout.draft_counts is not None else None)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_every_layout_is_that_of_a_request_by_request_model(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(12):
        simulation.run_step()


def _request(slot: int, tokens: list[int], **more: Any) -> NewRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "index": 0,
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": 0,
        "num_cached_tokens": 0,
        "block_ids": (np.arange(1, 11, dtype=np.int32), np.arange(1, 15, dtype=np.int32)),
        "sampling": SamplingParams(),
    }
    return NewRequest(slot=slot, token_ids=np.array(tokens, np.int32), **(fields | more))


def _rows(*slots: int) -> np.ndarray[Any, Any]:
    return np.array(slots, np.int32)


def test_tokens_that_only_the_device_knows_are_marked_and_filled_in_later() -> None:
    batch = _batch()
    first = batch.apply(StepPlan(step=0, new=[_request(2, [5, 6])], rows=_rows(2), num_scheduled_tokens=_rows(2)))
    earlier = batch.advance(first)
    second = batch.apply(StepPlan(step=1))
    assert second.token_ids.tolist() == [-1]
    assert second.has_unknown_tokens
    later = batch.advance(second)
    batch.settle(earlier, np.array([[7]], np.int32), None)
    batch.settle(later, np.array([[8]], np.int32), None)
    assert batch.token_ids[2, :4].tolist() == [5, 6, 7, 8]
    assert batch.apply(StepPlan(step=2)).token_ids.tolist() == [8]


def test_a_late_token_never_reaches_the_slots_next_owner() -> None:
    batch = _batch()
    layout = batch.apply(StepPlan(step=0, new=[_request(0, [5, 6])], rows=_rows(0), num_scheduled_tokens=_rows(2)))
    late = batch.advance(layout)
    plan = StepPlan(step=1, released=_rows(0), new=[_request(0, [1, 2, 3, 4])], rows=_rows(0), num_scheduled_tokens=_rows(4))
    batch.apply(plan)
    batch.settle(late, np.array([[99]], np.int32), None)
    assert batch.token_ids[0, :4].tolist() == [1, 2, 3, 4]


def test_a_failed_row_goes_on_with_some_token_for_a_step_that_is_planned_already() -> None:
    batch = _batch()
    layout = batch.apply(StepPlan(step=0, new=[_request(0, [5, 6])], rows=_rows(0), num_scheduled_tokens=_rows(2)))
    batch.settle(batch.advance(layout), np.array([[-1]], np.int32), None)
    after = batch.apply(StepPlan(step=1))
    assert after.token_ids.tolist() == [0]
    assert not after.has_unknown_tokens


def test_steady_steps_are_told_apart_from_changes() -> None:
    batch = _batch()
    prefill = StepPlan(step=0, new=[_request(0, [5, 6])], rows=_rows(0), num_scheduled_tokens=_rows(2))
    steady = []
    for plan in (prefill, StepPlan(step=1), StepPlan(step=2), StepPlan(step=3, rows=_rows(0)), StepPlan(step=4)):
        layout = batch.apply(plan)
        batch.settle(batch.advance(layout), np.array([[1]], np.int32), None)
        steady.append(layout.same_requests)
    assert steady == [False, True, True, False, True]


def test_a_recurrent_group_has_one_column_and_its_block_is_every_token_s_slot() -> None:
    specs = (FullAttention(block_size=4, bytes_per_block=1), RecurrentState(block_size=4, bytes_per_block=1))
    groups = [KVGroupInfo(spec=spec, num_blocks=99, pool_id=number) for number, spec in enumerate(specs)]
    batch = InputBatch(groups, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)
    request = NewRequest(
        slot=2,
        request_id="r",
        index=0,
        token_ids=np.arange(10, dtype=np.int32),
        num_prompt_tokens=10,
        sampling=SamplingParams(),
        block_ids=(np.array([5, 6], np.int32), np.array([7], np.int32)),
        num_computed_tokens=4,
        num_cached_tokens=4,
    )
    rows, three = np.array([2], np.int32), np.array([3], np.int32)
    layout = batch.apply(StepPlan(step=0, new=[request], rows=rows, num_scheduled_tokens=three))
    assert [mapping.tolist() for mapping in layout.slot_mappings] == [[24, 25, 26], [7, 7, 7]]
    assert batch.block_table(1, layout.slots, layout.max_seq_len).tolist() == [[7]]
    batch.advance(layout)
    zero, nine = np.zeros(1, np.int32), np.array([9], np.int32)
    update = TableUpdate(slots=rows, columns=zero, block_ids=nine)
    layout = batch.apply(StepPlan(step=1, tables=(None, update)))
    assert layout.slot_mappings[1].tolist() == [9]
    assert batch.block_table(1, layout.slots, layout.max_seq_len).tolist() == [[9]]
