"""The model of `test_manager_machine`: what every block must hold, and a worker with tables and blocks from plans alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant

from octavo.core.kv_cache import Hit
from octavo.core.kv_cache.hashing import Prefix, encode_extra

NUM_SLOTS = 4
MAX_CHUNK = 6
MAX_IN_FLIGHT = 3
PROMPTS = tuple(tuple((i * i + k * i + k) % 3 for i in range(16)) for k in range(2))  # what sequences have in common
EXTRAS = (encode_extra(None, None), encode_extra("a", None), encode_extra("b", None), encode_extra(None, {"adapter": 1}))

T = TypeVar("T")
Place = tuple[int, int, int]  # slot, group, column of the group's table


def ids(values: Iterable[int]) -> np.ndarray:
    return np.array([*values], np.int32)


class Contents:
    """Numbers for sequences: one for each different (salt, tokens)."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}

    def empty(self, extra: bytes) -> int:
        return self._number(extra, -1)

    def follow(self, before: int, tokens: Iterable[int]) -> list[int]:
        """The content of each position, after content ``before``."""
        out = []
        for token in tokens:
            before = self._number(before, token)
            out.append(before)
        return out

    def _number(self, before: object, token: int) -> int:
        return self._numbers.setdefault((before, token), len(self._numbers))


