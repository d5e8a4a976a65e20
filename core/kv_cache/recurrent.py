"""`RecurrentStateManager`: one state a request, with a checkpoint at every block edge that prefix hits can start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from octavo.core.api.kv_cache import KVGroupInfo, KVManager, TableChanges
from octavo.core.api.scheduling import IntArray
from octavo.core.kv_cache.peak import state_peak
from octavo.core.kv_cache.pool import BlockPool


class RecurrentStateManager(KVManager):
    """A slot's table has one column: the block of its state, which a row reads at its start and writes at its end.

    No row crosses a block edge (`chunk_edge`), so at an edge the block holds the state after exactly that many tokens. The
    next row then gets a fresh block, into which the worker copies the state (`StepPlan.block_copies`, before any write); the
    old block stays behind as the checkpoint, findable under the key of the block that ends there. A prefix hit starts the
    same way: a fresh block and a copy of the checkpoint. A row that starts at position 0 starts from the zero state, whatever
    its block holds.

    The state after the last token can't give that token's logits again, so a full hit stops one token short (`full_hit`).
    """

    full_hit: ClassVar[bool] = False
    chunk_edge: ClassVar[bool] = True

    def __init__(self, info: KVGroupInfo, pool: BlockPool, index: int, *, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(info, pool, index, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.table = np.zeros((max_num_seqs, 1), np.int32)
        self.next_edge: IntArray = np.full(max_num_seqs, self.block_size, np.int32)  # where its block's state ends at most
        self.left: IntArray = np.zeros(max_num_seqs, np.int32)  # the block left at the last edge, held until its key is known

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return state_peak(num_tokens, self.block_size)

    def cost(self, hit: IntArray, num_tokens: int, max_chunk: int) -> int:
        """The hit saves no block: it is given back as soon as its state is copied."""
        return self.peak_blocks(num_tokens, max_chunk)

    def next_change(self, slots: IntArray) -> IntArray:
        bound: IntArray = np.where(self.table[slots, 0] == 0, 0, self.next_edge[slots]).astype(np.int32)
        return bound

    def demand(self, slots: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
        fresh = (self.table[slots, 0] == 0) | (ends > self.next_edge[slots])
        counts: IntArray = (fresh & (ends > starts)).astype(np.int32)
        return counts

    def extend(self, slots: IntArray, starts: IntArray, ends: IntArray, changes: TableChanges) -> None:
        chosen = self.demand(slots, starts, ends) > 0
        if not chosen.any():
            return
        slots, starts = slots[chosen], starts[chosen]
        former = self.table[slots, 0]
        blocks = self.pool.allocate(len(slots))
        self.table[slots, 0] = blocks
        self.next_edge[slots] = (starts // self.block_size + 1) * self.block_size
        changes.set_entries(slots, np.zeros(len(slots), np.int32), blocks)
        copied = former != 0
        if copied.any():
            changes.copy(former[copied], blocks[copied])
            for slot, block in zip(slots[copied].tolist(), former[copied].tolist(), strict=True):
                self._drop_left(slot)
                self.left[slot] = block
                if self.pool.key_of(block) is not None:
                    self._drop_left(slot)

    def match(self, keys: Sequence[bytes], limit: int, last_query: int) -> tuple[int, IntArray]:
        index = self.pool.indexes[self.index]
        for column in range(min(limit, last_query) // self.block_size, 0, -1):
            block = index.get(keys[column - 1])
            if block is not None:
                return column * self.block_size, np.array([block], np.int32)
        return 0, np.zeros(0, np.int32)

    def adopt(self, slot: int, hit: IntArray, num_cached_tokens: int, changes: TableChanges) -> None:
        if not len(hit):
            return
        self.pool.acquire(hit)
        self.table[slot, 0] = hit[0]
        self.next_edge[slot] = num_cached_tokens  # so that the first row gets a block of its own, and leaves this one alone

    def commit(self, slots: IntArray, columns: IntArray, keys: Sequence[bytes]) -> None:
        for slot, column, key in zip(slots.tolist(), columns.tolist(), keys, strict=True):
            edge, next_edge = (column + 1) * self.block_size, int(self.next_edge[slot])
            if edge == next_edge and self.table[slot, 0]:
                self.pool.register(self.index, [key], self.table[slot])
            elif edge == next_edge - self.block_size and self.left[slot]:  # known only after the slot had moved on
                self.pool.register(self.index, [key], self.left[slot : slot + 1])
                self._drop_left(slot)

    def fork(self, parent: int, child: int, num_tokens: int, changes: TableChanges) -> None:
        """The child gets a copy of the parent's state, which must be the one after ``num_tokens`` tokens."""
        source = self.table[parent].copy()
        if not source[0]:
            return
        target = self.pool.allocate(1)
        self.table[child] = target
        self.next_edge[child] = self.next_edge[parent]
        changes.copy(source, target)

    def free(self, slot: int) -> None:
        blocks = self.table[slot].copy()
        self.table[slot] = 0
        self.next_edge[slot] = self.block_size
        self._drop_left(slot)
        self.pool.release(blocks[blocks != 0])

    def _drop_left(self, slot: int) -> None:
        block = self.left[slot : slot + 1].copy()
        self.left[slot] = 0
        self.pool.release(block[block != 0])

    def entries(self, slot: int) -> IntArray:
        blocks: IntArray = self.table[slot].copy()
        return blocks
