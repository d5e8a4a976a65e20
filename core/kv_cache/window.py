"""`SlidingWindowManager`: blocks behind the window come free early, and a hit needs only the window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.api.kv_cache import KVGroupInfo, SlidingWindow, TableChanges
from octavo.core.api.scheduling import IntArray
from octavo.core.kv_cache.full import FullAttentionManager
from octavo.core.kv_cache.peak import whole_peak, window_peak
from octavo.core.kv_cache.pool import BlockPool


class SlidingWindowManager(FullAttentionManager):
    """As full attention, but columns below ``first_live[slot]`` are the null block.

    A query at position p sees positions p - window + 1 … p, so a block is given back once its last position is below
    p - window + 1 for the next query p.
    """

    def __init__(self, info: KVGroupInfo, pool: BlockPool, index: int, *, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(info, pool, index, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        assert isinstance(info.spec, SlidingWindow)
        self.window = info.spec.window
        self.first_live: IntArray = np.zeros(max_num_seqs, np.int32)

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return window_peak(num_tokens, max_chunk, self.window - 1, self.block_size)

    def cost(self, hit: IntArray, num_tokens: int, max_chunk: int) -> int:
        """Blocks of the hit that others hold are had for nothing, but don't come free either when they are left behind."""
        fresh = whole_peak(num_tokens, self.block_size) - len(hit)
        return min(self.peak_blocks(num_tokens, max_chunk), fresh + self.pool.idle_count(hit[hit != 0]))

    def next_change(self, slots: IntArray) -> IntArray:
        # A row of one token that ends at e queries e - 1; it leaves block b behind once e - 1 >= (b + 1)·size + window - 1.
        leaves = (self.first_live[slots] + 1) * self.block_size + (self.window - 1)
        bound: IntArray = np.minimum(super().next_change(slots), leaves)
        return bound

    def trim(self, slots: IntArray, starts: IntArray, changes: TableChanges) -> None:
        first_seen = self._first_seen(starts)
        behind = np.minimum(first_seen, self.num_columns[slots]) - self.first_live[slots]
        chosen = behind > 0
        if not chosen.any():
            return
        slots, counts = slots[chosen], behind[chosen]
        total = int(counts.sum())
        first = self.first_live[slots]
        owners = np.repeat(slots, counts)
        columns = np.arange(total, dtype=np.int32) + np.repeat(first - np.cumsum(counts, dtype=np.int32) + counts, counts)
        blocks = self.table[owners, columns]
        self.table[owners, columns] = 0
        self.first_live[slots] = first + counts
        self._release_each(blocks)
        changes.set_entries(owners, columns, np.zeros(total, np.int32))

    def match(self, keys: Sequence[bytes], limit: int, last_query: int) -> tuple[int, IntArray]:
        """The longest prefix whose last blocks, as far back as its first query sees, are cached; the columns before them are
        0.
        """
        index, size = self.pool.indexes[self.index], self.block_size
        end = limit // size
        while end > 0:
            first = self._first_seen_at(min(end * size, last_query))
            column = end - 1
            while column >= first and keys[column] in index:
                column -= 1
            if column < first:
                hit = np.zeros(end, np.int32)
                hit[first:] = [index[key] for key in keys[first:end]]
                return end * size, hit
            end = column  # this block is missing: no prefix whose window holds it is cached
        return 0, np.zeros(0, np.int32)

    def adopt(self, slot: int, hit: IntArray, num_cached_tokens: int, changes: TableChanges) -> None:
        self.pool.acquire(hit[hit != 0])
        self.table[slot, : len(hit)] = hit
        self.num_columns[slot] = len(hit)
        self.first_live[slot] = len(hit) - np.count_nonzero(hit)

    def commit(self, slots: IntArray, columns: IntArray, keys: Sequence[bytes]) -> None:
        live = columns >= self.first_live[slots]
        if live.all():
            super().commit(slots, columns, keys)
        else:  # some were left behind before their tokens were known
            kept = np.flatnonzero(live)
            super().commit(slots[kept], columns[kept], [keys[i] for i in kept.tolist()])

    def fork(self, parent: int, child: int, num_tokens: int, changes: TableChanges) -> None:
        super().fork(parent, child, num_tokens, changes)
        self.first_live[child] = self.first_live[parent]

    def free(self, slot: int) -> None:
        super().free(slot)
        self.first_live[slot] = 0

    def _release_each(self, blocks: IntArray) -> None:
        """Give back blocks among which one may come several times (forks share what they leave behind together)."""
        while len(blocks):
            _, first = np.unique(blocks, return_index=True)
            first.sort()
            self.pool.release(blocks[first])
            blocks = np.delete(blocks, first)

    def _first_seen(self, queries: IntArray) -> IntArray:
        columns: IntArray = np.maximum(queries - (self.window - 1), 0) // self.block_size
        return columns

    def _first_seen_at(self, query: int) -> int:
        return max(query - (self.window - 1), 0) // self.block_size