class Dice:
    """Choices from bytes that hypothesis draws at once, which is much cheaper than one by one. 0 once they run out."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def below(self, end: int) -> int:
        return next(self._data, 0) % end

    def one_in(self, count: int) -> bool:
        return self.below(count) == count - 1

    def among(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def several(self, count: int, end: int) -> list[int]:
        return [self.below(end) for _ in range(count)]


@dataclass
class Running:
    """What runs in a slot."""

    tokens: list[int]
    contents: list[int]  # of each token
    extra: bytes
    prefix: Prefix
    computed: int  # the next row begins here
    cached: int  # and writes nothing below this
    committed: int  # tokens that `commit` was told of, or that were there from the beginning
    findable: bool = True  # False after a reset of the prefix cache: it commits nothing any more
    known: bool = False  # to the worker
    row: Row | None = None  # extended already, for the next plan
    reached: int = 0  # the end of its longest row, guesses and all
    trimmed: int = 0  # `trim` was told that no query below this comes
    promised: np.ndarray | None = None  # [num_pools] blocks that it takes at most, by `cost`
    planned_length: int = 0  # up to this many tokens
    borrowed: set[tuple[int, int]] = field(default_factory=set)  # (pool, block) that others held when it started


@dataclass
class Row:
    """A sequence computes [first, end) and writes [start, end)."""

    slot: int
    first: int
    start: int
    end: int


class ManagerModel(RuleBasedStateMachine):
    """What is checked after each rule; the rules, and the state that they begin with, are `ManagerMachine`'s."""

    def apply_tables(self, group: int, update: object) -> None:
        tables = self.worker_tables[group]
        for slot, sequence in self.running.items():
            if not sequence.known or slot not in tables:
                tables[slot] = dict(enumerate(self.kv.entries(slot)[group].tolist()))
        if update is not None:
            for slot, column, block in zip(
                *(a.tolist() for a in (update.slots, update.columns, update.block_ids)), strict=True
            ):
                tables[slot][column] = block
        for slot, sequence in self.running.items():
            ours = {column: block for column, block in tables[slot].items() if block}
            assert ours == {c: b for (s, g, c), b in self.places.items() if (s, g) == (slot, group)}
            sequence.known = sequence.known or group == len(self.groups) - 1

    def apply_copies(self, copies: tuple[np.ndarray | None, ...]) -> None:
        """Every source is read before any target is written, and that before the rows write."""
        moves = []
        for group, targets in enumerate(self.copy_targets):
            found = copies[group] if copies else None
            pairs = [] if found is None else found.tolist()
            assert sorted(target for _, target in pairs) == sorted(targets)
            targets.clear()
            blocks = self.worker_blocks[self.buffer_of[group]]
            moves += [(blocks, target, blocks.get(source, (group, {}))) for source, target in pairs]
        for blocks, target, (owner, content) in moves:
            blocks[target] = owner, dict(content)

    def write(self, group: int, row: Row) -> None:
        if row.end == row.start:
            return
        blocks, contents, size = self.worker_blocks[self.buffer_of[group]], self.running[row.slot].contents, self.sizes[group]
        if self.recurrent[group]:
            block = self.places[row.slot, group, 0]
            assert row.first == 0 or blocks[block] == (group, {0: contents[row.first - 1]}), "the state isn't the row's"
            blocks[block] = group, {0: contents[row.end - 1]}
            return
        for position in range(row.start, row.end):
            block = self.places[row.slot, group, position // size]
            owner, content = blocks.get(block, (group, {}))
            if owner != group:
                content = {}
            content[position % size] = contents[position]
            blocks[block] = group, content

    def read(self, group: int, row: Row) -> None:
        """What the row's queries see is there; blocks wholly behind the first one's window aren't held."""
        size, window, contents = self.sizes[group], self.windows[group], self.running[row.slot].contents
        blocks = self.worker_blocks[self.buffer_of[group]]
        if self.recurrent[group]:
            block = self.places[row.slot, group, 0]
            assert blocks[block] == (group, {0: contents[row.end - 1]}), "two rows write one state"
            return
        seen = 0 if window is None else max(row.first - window + 1, 0)
        for position in range(seen, row.end):
            place = row.slot, group, position // size
            assert place in self.places, f"the block of position {position} is gone, which the row sees"
            owner, content = blocks[self.places[place]]
            assert owner == group
            assert content.get(position % size) == contents[position], f"position {position} is another sequence's"
        for column in range(seen // size):
            assert (row.slot, group, column) not in self.places, "a block behind the window is held"

    # The model

    def read_places(self) -> dict[Place, int]:
        return {
            (slot, group, column): block
            for slot in self.running
            for group, entries in enumerate(self.kv.entries(slot))
            for column, block in enumerate(entries.tolist())
            if block
        }

    def settle(self, shared: Iterable[int] = ()) -> None:
        """Take in the tables as they are now. What is new in them was free, except in slots that start from others' blocks."""
        before, after = self.places, self.read_places()
        old, holders = self.holders, [Counter() for _ in range(self.num_pools)]
        for (_, group, _), block in after.items():
            holders[self.pool_of[group]][block] += 1
        for (_, group), (block, _) in self.lefts.items():
            holders[self.pool_of[group]][block] += 1
        for place, block in after.items():
            if before.get(place) != block:
                slot, group, _ = place
                pool = self.pool_of[group]
                if slot in shared and not (self.recurrent[group] and self.running[slot].promised is None):
                    self.limbo[pool].pop(block, None)
                    continue
                assert holders[pool][block] == 1, f"block {block} was given to two"
                assert block not in self.limbo[pool], f"block {block} was given while a step that uses it was in flight"
                assert not (old[pool][block] and self.planned > self.done), f"block {block} changed hands in flight"
                self.evict(pool, block)
        if self.planned > self.done:
            for pool in range(self.num_pools):
                self.limbo[pool] |= dict.fromkeys(old[pool].keys() - holders[pool].keys(), self.planned)
        self.places, self.holders = after, holders

    def evict(self, pool: int, block: int) -> None:
        if block in self.carries[pool]:
            group, content = self.carries[pool].pop(block)
            del self.index[group][content]
            self.num_evictions += 1

    def expect_findable(self, slot: int, group: int, column: int) -> None:
        """Block ``column`` of the slot's sequence is known: the block that holds it is found, unless another one is."""
        edge = (column + 1) * self.sizes[group]
        content = self.running[slot].contents[edge - 1]
        if not self.recurrent[group]:
            block = self.places.get((slot, group, column))
        elif edge == self.running[slot].computed:
            block = self.places.get((slot, group, 0))
        elif self.lefts.get((slot, group), (0, 0))[1] == edge:
            block, _ = self.lefts.pop((slot, group))
        else:
            block = None
        if block is not None and self.index[group].setdefault(content, block) == block:
            self.carries[self.pool_of[group]][block] = group, content
            pool = self.kv.pools[self.pool_of[group]]
            index, key = pool.key_of(block) or (None, b"")
            assert index == self.pool_of[:group].count(self.pool_of[group])
            assert self.key_of.setdefault((self.sizes[group], content), key) == key, "a prefix has two keys"
            assert self.content_of.setdefault((self.sizes[group], key), content) == content, "two prefixes have one key"

    def expected_hit(self, contents: list[int]) -> tuple[int, list[list[int]]]:
        """The longest prefix in whole blocks of all groups of which every group has what it needs."""
        count = len(contents)
        limit = count - 1 if self.edges else count
        for length in range(limit // self.alignment * self.alignment if self.caching else 0, 0, -self.alignment):
            entries = []
            for group, size in enumerate(self.sizes):
                first, last, window = 0, length // size, self.windows[group]
                if window is not None:
                    first = max(min(length, count - 1) - window + 1, 0) // size
                if self.recurrent[group]:
                    first = last - 1
                blocks = [self.index[group].get(contents[(column + 1) * size - 1], 0) for column in range(first, last)]
                if 0 in blocks:
                    break
                entries.append(blocks if self.recurrent[group] else [0] * first + blocks)
            else:
                return length, entries
        return 0, [[] for _ in self.groups]

    def check_hit(self, hit: Hit, contents: list[int]) -> None:
        entries = [blocks.tolist() for blocks in hit.entries]
        assert (hit.num_tokens, entries) == self.expected_hit(contents)
        for group, size in enumerate(self.sizes):
            blocks = self.worker_blocks[self.buffer_of[group]]
            for column, block in enumerate(entries[group]):
                if self.recurrent[group]:
                    assert blocks[block] == (group, {0: contents[hit.num_tokens - 1]})
                elif block:
                    held = dict(enumerate(contents[column * size : (column + 1) * size]))
                    assert blocks[block] == (group, held), "the hit is another prefix"

    def check_peak(self, row: Row) -> None:
        """What the sequence holds is no more than `peak_blocks` says, and what it took no more than `cost`."""
        sequence = self.running[row.slot]
        sequence.reached = max(sequence.reached, row.end)
        held = [[b for (s, g, _), b in self.places.items() if (s, g) == (row.slot, n)] for n in range(len(self.groups))]
        for (slot, group), (block, _) in self.lefts.items():
            if slot == row.slot:
                held[group].append(block)
        for manager, blocks in zip(self.kv.managers, held, strict=True):
            assert len(blocks) <= manager.peak_blocks(sequence.reached, self.max_chunk), "holds more than its peak"
        if sequence.promised is not None and sequence.reached <= sequence.planned_length:
            ours = {(self.pool_of[group], block) for group, blocks in enumerate(held) for block in blocks}
            taken = Counter(pool for pool, _ in ours - sequence.borrowed)
            assert all(taken[pool] <= cost for pool, cost in enumerate(sequence.promised)), (
                f"took {taken} blocks at once; cost was {sequence.promised}"
            )

    def end(self, slot: int) -> None:
        for (owner, group, _), block in self.places.items():
            if owner == slot and self.holders[self.pool_of[group]][block] == 1:
                self.copy_targets[group].discard(block)  # nobody wants that copy any more
        for group in range(len(self.groups)):
            self.lefts.pop((slot, group), None)
            self.worker_tables[group].pop(slot, None)
        del self.running[slot]
        self.kv.free(slot)
        assert not any(len(entries) and entries.any() for entries in self.kv.entries(slot))
        self.settle()

    @invariant()
    def pools_agree_with_the_model(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv = self.kv
        for number, pool in enumerate(kv.pools):
            holders, limbo = self.holders[number], self.limbo[number]
            everything = range(1, self.num_blocks[number])
            assert pool.ref_count.tolist() == [holders[block] for block in range(self.num_blocks[number])]
            assert sorted(pool.free_blocks().tolist()) == [b for b in everything if not holders[b] and b not in limbo]
            assert (pool.num_held, pool.num_limbo) == (sum(map(bool, holders.values())), len(limbo))
            assert pool.num_free + pool.num_held + pool.num_limbo + 1 == self.num_blocks[number]
            members = [group for group, of in enumerate(self.pool_of) if of == number]
            for index, group in zip(pool.indexes, members, strict=True):
                assert sorted(index.values()) == sorted(self.index[group].values())
        assert kv.num_free.tolist() == [pool.num_free for pool in kv.pools]
        assert kv.num_limbo.tolist() == [len(limbo) for limbo in self.limbo]
        assert kv.num_evictions == self.num_evictions
