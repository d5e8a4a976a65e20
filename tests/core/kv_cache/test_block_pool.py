"""The block pool against a model of it in plain Python; and its costs at four million blocks."""

from __future__ import annotations

import time
import tracemalloc
from collections import OrderedDict, deque

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machines import run_machine

from octavo.core.kv_cache import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The model: a queue of blank blocks, an ordered dict of cached free ones (oldest first), lists of held ones."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.blank: deque[int] = deque(range(1, num_blocks))
        self.free: OrderedDict[int, None] = OrderedDict()
        self.limbo: list[tuple[int, int]] = []  # (step, block)
        self.holders: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self.index: dict[bytes, int] = {}
        self.step, self.done = 0, 0
        self.num_keys = 0

    def ids(self, blocks: list[int]) -> np.ndarray:
        return np.array(blocks, np.int32)

    @rule(count=st.integers(1, 6))
    def allocate(self, count: int) -> None:
        if count > len(self.blank) + len(self.free):
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        expected = []
        for _ in range(count):
            if self.blank:
                expected.append(self.blank.popleft())
            else:
                block, _ = self.free.popitem(last=False)
                if block in self.keys:
                    del self.index[self.keys.pop(block)]
                expected.append(block)
        assert self.pool.allocate(count).tolist() == expected
        self.holders.update(dict.fromkeys(expected, 1))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True, min_size=1))
        self.pool.release(self.ids(blocks))
        idle = []
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                idle.append(block)
        if self.step > self.done:
            self.limbo += [(self.step, block) for block in idle]
        else:
            self.put_back(idle)

    def put_back(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.keys:
                self.free[block] = None
            else:
                self.blank.append(block)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.keys)), unique=True, min_size=1))
        self.pool.acquire(self.ids(blocks))
        for block in blocks:
            self.free.pop(block, None)
            self.holders[block] = self.holders.get(block, 0) + 1
        self.limbo = [(step, block) for step, block in self.limbo if block not in blocks]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), known=st.booleans())
    def register(self, data: st.DataObject, known: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.holders)))
        if block in self.keys:
            return
        if known and self.index:
            key = data.draw(st.sampled_from(sorted(self.index)))
        else:
            self.num_keys += 1
            key = b"%d" % self.num_keys
        self.pool.register(0, [key], self.ids([block]))
        if key not in self.index:  # a key stays with the block that carried it first
            self.index[key] = block
            self.keys[block] = key

    @rule()
    def plan_step(self) -> None:
        self.step += 1
        self.pool.set_in_flight(self.step, self.done)

    @precondition(lambda self: self.step > self.done)
    @rule()
    def finish_step(self) -> None:
        self.done += 1
        self.pool.set_in_flight(self.step, self.done)
        self.put_back([block for step, block in self.limbo if step <= self.done])
        self.limbo = [(step, block) for step, block in self.limbo if step > self.done]

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.keys, self.index = {}, {}

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert pool.free_blocks().tolist() == [*self.blank, *self.free]
        assert pool.num_free == len(self.blank) + len(self.free)
        assert pool.num_held == len(self.holders)
        assert pool.num_limbo == len(self.limbo)
        assert pool.indexes[0] == self.index
        assert {b: int(n) for b, n in enumerate(pool.ref_count) if n} == self.holders


def test_pool_behaves_like_its_model() -> None:
    run_machine(PoolMachine, 60, steps=30)


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_pool_behaves_like_its_model_in_two_thousand_examples() -> None:
    run_machine(PoolMachine, 2000, steps=30)


def test_the_null_block_is_never_allocated() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4).tolist()) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_cached_blocks_are_evicted_least_recently_used_first() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    pool.register(0, [b"%d" % i for i in range(5)], blocks)
    pool.release(blocks[[2, 0]])
    pool.release(blocks[[4, 1, 3]])
    pool.acquire(blocks[[0]])  # a hit: no longer free, though it was the second to go
    assert pool.allocate(3).tolist() == blocks[[2, 4, 1]].tolist()
    assert sorted(pool.indexes[0]) == [b"0", b"3"]
    assert pool.num_evictions == 3


def test_blocks_that_carry_nothing_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(0, [b"a"], blocks[:1])
    pool.release(blocks)
    assert pool.allocate(2).tolist() == blocks[1:].tolist()
    assert pool.num_evictions == 0


def test_the_queue_is_compacted_without_losing_its_order() -> None:
    pool = BlockPool(65)
    blocks = pool.allocate(64)
    pool.register(0, [b"%d" % i for i in range(64)], blocks)
    pool.release(blocks)
    rng, order = np.random.default_rng(0), list(blocks.tolist())
    for _ in range(500):  # far more pushes than the buffer holds
        chosen = rng.choice(64, size=7, replace=False)
        pool.acquire(blocks[chosen])
        pool.release(blocks[chosen])
        order = [b for b in order if b not in blocks[chosen]] + blocks[chosen].tolist()
        assert pool.free_blocks().tolist() == order


def _microseconds(pool: BlockPool, count: int = 32, times: int = 400) -> float:
    """Median of taking and giving back ``count`` blocks, every third round one of them a hit."""
    spans = []
    for i in range(times):
        keys = [b"%d-%d" % (i, k) for k in range(count)]
        begun = time.perf_counter()
        blocks = pool.allocate(count)
        pool.register(0, keys, blocks)
        pool.release(blocks)
        if i % 3 == 0:
            pool.acquire(blocks[5:6])
            pool.release(blocks[5:6])
        spans.append(time.perf_counter() - begun)
    return float(np.median(spans)) * 1e6


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_four_million_blocks_cost_what_ten_thousand_do() -> None:
    begun = time.perf_counter()
    large = BlockPool(4_000_000)
    built_s = time.perf_counter() - begun
    small = BlockPool(10_000)
    figures = {size: min(_microseconds(pool) for _ in range(3)) for size, pool in (("10k", small), ("4M", large))}
    print(
        f"built in {built_s:.2f} s; 32 blocks cost {figures['10k']:.1f} µs of 10 thousand, {figures['4M']:.1f} µs of 4 million"
    )
    assert built_s <= 2 * 1.0
    assert figures["4M"] <= 2 * figures["10k"]


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_a_block_costs_at_most_64_bytes() -> None:
    tracemalloc.start()
    pool = BlockPool(1_000_000)
    size = tracemalloc.get_traced_memory()[0] / pool.num_blocks
    tracemalloc.stop()
    print(f"{size:.1f} bytes a block")
    assert size <= 64
