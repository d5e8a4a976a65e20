"""`KVCacheManager` against a model of it in plain Python: anything a scheduler may ask of it, in any order.

The model knows what every block must hold. A position's content is the whole sequence up to it and the salt, interned as one
number (`Contents`), so two blocks hold the same only if they belong to the same prefix. From the plans alone a worker's tables
and blocks are kept, and every row reads what it sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from machines import run_machine
from manager_model import (
    EXTRAS,
    MAX_CHUNK,
    MAX_IN_FLIGHT,
    NUM_SLOTS,
    PROMPTS,
    Contents,
    Dice,
    ManagerModel,
    Place,
    Row,
    Running,
    ids,
)

from octavo.core.api.kv_cache import MLA, FullAttention, KVGroupInfo, RecurrentState, SlidingWindow
from octavo.core.kv_cache import KVCacheManager

DICE = st.binary(min_size=32, max_size=32).map(Dice)


class ManagerMachine(ManagerModel):
    """Rules do what a scheduler does. `settle` compares each change of the tables with what blocks were there to be given."""

    @initialize(
        size=st.sampled_from([1, 2, 3]),
        kinds=st.lists(st.tuples(st.integers(0, 6), st.integers(4, 24), st.booleans()), min_size=1, max_size=3),
        max_model_len=st.sampled_from([24, 25]),
        caching=st.sampled_from([True, True, True, True, True, False]),
        prefix_hash=st.sampled_from(["sha256", "xxh3"]),
        max_chunk=st.sampled_from([1, 3, MAX_CHUNK, MAX_CHUNK]),
    )
    def start(
        self, size: int, kinds: list[tuple[int, int, bool]], max_model_len: int, caching: bool, prefix_hash: str, max_chunk: int
    ) -> None:
        specs = (
            FullAttention(block_size=size, bytes_per_block=1),
            SlidingWindow(block_size=size, bytes_per_block=1, window=1),
            SlidingWindow(block_size=size, bytes_per_block=1, window=3),
            SlidingWindow(block_size=size, bytes_per_block=1, window=8),
            MLA(block_size=2 * size, bytes_per_block=1),
            RecurrentState(block_size=size, bytes_per_block=1),
            RecurrentState(block_size=2 * size, bytes_per_block=1),
        )
        self.groups = [
            KVGroupInfo(spec=specs[kind], num_blocks=num_blocks, pool_id=number if own else 0)
            for number, (kind, num_blocks, own) in enumerate(kinds)
        ]
        self.kv = KVCacheManager(
            self.groups,
            max_num_seqs=NUM_SLOTS,
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
            prefix_hash=prefix_hash,
        )
        self.max_model_len, self.caching, self.max_chunk = max_model_len, caching, max_chunk
        self.sizes = [group.block_size for group in self.groups]
        self.windows = [g.spec.window if isinstance(g.spec, SlidingWindow) else None for g in self.groups]
        self.recurrent = [isinstance(group.spec, RecurrentState) for group in self.groups]
        self.edges = [size for size, recurrent in zip(self.sizes, self.recurrent, strict=True) if recurrent]
        self.alignment = int(np.lcm.reduce(self.sizes))
        pool_ids = list(dict.fromkeys(group.pool_id for group in self.groups))
        self.pool_of = [pool_ids.index(group.pool_id) for group in self.groups]
        self.num_pools = len(pool_ids)
        # A pool that several groups draw from has as many blocks as the smallest of them.
        self.num_blocks = [min(g.num_blocks for g in self.groups if g.pool_id == pool_id) for pool_id in pool_ids]

        self.contents = Contents()
        self.running: dict[int, Running] = {}
        self.tokens = np.zeros((NUM_SLOTS, max_model_len), np.int32)
        self.places: dict[Place, int] = {}  # block of each table entry that is in use
        self.lefts: dict[tuple[int, int], tuple[int, int]] = {}  # (slot, group) → (block, edge): a state whose key isn't known
        self.holders: list[Counter[int]] = [Counter() for _ in range(self.num_pools)]
        self.limbo: list[dict[int, int]] = [{} for _ in range(self.num_pools)]  # block → the last step that may use it
        self.index: list[dict[int, int]] = [{} for _ in self.groups]  # content → the block that is found
        self.carries: list[dict[int, tuple[int, int]]] = [{} for _ in range(self.num_pools)]  # block → group, content
        self.key_of: dict[tuple[int, int], bytes] = {}  # block size, content → its key, and back
        self.content_of: dict[tuple[int, bytes], int] = {}
        self.num_evictions = self.planned = self.done = 0
        self.may_reset = True

        self.writers: dict[int, dict[int, int]] = {}  # group → slot → column, of the rows that `extend` gives a copy
        self.copy_targets: list[set[int]] = [set() for _ in self.groups]  # what the next plan must copy into
        self.worker_tables: list[dict[int, dict[int, int]]] = [{} for _ in self.groups]  # group → slot → column → block
        self.buffer_of = self.pool_of  # the groups of a pool overlay each other
        self.worker_blocks: list[dict[int, tuple[int, dict[int, int]]]] = [{} for _ in self.groups]  # block → group, content
        assert self.kv.chunk_edges == tuple(self.edges)
        fits = self.kv.always_fits(max_chunk)
        assert all(count < total for count, total in zip(self.kv.peak_blocks(fits, max_chunk), self.num_blocks, strict=True))

    @rule(dice=DICE)
    def act(self, dice: Dice) -> None:
        """One rule for all, chosen by dice: the mix is ours, and no example is spent on rules that can't run."""
        actions = {
            self.admit: 5 if len(self.running) < NUM_SLOTS else 0,
            self.step: 10 if self.running else 0,
            self.commit: 2 if any(s.findable and s.committed < s.computed for s in self.running.values()) else 0,
            self.fork: 3 if self.running and len(self.running) < NUM_SLOTS else 0,
            self.free: 2 if self.running else 0,
            self.finish_steps: 3 if self.done < self.planned else 0,
            self.reset_prefix_cache: 1 if self.may_reset and any(self.index) else 0,
        }
        action = dice.among([action for action, weight in actions.items() for _ in range(weight)])
        note(f"{action.__name__}:")
        action(dice)

    # What a scheduler does

    def admit(self, dice: Dice) -> None:
        """A new sequence, with its first chunk if there is room for it (or it waits for a later step)."""
        count, extra = dice.below(self.max_chunk + 1), EXTRAS[max(dice.below(9) - 5, 0)]
        tokens = [*PROMPTS[dice.below(4) // 3][: dice.below(17)], *dice.several(dice.below(5), 3)] or [0]
        contents = self.contents.follow(self.contents.empty(extra), tokens)
        prefix = self.kv.new_prefix(ids(tokens), extra)
        hit = self.kv.match(prefix, len(tokens))
        self.check_hit(hit, contents)
        cost = self.kv.cost(hit, len(tokens), self.max_chunk)
        slot = min(set(range(NUM_SLOTS)) - set(self.running))
        sequence = Running(
            tokens,
            contents,
            extra,
            prefix,
            computed=min(hit.num_tokens, len(tokens) - 1),
            cached=hit.num_tokens,
            committed=hit.num_tokens,
            promised=cost,
            planned_length=len(tokens),
            trimmed=min(hit.num_tokens, len(tokens) - 1),  # a hit behind a window leaves out what no query from there sees
        )
        for group, entries in enumerate(hit.entries):
            pool = self.pool_of[group]
            sequence.borrowed |= {(pool, block) for block in entries.tolist() if self.holders[pool][block]}
        self.running[slot] = sequence
        self.tokens[slot, : len(tokens)] = tokens
        free = self.kv.num_free
        self.kv.adopt(slot, prefix, hit)
        self.settle(shared={slot})
        assert (free - self.kv.num_free <= cost).all()
        if count:
            row = self.row_of(slot, count)
            if row.end == row.start or (self.demand([row]).sum(axis=1) <= self.kv.num_free).all():
                self.extend([row] if row.end > row.start else [], announce=False)
                sequence.row = row

    def step(self, dice: Dice) -> None:
        """A step of some rows, and the commit that a scheduler lets follow at once.

        ``single``: rows of one token. ``lazy``: as the scheduler does, the manager is only asked about rows that end behind
        `event_at`. ``guesses``: tokens that rows at their sequence's end add, and that are found wrong.
        """
        single, lazy, guesses = dice.one_in(2), dice.one_in(2), (0, 0, 0, 1, 3)[dice.below(5)]
        slots = sorted(self.running)
        rows: dict[int, Row] = {}
        guessed: dict[int, int] = {}  # slot → tokens that stay
        chosen = [dice.several(3, 24) for _ in range(1 + dice.below(4))]
        for number, count, token in chosen:
            slot = slots[number % len(slots)]
            sequence = self.running[slot]
            if sequence.row is not None or slot in rows:
                continue
            if sequence.computed == len(sequence.tokens):
                self.append(slot, [token % 3])
            if sequence.computed == len(sequence.tokens):  # there is no room for more
                continue
            if (
                guesses
                and not single
                and not self.edges
                and sequence.computed + 1 + count % self.max_chunk > len(sequence.tokens)
            ):
                guessed[slot] = len(sequence.tokens)
                self.append(slot, [2 - token % 3] * guesses)
            rows[slot] = self.row_of(slot, 1 if single else 1 + count % self.max_chunk)
        planned = self.secure([*rows.values()], lazy)
        without = [row.slot for row in rows.values() if row not in planned]
        if without and dice.one_in(2):  # it is preempted, and its slot may be somebody else's in this very step
            guessed.pop(without[0], None)
            self.end(without[0])
            if dice.one_in(2):
                self.admit(dice)
        planned += [sequence.row for sequence in self.running.values() if sequence.row is not None]
        if planned:
            self.plan(planned)
        for slot, length in guessed.items():
            self.take_back(slot, length)
        if not dice.one_in(4):
            self.commit_parts(dict.fromkeys(self.running, 4), ahead=False)

    def commit(self, dice: Dice) -> None:
        """Some or all of the tokens computed by some of the slots."""
        self.commit_parts({slot: dice.below(5) for slot in self.running}, ahead=dice.one_in(2))

    def commit_parts(self, parts: dict[int, int], ahead: bool) -> None:
        """So many quarters of what each slot could commit. ``ahead``: their keys are known before."""
        slots, counts = [], []
        for slot, part in parts.items():
            sequence = self.running[slot]
            fresh = sequence.computed - sequence.committed
            if part and self.caching and sequence.findable and fresh > 0:
                slots.append(slot)
                counts.append(sequence.committed + -(-fresh * part // 4))
                if ahead:
                    self.kv.extend_prefix(sequence.prefix, ids(sequence.tokens))
        if not slots:
            return
        self.kv.commit(ids(slots), ids(counts), self.tokens)
        for group, size in enumerate(self.sizes):
            for slot, count in zip(slots, counts, strict=True):
                for column in range(self.running[slot].committed // size, count // size):
                    self.expect_findable(slot, group, column)
        for slot, count in zip(slots, counts, strict=True):
            self.running[slot].committed = count
        self.settle()

    def fork(self, dice: Dice) -> None:
        """Another sequence goes on from what one has computed; it may compute the last token once more."""
        parent = self.running[slot := dice.among(sorted(self.running))]
        again, own = dice.one_in(2), dice.several(dice.below(4), 3)
        count = parent.computed
        needed = Counter(pool for pool, recurrent in zip(self.pool_of, self.recurrent, strict=True) if recurrent)
        if not (parent.known and parent.row is None and count and count >= parent.cached):
            return
        if any(self.kv.num_free[pool] < blocks for pool, blocks in needed.items()):
            return
        child = min(set(range(NUM_SLOTS)) - set(self.running))
        tokens = [*parent.tokens[:count], *own][: self.max_model_len]
        self.kv.extend_prefix(parent.prefix, ids(parent.tokens))
        prefix = self.kv.cut_prefix(parent.prefix, count)
        again = not self.edges and (parent.trimmed < count and (again or len(tokens) == count))
        self.running[child] = Running(
            tokens,
            [*parent.contents[:count], *self.contents.follow(parent.contents[count - 1], tokens[count:])],
            parent.extra,
            prefix,
            computed=count - again,
            cached=count,
            committed=count,
            findable=parent.findable,
        )
        self.running[child].trimmed = parent.trimmed
        parent.promised = None
        self.tokens[child, : len(tokens)] = tokens
        self.kv.fork(slot, child, prefix, count)
        self.settle(shared={child})
        for group, recurrent in enumerate(self.recurrent):
            columns = 1 if recurrent else -(-count // self.sizes[group])
            for column in range(columns):
                ours, theirs = self.places.get((child, group, column)), self.places.get((slot, group, column))
                if recurrent:
                    assert ours != theirs
                    self.copy_targets[group].add(ours)
                else:
                    assert ours == theirs

    def free(self, dice: Dice) -> None:
        self.end(dice.among(sorted(self.running)))

    def finish_steps(self, dice: Dice) -> None:
        self.finish(1 + dice.below(MAX_IN_FLIGHT))

    def finish(self, steps: int) -> None:
        self.done = min(self.done + steps, self.planned)
        self.kv.set_in_flight(self.planned, self.done)
        self.limbo = [{b: step for b, step in blocks.items() if step > self.done} for blocks in self.limbo]

    def reset_prefix_cache(self, _: Dice) -> None:
        """Once. What runs commits nothing any more."""
        self.may_reset = False
        self.kv.reset_prefix_cache()
        self.index, self.carries = [{} for _ in self.groups], [{} for _ in range(self.num_pools)]
        for sequence in self.running.values():
            sequence.findable = False

    # Parts of a step

    def append(self, slot: int, tokens: list[int]) -> None:
        sequence = self.running[slot]
        tokens = tokens[: self.max_model_len - len(sequence.tokens)]
        before = sequence.contents[-1]
        self.tokens[slot, len(sequence.tokens) : len(sequence.tokens) + len(tokens)] = tokens
        sequence.tokens += tokens
        sequence.contents += self.contents.follow(before, tokens)

    def take_back(self, slot: int, length: int) -> None:
        """The guesses behind ``length`` tokens were wrong: their positions will be written anew."""
        sequence = self.running[slot]
        del sequence.tokens[length:], sequence.contents[length:]
        sequence.computed = min(sequence.computed, length)

    def row_of(self, slot: int, count: int) -> Row:
        """The next row of a slot, of at most ``count`` tokens."""
        sequence = self.running[slot]
        first = sequence.computed
        end = min(
            first + min(count, self.max_chunk), len(sequence.tokens), *[(first // edge + 1) * edge for edge in self.edges]
        )
        start = max(first, sequence.cached)
        return Row(slot, first, start, max(end, start))

    def arrays(self, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return ids(r.slot for r in rows), ids(r.start for r in rows), ids(r.end for r in rows)

    def demand(self, rows: Sequence[Row]) -> np.ndarray:
        return self.kv.demand(*self.arrays(rows))

    def secure(self, rows: list[Row], lazy: bool) -> list[Row]:
        """Get the rows their blocks; without those that find no room."""
        due = [row for row in rows if not lazy or row.end > self.kv.event_at[row.slot]]
        ready = [row for row in rows if row not in due]
        if ready:
            assert not self.demand(ready).any()
        if not due:
            return ready
        slots, starts, ends = self.arrays(due)
        self.kv.trim(slots, ids(row.first for row in due))
        for row in due:
            self.running[row.slot].trimmed = max(row.first, self.running[row.slot].trimmed)
        self.settle()
        demand = self.demand(due)
        if (demand.sum(axis=1) > self.kv.num_free).any():
            assert not self.kv.try_extend(slots, starts, ends)
            if all(row.first == row.start == row.end - 1 for row in due):
                assert not self.kv.extend_decodes(slots, ends)
            self.settle()
            room = (np.cumsum(demand, axis=1) <= self.kv.num_free[:, None]).all(axis=0)
            due = [row for row, fits in zip(due, room.tolist(), strict=True) if fits]
        if due:
            self.extend(due)
        return ready + due

    def extend(self, rows: list[Row], announce: bool = True) -> None:
        """Extend by whichever of its three ways is due, and compare what it takes and copies with what it has to."""
        if not rows:
            return
        demand, before = self.demand(rows), self.places
        slots, starts, ends = self.arrays(rows)
        for group, recurrent in enumerate(self.recurrent):
            (self.expect_state_moves if recurrent else self.expect_copies)(group, rows)
        if not announce:
            self.kv.extend(slots, starts, ends, announce=False)
        elif all(row.end == row.start + 1 == row.first + 1 for row in rows):
            assert self.kv.extend_decodes(slots, ends)
        else:
            assert self.kv.try_extend(slots, starts, ends)
        after = self.read_places()
        for group in range(len(self.groups)):
            for slot, targets in self.writers[group].items():
                column = 0 if self.recurrent[group] else targets
                place = slot, group, column
                assert after[place] != before[place], "a block that others hold is written"
                self.copy_targets[group].add(after[place])
                if self.recurrent[group]:
                    self.leave_state(slot, group, before[place], targets)
        replaced = {p for p, block in before.items() if after.get(p) != block}
        expected = {(s, g, 0 if self.recurrent[g] else c) for g, w in self.writers.items() for s, c in w.items()}
        assert replaced == expected, "copied what nobody else holds, or lost a block"
        taken = np.zeros_like(demand)
        order = {row.slot: i for i, row in enumerate(rows)}
        for (slot, group, _column), _ in set(after.items()) - set(before.items()):
            taken[self.pool_of[group], order[slot]] += 1
        assert (taken <= demand).all(), f"demand said {demand}, extend took {taken}"
        self.settle()
        for row in rows:
            self.check_peak(row)

    def expect_copies(self, group: int, rows: list[Row]) -> None:
        """``writers[group]``: slot → column, for each row that writes into a block which others still hold at its turn."""
        holders, size = self.holders[self.pool_of[group]].copy(), self.sizes[group]
        self.writers[group] = {}
        for row in rows:
            column = row.start // size
            block = self.places.get((row.slot, group, column))
            if row.end > row.start and block is not None and holders[block] > 1:
                holders[block] -= 1
                self.writers[group][row.slot] = column

    def expect_state_moves(self, group: int, rows: list[Row]) -> None:
        """``writers[group]``: slot → edge, for each row that goes on from a state at an edge, which stays as a checkpoint."""
        at_edge = (row for row in rows if row.start and row.start % self.sizes[group] == 0 and row.end > row.start)
        self.writers[group] = {row.slot: row.start for row in at_edge}

    def leave_state(self, slot: int, group: int, block: int, edge: int) -> None:
        """The slot has moved on from its state at an edge. It holds on to it until its key is known."""
        self.lefts.pop((slot, group), None)
        if block not in self.carries[self.pool_of[group]]:
            self.lefts[slot, group] = block, edge

    def plan(self, rows: list[Row]) -> None:
        """Take the changes, do what a worker does with them, and count the step as in flight."""
        if self.planned - self.done == MAX_IN_FLIGHT:
            self.finish(1)
        self.planned += 1
        tables, copies = self.kv.take_changes()
        for group in range(len(self.groups)):
            self.apply_tables(group, tables[group] if tables else None)
        self.apply_copies(copies)
        for row in rows:
            for group in range(len(self.groups)):
                self.write(group, row)
        for row in rows:
            for group in range(len(self.groups)):
                self.read(group, row)
        for row in rows:
            sequence = self.running[row.slot]
            sequence.row, sequence.computed = None, max(row.end, row.first)
        self.kv.set_in_flight(self.planned, self.done)

    def teardown(self) -> None:
        """With everything given back, no block is lost."""
        if not hasattr(self, "kv"):
            return
        for slot in sorted(self.running):
            self.end(slot)
        self.kv.set_in_flight(self.planned, self.planned)
        for pool, num_blocks in zip(self.kv.pools, self.num_blocks, strict=True):
            assert sorted(pool.free_blocks().tolist()) == list(range(1, num_blocks))
            assert not pool.ref_count.any()
        assert self.kv.usage == 0


def test_the_manager_behaves_like_its_model() -> None:
    run_machine(ManagerMachine, 40, steps=20)


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_the_manager_behaves_like_its_model_in_two_thousand_examples() -> None:
    run_machine(ManagerMachine, 2000, steps=20)
