"""Sliding windows, recurrent states and several groups side by side, seen from the coordinator."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.api.errors import UsageError
from octavo.core.api.kv_cache import MLA, CustomSpec, FullAttention, KVGroupInfo, RecurrentState, SlidingWindow
from octavo.core.kv_cache import KVCacheManager
from octavo.core.kv_cache.full import FullAttentionManager

FULL = FullAttention(block_size=4, bytes_per_block=1)
WINDOW = SlidingWindow(block_size=4, bytes_per_block=1, window=6)
STATE = RecurrentState(block_size=8, bytes_per_block=1)


def group(spec, num_blocks: int = 40, pool_id: int = 0, manager: str | None = None) -> KVGroupInfo:
    return KVGroupInfo(spec=spec, num_blocks=num_blocks, pool_id=pool_id, manager=manager)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Cache:
    """One slot after another on a coordinator, with the token matrix that the scheduler would keep."""

    def __init__(self, *groups: KVGroupInfo) -> None:
        self.kv = KVCacheManager(groups, max_num_seqs=4, max_model_len=64)
        self.tokens = np.zeros((4, 64), np.int32)
        self.computed = [0] * 4

    def start(self, slot: int, tokens: list[int]) -> int:
        """Admit a sequence; how many of its tokens were cached."""
        self.tokens[slot, : len(tokens)] = tokens
        prefix = self.kv.new_prefix(ids(*tokens), b"")
        hit = self.kv.match(prefix, len(tokens))
        self.kv.adopt(slot, prefix, hit)
        self.computed[slot] = hit.num_tokens
        return hit.num_tokens

    def compute(self, slot: int, end: int) -> None:
        start = self.computed[slot]
        self.kv.trim(ids(slot), ids(start))
        self.kv.extend(ids(slot), ids(start), ids(end))
        self.kv.commit(ids(slot), ids(end), self.tokens)
        self.computed[slot] = end

    def table(self, slot: int, number: int = 0) -> list[int]:
        return self.kv.entries(slot)[number].tolist()


def test_blocks_behind_the_window_become_the_null_block() -> None:
    cache = Cache(group(WINDOW))
    cache.start(0, list(range(30)))
    for end in range(2, 31, 2):
        cache.compute(0, end)
        first_seen = max(end - 2 - 5, 0)  # by the first query of the row
        table = cache.table(0)
        assert [block == 0 for block in table] == [(column + 1) * 4 <= first_seen for column in range(len(table))]
        assert cache.kv.pools[0].num_held == sum(block != 0 for block in table) <= 4
    tables, copies = cache.kv.take_changes()
    assert copies == ()
    assert 0 in tables[0].block_ids.tolist()


def test_the_start_of_a_sequence_is_evicted_last() -> None:
    cache = Cache(group(FULL, num_blocks=5))
    cache.start(0, list(range(16)))
    cache.compute(0, 16)
    table = cache.table(0)
    cache.kv.free(0)
    assert cache.kv.pools[0].allocate(4).tolist() == table[::-1]


def test_a_windows_hit_needs_only_the_window() -> None:
    cache = Cache(group(WINDOW, num_blocks=8))
    cache.start(0, list(range(28)))
    for end in range(4, 29, 4):
        cache.compute(0, end)
    cache.kv.free(0)
    assert cache.start(1, [*range(28), 99]) == 28
    assert [block != 0 for block in cache.table(1)] == [False] * 5 + [True] * 2


def test_a_windows_hit_is_cut_back_to_where_the_window_is_whole() -> None:
    cache = Cache(group(WINDOW, num_blocks=40))
    cache.start(0, list(range(28)))
    for end in range(4, 29, 4):
        cache.compute(0, end)
    pool, keys = cache.kv.pools[0], list(cache.kv.pools[0].indexes[0])
    cache.kv.free(0)
    held = pool.allocate(pool.num_free)  # evict everything …
    pool.release(held)
    assert len(keys) == 7
    assert pool.indexes[0] == {}
    assert cache.start(1, [*range(28), 99]) == 0


def test_groups_agree_on_the_shortest_hit() -> None:
    cache = Cache(group(FULL, pool_id=0), group(WINDOW, pool_id=1), group(MLA(block_size=8, bytes_per_block=1), pool_id=2))
    cache.start(0, list(range(30)))
    for end in (7, 14, 21, 28):
        cache.compute(0, end)
    cache.kv.free(0)
    assert cache.start(1, [*range(20), 77, 78, 79, 80, 81]) == 16  # 20 for blocks of 4, 16 for blocks of 8
    assert [len(cache.table(1, number)) for number in range(3)] == [4, 4, 2]


def test_one_pool_serves_groups_without_mixing_their_prefixes() -> None:
    cache = Cache(group(FULL), group(WINDOW))
    cache.start(0, list(range(12)))
    cache.compute(0, 12)
    first, second = cache.table(0, 0), cache.table(0, 1)
    assert not set(first) & set(second)
    pool = cache.kv.pools[0]
    assert [set(index.values()) for index in pool.indexes] == [set(first), set(second)]
    cache.kv.free(0)
    assert cache.start(1, [*range(12), 5]) == 12
    assert (cache.table(1, 0), cache.table(1, 1)) == (first, [0, *second[1:]])  # position 12 sees from 7 on


def test_a_recurrent_state_is_copied_at_each_edge_and_left_as_a_checkpoint() -> None:
    cache = Cache(group(STATE))
    cache.start(0, list(range(20)))
    cache.compute(0, 8)
    (first,) = cache.table(0)
    assert cache.kv.take_changes()[1] == ()
    cache.compute(0, 11)
    (second,) = cache.table(0)
    tables, copies = cache.kv.take_changes()
    assert copies[0].tolist() == [[first, second]]
    assert tables[0].block_ids.tolist() == [second]
    assert cache.kv.pools[0].num_held == 1
    assert list(cache.kv.pools[0].indexes[0].values()) == [first]


def test_a_recurrent_hit_starts_from_a_copy_of_the_checkpoint_and_leaves_the_last_token() -> None:
    cache = Cache(group(STATE))
    cache.start(0, list(range(16)))
    cache.compute(0, 8)
    cache.compute(0, 16)
    checkpoints = list(cache.kv.pools[0].indexes[0].values())
    cache.kv.free(0)
    cache.kv.take_changes()
    assert cache.start(1, list(range(16))) == 8  # all 16 are cached, but the last one's logits need the state before it
    cache.compute(1, 16)
    copies = cache.kv.take_changes()[1]
    assert copies[0].tolist() == [[checkpoints[0], cache.table(1)[0]]]


def test_a_fork_shares_blocks_and_copies_the_one_it_writes() -> None:
    cache = Cache(group(FULL))
    cache.start(0, list(range(10)))
    cache.compute(0, 10)
    cache.kv.take_changes()
    before = cache.table(0)
    cache.kv.fork(0, 1, cache.kv.new_prefix(ids(*range(10)), b""), 10)
    assert cache.table(1) == before
    assert cache.kv.pools[0].num_held == 3
    cache.computed[1] = 10
    cache.compute(1, 11)
    tables, copies = cache.kv.take_changes()
    after = cache.table(1)
    assert after[:2] == before[:2]
    assert copies[0].tolist() == [[before[2], after[2]]]
    assert (tables[0].slots.tolist(), tables[0].columns.tolist(), tables[0].block_ids.tolist()) == ([1], [2], [after[2]])
    cache.compute(0, 11)  # the block is its own again
    assert cache.table(0) == before
    assert cache.kv.take_changes() == ((), ())


def test_a_manager_plugin_takes_over_its_group() -> None:
    class Hoarder(FullAttentionManager):
        """Takes one block more than needed."""

        def extend(self, slots, starts, ends, changes) -> None:
            super().extend(slots, starts, ends + self.block_size, changes)

    groups, managers = [group(FULL, manager="hoarder"), group(FULL)], {"hoarder": Hoarder}
    kv = KVCacheManager(groups, max_num_seqs=2, max_model_len=64, managers=managers)
    kv.adopt(0, kv.new_prefix(ids(1, 2), b""), kv.no_hit)
    kv.extend(ids(0), ids(0), ids(2))
    assert [len(entries) for entries in kv.entries(0)] == [2, 1]


def test_a_manager_that_is_not_loaded_is_named() -> None:
    with pytest.raises(UsageError, match=r"'paged'.*loaded: hoarder"):
        KVCacheManager(
            [group(FULL, manager="paged")], max_num_seqs=2, max_model_len=64, managers={"hoarder": FullAttentionManager}
        )


def test_a_spec_from_outside_needs_a_manager_from_outside() -> None:
    with pytest.raises(UsageError, match="must name a kv_manager plugin"):
        KVCacheManager(
            [group(CustomSpec(block_size=4, bytes_per_block=1, kind="ring", manager="ring"))], max_num_seqs=2, max_model_len=64
        )


def test_a_model_without_kv_groups_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one group"):
        KVCacheManager([], max_num_seqs=2, max_model_len=64)


def test_prefix_caching_can_be_off() -> None:
    kv = KVCacheManager([group(FULL)], max_num_seqs=2, max_model_len=64, enable_prefix_caching=False)
    prefix = kv.new_prefix(ids(*range(20)), b"")
    assert kv.match(prefix, 20).num_tokens == 0
    kv.adopt(0, prefix, kv.no_hit)
    kv.extend(ids(0), ids(0), ids(20))
    kv.commit(ids(0), ids(20), np.zeros((2, 64), np.int32))
    assert kv.pools[0].indexes == ({},)


@pytest.mark.parametrize(
    ("spec", "tokens", "blocks"), [(FULL, 21, 6), (WINDOW, 21, 6), (WINDOW, 60, 8), (STATE, 8, 1), (STATE, 60, 3)]
)
def test_the_most_a_request_holds_is_known_beforehand(spec, tokens: int, blocks: int) -> None:
    kv = KVCacheManager([group(spec)], max_num_seqs=2, max_model_len=64)
    assert kv.peak_blocks(tokens, 20).tolist() == [blocks]
    assert (kv.peak_blocks(kv.always_fits(20), 20) <= 39).all()
