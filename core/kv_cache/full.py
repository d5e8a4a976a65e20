"""`FullAttentionManager`: one table column for every ``block_size`` tokens, kept until the request ends. MLA is managed
alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.api.kv_cache import KVGroupInfo, KVManager, TableChanges
from octavo.core.api.scheduling import IntArray
from octavo.core.kv_cache.peak import whole_peak
from octavo.core.kv_cache.pool import BlockPool

NEVER = np.iinfo(np.int32).max


class FullAttentionManager(KVManager):
    """Columns ``0 … num_columns[slot] - 1`` of a slot's row hold its blocks; ``shared_at`` is the first position whose write
    may hit a block that a fork shares (copy-on-write), `NEVER` where there is none.
    """

    def __init__(self, info: KVGroupInfo, pool: BlockPool, index: int, *, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(info, pool, index, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.table = np.zeros((max_num_seqs, -(-max_model_len // self.block_size)), np.int32)
        self.num_columns: IntArray = np.zeros(max_num_seqs, np.int32)
        self.shared_at: IntArray = np.full(max_num_seqs, NEVER, np.int32)
        self._sharing: set[int] = set()  # slots whose shared_at isn't NEVER

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return whole_peak(num_tokens, self.block_size)

    def next_change(self, slots: IntArray) -> IntArray:
        bound: IntArray = self.num_columns[slots] * self.block_size
        return np.minimum(bound, self.shared_at[slots]) if self._sharing else bound

    def demand(self, slots: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
        counts: IntArray = np.maximum((ends + (self.block_size - 1)) // self.block_size - self.num_columns[slots], 0)
        if not self._sharing:
            return counts
        written = ends > np.maximum(starts, self.shared_at[slots])
        for i in np.flatnonzero(written).tolist():
            column = int(starts[i]) // self.block_size
            if column < self.num_columns[slots[i]] and self.pool.ref_count[self.table[slots[i], column]] > 1:
                counts[i] += 1
        return counts

    def extend(self, slots: IntArray, starts: IntArray, ends: IntArray, changes: TableChanges) -> None:
        if self._sharing:
            written = ends > np.maximum(starts, self.shared_at[slots])
            for slot, start in zip(slots[written].tolist(), starts[written].tolist(), strict=True):
                self._copy_on_write(slot, start // self.block_size, changes)
        have = self.num_columns[slots]
        counts = np.maximum((ends + (self.block_size - 1)) // self.block_size - have, 0)
        total = int(counts.sum())
        if not total:
            return
        blocks = self.pool.allocate(total)
        if total == len(slots) and np.count_nonzero(counts) == total:
            owners, columns = slots, have
        elif len(slots) == 1:
            owners, columns = np.repeat(slots, total), np.arange(have[0], have[0] + total, dtype=np.int32)
        else:
            owners = np.repeat(slots, counts)
            columns = np.arange(total, dtype=np.int32) + np.repeat(have - np.cumsum(counts, dtype=np.int32) + counts, counts)
        self.table[owners, columns] = blocks
        self.num_columns[slots] = have + counts
        changes.set_entries(owners, columns, blocks)

    def match(self, keys: Sequence[bytes], limit: int, last_query: int) -> tuple[int, IntArray]:
        index, hit = self.pool.indexes[self.index], []
        for key in keys[: limit // self.block_size]:
            block = index.get(key)
            if block is None:
                break
            hit.append(block)
        return len(hit) * self.block_size, np.array(hit, np.int32)

    def adopt(self, slot: int, hit: IntArray, num_cached_tokens: int, changes: TableChanges) -> None:
        self.pool.acquire(hit)
        self.table[slot, : len(hit)] = hit
        self.num_columns[slot] = len(hit)

    def commit(self, slots: IntArray, columns: IntArray, keys: Sequence[bytes]) -> None:
        self.pool.register(self.index, keys, self.table[slots, columns])

    def fork(self, parent: int, child: int, num_tokens: int, changes: TableChanges) -> None:
        shared = self.table[parent, : -(-num_tokens // self.block_size)]
        self.pool.acquire(shared[shared != 0])
        self.table[child, : len(shared)] = shared
        self.num_columns[child] = len(shared)
        if num_tokens % self.block_size:
            self.shared_at[[parent, child]] = num_tokens
            self._sharing.update((parent, child))

    def free(self, slot: int) -> None:
        blocks = self.entries(slot)[::-1]
        self.table[slot, : len(blocks)] = 0
        self.num_columns[slot] = 0
        self._unshare(slot)
        self.pool.release(blocks[blocks != 0])

    def entries(self, slot: int) -> IntArray:
        return self.table[slot, : self.num_columns[slot]].copy()

    def _unshare(self, slot: int) -> None:
        self.shared_at[slot] = NEVER
        self._sharing.discard(slot)

    def _copy_on_write(self, slot: int, column: int, changes: TableChanges) -> None:
        """The slot is about to write into this column: have a block of its own there."""
        self._unshare(slot)
        if column >= self.num_columns[slot]:
            return
        source = self.table[slot, column : column + 1].copy()
        if self.pool.ref_count[source[0]] == 1:
            return
        target = self.pool.allocate(1)
        self.table[slot, column] = target[0]
        where = np.array([slot], np.int32), np.array([column], np.int32)
        self.pool.release(source)
        changes.copy(source, target)
        changes.set_entries(*where, target)
