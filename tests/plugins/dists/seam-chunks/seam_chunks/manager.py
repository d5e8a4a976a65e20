"""`ChunkedLocalManager`: a slot holds the blocks of the chunk that it is in, and those before come free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.api.kv_cache import Blocks, CustomSpec, KVGroupInfo, KVManager, TableChanges

__all__ = ["ChunkedLocalManager"]

Int32 = NDArray[np.int32]


class ChunkedLocalManager(KVManager):
    """Columns ``first[slot] … count[slot] - 1`` of a slot's row hold its blocks; those below are the null block.

    The block that a fork starts within is copied at once, so no block that is written is ever shared.
    """

    def __init__(self, info: KVGroupInfo, pool: Blocks, index: int, *, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(info, pool, index, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        assert isinstance(info.spec, CustomSpec)
        self.chunk = info.spec.parameters["chunk"]
        self.table: Int32 = np.zeros((max_num_seqs, -(-max_model_len // self.block_size)), np.int32)
        self.first: Int32 = np.zeros(max_num_seqs, np.int32)
        self.count: Int32 = np.zeros(max_num_seqs, np.int32)

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return min(-(-num_tokens // self.block_size), -(-(self.chunk - 1 + max_chunk) // self.block_size) + 1)

    def next_change(self, slots: Int32) -> Int32:
        # A row of one token that ends at e queries e - 1. Block b has no more readers once a later chunk begins behind its end.
        ends = (self.first[slots] + 1) * self.block_size
        leaves = -(-ends // self.chunk) * self.chunk
        return np.minimum(self.count[slots] * self.block_size, leaves).astype(np.int32)

    def trim(self, slots: Int32, starts: Int32, changes: TableChanges) -> None:
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            first, until = int(self.first[slot]), min(self._first_column(start), int(self.count[slot]))
            if until > first:
                columns = np.arange(first, until, dtype=np.int32)
                blocks = self.table[slot, first:until].copy()
                self.table[slot, first:until] = 0
                self.first[slot] = until
                self.pool.release(blocks)
                changes.set_entries(np.full(len(columns), slot, np.int32), columns, np.zeros(len(columns), np.int32))

    def demand(self, slots: Int32, starts: Int32, ends: Int32) -> Int32:
        missing: Int32 = np.maximum(-(-ends // self.block_size) - self.count[slots], 0).astype(np.int32)
        return missing

    def extend(self, slots: Int32, starts: Int32, ends: Int32, changes: TableChanges) -> None:
        for slot, missing in zip(slots.tolist(), self.demand(slots, starts, ends).tolist(), strict=True):
            if missing:
                columns = np.arange(self.count[slot], self.count[slot] + missing, dtype=np.int32)
                blocks = self.pool.allocate(missing)
                self.table[slot, columns] = blocks
                self.count[slot] += missing
                changes.set_entries(np.full(missing, slot, np.int32), columns, blocks)

    def match(self, keys: Sequence[bytes], limit: int, last_query: int) -> tuple[int, Int32]:
        known = self.pool.indexes[self.index]
        for end in range(min(limit // self.block_size, len(keys)), 0, -1):
            first = self._first_column(min(end * self.block_size, last_query))
            first = min(
                first, end - 1
            )  # at a chunk's edge nothing is seen: the last block still says that the prefix was computed
            if all(key in known for key in keys[first:end]):
                hit = np.zeros(end, np.int32)
                hit[first:] = [known[key] for key in keys[first:end]]
                return end * self.block_size, hit
        return 0, np.zeros(0, np.int32)

    def adopt(self, slot: int, hit: Int32, num_cached_tokens: int, changes: TableChanges) -> None:
        held = hit[hit != 0]
        self.pool.acquire(held)
        self.table[slot, : len(hit)] = hit
        self.count[slot] = len(hit)
        self.first[slot] = len(hit) - len(held)

    def commit(self, slots: Int32, columns: Int32, keys: Sequence[bytes]) -> None:
        self.pool.register(self.index, keys, self.table[slots, columns])

    def fork(self, parent: int, child: int, num_tokens: int, changes: TableChanges) -> None:
        first, whole = int(self.first[parent]), num_tokens // self.block_size
        self.table[child, first:whole] = self.table[parent, first:whole]
        self.pool.acquire(self.table[child, first:whole])
        self.first[child], self.count[child] = first, whole
        if num_tokens % self.block_size and self.table[parent, whole]:
            target = self.pool.allocate(1)
            changes.copy(self.table[parent, whole : whole + 1].copy(), target)
            self.table[child, whole] = target[0]
            self.count[child] = whole + 1

    def free(self, slot: int) -> None:
        blocks = self.entries(slot)[::-1]
        self.table[slot] = 0
        self.first[slot] = self.count[slot] = 0
        self.pool.release(blocks[blocks != 0])

    def entries(self, slot: int) -> Int32:
        return self.table[slot, : self.count[slot]].copy()

    def _first_column(self, query: int) -> int:
        """The first column that a query at this position sees."""
        return query // self.chunk * self.chunk // self.block_size
