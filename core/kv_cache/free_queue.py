"""The free blocks of a pool, as arrays: `BlankQueue` for those that carry nothing, `LeastRecentlyUsed` for cached ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.scheduling import IntArray

HELD = -1


class BlankQueue:
    """A ring of block ids, first in, first out. Starts with every block but the null block."""

    def __init__(self, num_blocks: int) -> None:
        self._ring: IntArray = np.arange(1, num_blocks + 1, dtype=np.int32)
        self._head = 0
        self._count = num_blocks - 1

    def __len__(self) -> int:
        return self._count

    def push(self, blocks: IntArray) -> None:
        begin = (self._head + self._count) % len(self._ring)
        first = min(len(blocks), len(self._ring) - begin)
        self._ring[begin : begin + first] = blocks[:first]
        self._ring[: len(blocks) - first] = blocks[first:]
        self._count += len(blocks)

    def pop(self, count: int) -> IntArray:
        """The ``count`` blocks that have been here longest; there must be as many."""
        assert count <= self._count, f"{count} blocks wanted, {self._count} there"
        blocks = self._ring[self._head : self._head + count].copy()
        if len(blocks) < count:
            blocks = np.concatenate([blocks, self._ring[: count - len(blocks)]])
        self._head = (self._head + count) % len(self._ring)
        self._count -= count
        return blocks

    def blocks(self) -> IntArray:
        """Every block in the queue, oldest first."""
        return np.roll(self._ring, -self._head)[: self._count]


class LeastRecentlyUsed:
    """A queue of block ids with removal from the middle; ``n`` ids cost a handful of vector operations, whatever the size.

    ``_queue[_head:_tail]`` holds the ids, oldest first. A block knows its ``place`` there; a block that was taken out of the
    middle only forgets its place, and its entry is skipped when the head comes by ("dead"). When the tail reaches the end of
    the buffer (twice the number of blocks, so after at least that many pushes as there are blocks) the living entries move to
    its front: constant cost per push, amortised.

    ``place`` also marks blocks in limbo (see `BlockPool`): -2 - ticket.
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue: IntArray = np.empty(2 * num_blocks, np.int32)
        self.place: IntArray = np.full(num_blocks, HELD, np.int32)
        self._head = self._tail = self._dead = 0

    def __len__(self) -> int:
        return self._tail - self._head - self._dead

    def push(self, blocks: IntArray) -> None:
        """Append blocks that are not in the queue, in this order."""
        if self._tail + len(blocks) > len(self._queue):
            self._compact()
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self.place[blocks] = np.arange(self._tail, end, dtype=np.int32)
        self._tail = end

    def pop(self, count: int) -> IntArray:
        """The ``count`` oldest blocks; there must be as many."""
        assert count <= len(self), f"{count} blocks wanted, {len(self)} free"
        if self._dead:
            return self._pop_living(count)
        blocks = self._queue[self._head : self._head + count].copy()
        self._head += count
        self.place[blocks] = HELD
        return blocks

    def remove(self, blocks: IntArray) -> None:
        """Take these blocks out, wherever they are."""
        self.place[blocks] = HELD
        self._dead += len(blocks)

    def blocks(self) -> IntArray:
        """Every block in the queue, oldest first."""
        return self._queue[self._head : self._tail][self._living(self._head, self._tail)]

    def _living(self, begin: int, end: int) -> NDArray[np.bool_]:
        living: NDArray[np.bool_] = self.place[self._queue[begin:end]] == np.arange(begin, end, dtype=np.int32)
        return living

    def _pop_living(self, count: int) -> IntArray:
        pieces: list[IntArray] = []
        missing = count
        while missing:
            end = min(self._tail, self._head + max(2 * missing, 64))
            living = np.flatnonzero(self._living(self._head, end))[:missing]
            stop = int(living[-1]) + 1 if len(living) == missing else end - self._head
            pieces.append(self._queue[self._head + living])
            self._dead -= stop - len(living)
            self._head += stop
            missing -= len(living)
        blocks = np.concatenate(pieces)
        self.place[blocks] = HELD
        return blocks

    def _compact(self) -> None:
        living = self.blocks()
        self._queue[: len(living)] = living
        self.place[living] = np.arange(len(living), dtype=np.int32)
        self._head, self._tail, self._dead = 0, len(living), 0
