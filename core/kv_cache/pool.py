"""`BlockPool`: who holds which block, which blocks are free, and which cached prefix a block carries."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from octavo.core.api.scheduling import IntArray
from octavo.core.kv_cache.free_queue import HELD, BlankQueue, LeastRecentlyUsed


class BlockPool:
    """The blocks 1 … ``num_blocks`` - 1 (block 0 is the null block), in arrays: under 64 bytes a block, the index apart.

    A block is *held* (``ref_count`` > 0), *free*, or in *limbo*: given back while a step that uses it was in flight, and free
    once that step is done. A free block keeps the prefix that it carries until it is allocated, so the order in which blocks
    come free is the order of eviction: least recently used first. Blocks that carry nothing are allocated before any that does.
    ``num_indexes`` prefix indexes (one a KV group) map a key to the block that carries it.
    """

    def __init__(self, num_blocks: int, num_indexes: int = 1) -> None:
        assert num_blocks > 1, f"a pool needs the null block and at least one other, not {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.ref_count: IntArray = np.zeros(num_blocks, np.int32)
        self.indexes: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_indexes))
        self.num_evictions = 0
        self.num_limbo = 0
        self._blank = BlankQueue(num_blocks)
        self._free = LeastRecentlyUsed(num_blocks)
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached = np.zeros(num_blocks, np.bool_)
        self._owner = np.zeros(num_blocks, np.uint8)
        self._limbo: deque[tuple[int, int, IntArray]] = deque()  # (step, ticket, blocks)
        self._ticket = 0
        self._step: int | None = None  # the step that may still use what is given back now; None = no step in flight

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._blank) + len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - 1 - self.num_free - self.num_limbo

    def allocate(self, count: int) -> IntArray:
        """``count`` free blocks, now with one reference each: blank ones, then the least recently used, which are evicted."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = self._blank.pop(min(count, len(self._blank)))
        if len(blocks) < count:
            evicted = self._free.pop(count - len(blocks))
            self.num_evictions += self._forget(evicted)
            blocks = np.concatenate([blocks, evicted]) if len(blocks) else evicted
        self.ref_count[blocks] = 1
        return blocks

    def acquire(self, blocks: IntArray) -> None:
        """One more reference to each of these (distinct) blocks, which may be free or in limbo."""
        idle = blocks[self.ref_count[blocks] == 0]
        if len(idle):
            places = self._free.place[idle]
            queued = idle[places >= 0]
            self._free.remove(queued)
            waiting = idle[places < HELD]
            self._free.place[waiting] = HELD
            self.num_limbo -= len(waiting)
        self.ref_count[blocks] += 1

    def release(self, blocks: IntArray) -> None:
        """One reference less to each of these (distinct) blocks; those without any come free in the order given."""
        counts = self.ref_count[blocks] - 1
        self.ref_count[blocks] = counts
        idle = blocks[counts == 0]
        if not len(idle):
            return
        if self._step is None:
            self._push_free(idle)
            return
        self._ticket = (self._ticket + 1) % (1 << 30)
        self._free.place[idle] = HELD - 1 - self._ticket
        self._limbo.append((self._step, self._ticket, idle))
        self.num_limbo += len(idle)

    def set_in_flight(self, last_planned: int, last_done: int) -> None:
        """Tell which steps run. Blocks given back up to step ``last_done`` come free."""
        self._step = last_planned if last_planned > last_done else None
        while self._limbo and self._limbo[0][0] <= last_done:
            _, ticket, blocks = self._limbo.popleft()
            idle = blocks[self._free.place[blocks] == HELD - 1 - ticket]  # the others were acquired meanwhile
            self._free.place[idle] = HELD
            self._push_free(idle)
            self.num_limbo -= len(idle)

    def idle_count(self, blocks: IntArray) -> int:
        """How many of these blocks no one holds (acquiring them takes them from the free ones)."""
        return len(blocks) - int(np.count_nonzero(self.ref_count[blocks]))

    def register(self, index: int, keys: Sequence[bytes], blocks: IntArray) -> None:
        """From now on ``blocks[i]`` can be found under ``keys[i]``. A key that another block carries stays with that block."""
        known, key_of = self.indexes[index], self._keys
        refused = []
        for i, (key, block) in enumerate(zip(keys, blocks.tolist(), strict=True)):
            if known.setdefault(key, block) == block:
                key_of[block] = key
            else:
                refused.append(i)
        if refused:
            blocks = np.delete(blocks, refused)
        self._cached[blocks] = True
        if index:
            self._owner[blocks] = index

    def key_of(self, block: int) -> tuple[int, bytes] | None:
        """The index and key under which a block can be found, if it can."""
        key = self._keys[block]
        return None if key is None else (int(self._owner[block]), key)

    def forget_all(self) -> None:
        """Empty every index: no block can be found any more."""
        self._forget(np.flatnonzero(self._cached).astype(np.int32))

    def free_blocks(self) -> IntArray:
        """Every free block, in the order in which they would be allocated."""
        return np.concatenate([self._blank.blocks(), self._free.blocks()])

    def _push_free(self, blocks: IntArray) -> None:
        cached = self._cached[blocks]
        count = np.count_nonzero(cached)
        if count == len(blocks):
            self._free.push(blocks)
        elif count == 0:
            self._blank.push(blocks)
        else:
            self._free.push(blocks[cached])
            self._blank.push(blocks[~cached])

    def _forget(self, blocks: IntArray) -> int:
        """Take blocks out of the index; how many were in it."""
        keys, single = self._keys, len(self.indexes) == 1
        cached = blocks[self._cached[blocks]]
        for block in cached.tolist():
            key = keys[block]
            assert key is not None
            del self.indexes[0 if single else self._owner[block]][key]
            keys[block] = None
        self._cached[cached] = False
        self._owner[cached] = 0
        return len(cached)
