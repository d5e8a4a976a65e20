"""`KVCacheManager`: every KV group of a model side by side, as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.api.errors import UsageError
from octavo.core.api.kv_cache import MLA, AnyKVSpec, FullAttention, KVGroupInfo, KVManager, RecurrentState, SlidingWindow
from octavo.core.api.scheduling import IntArray, TableUpdate
from octavo.core.kv_cache.changes import GroupChanges
from octavo.core.kv_cache.full import NEVER, FullAttentionManager
from octavo.core.kv_cache.hashing import Prefix, PrefixHasher
from octavo.core.kv_cache.pool import BlockPool
from octavo.core.kv_cache.recurrent import RecurrentStateManager
from octavo.core.kv_cache.window import SlidingWindowManager

MANAGERS: Mapping[type[AnyKVSpec], type[KVManager]] = {
    FullAttention: FullAttentionManager,
    MLA: FullAttentionManager,
    SlidingWindow: SlidingWindowManager,
    RecurrentState: RecurrentStateManager,
}


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix: how many tokens, and each group's table entries for them."""

    num_tokens: int
    entries: tuple[IntArray, ...]


class KVCacheManager:
    """Coordinates the groups' managers and pools. Slots index everything; a step in which ``ends <= event_at[slots]`` for
    all rows needs no call at all.

    ``managers`` maps the names in `KVGroupInfo.manager` to classes (loaded `kv_manager` plugins).
    """

    def __init__(
        self,
        groups: Sequence[KVGroupInfo],
        *,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        prefix_hash: str = "sha256",
        managers: Mapping[str, type[KVManager]] | None = None,
    ) -> None:
        if not groups:
            raise UsageError("a KV cache needs at least one group; the model declares none")
        self.groups = tuple(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.pool_ids = tuple(dict.fromkeys(group.pool_id for group in groups))
        members = [[g for g in groups if g.pool_id == pool_id] for pool_id in self.pool_ids]
        self.pools = tuple(BlockPool(min(g.num_blocks for g in member), len(member)) for member in members)
        self._pool_of = tuple(self.pool_ids.index(group.pool_id) for group in groups)
        self.managers: tuple[KVManager, ...] = tuple(
            _manager_class(group, managers or {})(
                group,
                self.pools[pool],
                self._pool_of[:i].count(pool),
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
            )
            for i, (group, pool) in enumerate(zip(groups, self._pool_of, strict=True))
        )
        sizes = tuple(dict.fromkeys(group.block_size for group in groups))
        self.hashers = tuple(PrefixHasher(size, prefix_hash) for size in sizes)
        self._chain_of = tuple(sizes.index(group.block_size) for group in groups)
        self._alignment = int(np.lcm.reduce(sizes))
        self._changes = tuple(GroupChanges() for _ in groups)
        self.full_hit = all(manager.full_hit for manager in self.managers)
        self.chunk_edges = tuple(m.block_size for m in self.managers if m.chunk_edge)
        self.event_at: IntArray = np.zeros(max_num_seqs, np.int32)  # a row may end here without anything to do
        self.commit_at: IntArray = np.full(max_num_seqs, NEVER, np.int32)  # with more tokens known, a block can be committed
        self._committed: IntArray = np.zeros((len(sizes), max_num_seqs), np.int32)  # full blocks that others can find, by chain
        self._prefixes: list[Prefix | None] = [None] * max_num_seqs
        self._chain_sizes: IntArray = np.array(sizes, np.int32)[:, None]
        self._fits: dict[int, int] = {}

    # Capacity

    @property
    def num_free(self) -> IntArray:
        """[num_pools] blocks that can be allocated now."""
        return np.array([pool.num_free for pool in self.pools], np.int32)

    @property
    def num_limbo(self) -> IntArray:
        """[num_pools] blocks that come free when the steps in flight are done."""
        return np.array([pool.num_limbo for pool in self.pools], np.int32)

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, in the fullest pool."""
        return max(pool.num_held / (pool.num_blocks - 1) for pool in self.pools)

    @property
    def num_evictions(self) -> int:
        return sum(pool.num_evictions for pool in self.pools)

    def always_fits(self, max_chunk: int) -> int:
        """A number of tokens that surely fits into the empty cache: `peak_blocks` needn't be asked about fewer."""
        if max_chunk not in self._fits:
            low, high = 0, max(pool.num_blocks for pool in self.pools) * self._alignment
            while low < high:
                middle = (low + high + 1) // 2
                fits = (self.peak_blocks(middle, max_chunk) < [pool.num_blocks for pool in self.pools]).all()
                low, high = (middle, high) if fits else (low, middle - 1)
            self._fits[max_chunk] = low
        return self._fits[max_chunk]

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> IntArray:
        """[num_pools] the most blocks that one request of so many tokens holds at once."""
        return self._by_pool([manager.peak_blocks(num_tokens, max_chunk) for manager in self.managers])

    # A request's prefix

    def new_prefix(self, tokens: IntArray, extra: bytes) -> Prefix:
        """The prefix of a new sequence, its full blocks hashed."""
        prefix = Prefix(tuple([] for _ in self.hashers), extra)
        self.extend_prefix(prefix, tokens)
        return prefix

    def extend_prefix(self, prefix: Prefix, tokens: IntArray) -> None:
        """Hash the full blocks of ``tokens`` (the whole sequence) that ``prefix`` lacks."""
        if self.enable_prefix_caching:
            for hasher, chain in zip(self.hashers, prefix.chains, strict=True):
                hasher.extend(chain, tokens, prefix.extra)

    def cut_prefix(self, prefix: Prefix, num_tokens: int) -> Prefix:
        """A copy that covers the full blocks in the first ``num_tokens`` tokens."""
        pairs = zip(prefix.chains, self.hashers, strict=True)
        return Prefix(tuple(chain[: num_tokens // hasher.block_size] for chain, hasher in pairs), prefix.extra)

    def keys_between(self, prefix: Prefix, begin: int, end: int) -> list[bytes]:
        """Keys of the blocks that computing positions [begin, end) fills (of the first block size)."""
        size = self.hashers[0].block_size
        return prefix.chains[0][begin // size : end // size]

    def match(self, prefix: Prefix, num_tokens: int) -> Hit:
        """The longest prefix of ``num_tokens`` tokens that every group has in the cache, in whole blocks."""
        if not self.enable_prefix_caching:
            return self.no_hit
        limit = num_tokens if self.full_hit else num_tokens - 1
        while limit := limit // self._alignment * self._alignment:
            pairs = zip(self.managers, self._chain_of, strict=True)
            found = [manager.match(prefix.chains[chain], limit, num_tokens - 1) for manager, chain in pairs]
            shortest = min(length for length, _ in found)
            if all(length == shortest for length, _ in found) and shortest % self._alignment == 0:
                return Hit(shortest, tuple(entries for _, entries in found))
            limit = shortest
        return self.no_hit

    @property
    def no_hit(self) -> Hit:
        return Hit(0, tuple(np.zeros(0, np.int32) for _ in self.managers))

    def cost(self, hit: Hit, num_tokens: int, max_chunk: int) -> IntArray:
        """[num_pools] free blocks that a request with this hit takes until ``num_tokens`` are computed."""
        pairs = zip(self.managers, hit.entries, strict=True)
        return self._by_pool([manager.cost(entries, num_tokens, max_chunk) for manager, entries in pairs])

    # A slot's life

    def adopt(self, slot: int, prefix: Prefix, hit: Hit) -> None:
        """Start an empty slot with what `match` found in the cache (maybe nothing). `commit` extends ``prefix``."""
        for manager, entries, changes in zip(self.managers, hit.entries, self._changes, strict=True):
            manager.adopt(slot, entries, hit.num_tokens, changes)
        self._start(slot, prefix, hit.num_tokens)

    def trim(self, slots: IntArray, starts: IntArray) -> None:
        """Give back what queries from ``starts`` on don't see."""
        for manager, changes in zip(self.managers, self._changes, strict=True):
            manager.trim(slots, starts, changes)

    def demand(self, slots: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
        """[num_pools, n] blocks that `extend` takes for each row."""
        wanted = np.zeros((len(self.pools), len(slots)), np.int32)
        for manager, pool in zip(self.managers, self._pool_of, strict=True):
            wanted[pool] += manager.demand(slots, starts, ends)
        return wanted

    def extend_decodes(self, slots: IntArray, ends: IntArray) -> bool:
        """`trim` and `extend` for rows of one token. False, and nothing extended, if the pools have too little."""
        starts = ends - 1
        self.trim(slots, starts)
        if min(pool.num_free for pool in self.pools) < 2 * len(slots) * len(self.managers):  # more than they can ask for
            return self.try_extend(slots, starts, ends)
        self.extend(slots, starts, ends)
        return True

    def try_extend(self, slots: IntArray, starts: IntArray, ends: IntArray) -> bool:
        """`extend` if the pools have enough; False and nothing done if not."""
        wanted = [0] * len(self.pools)
        for manager, pool in zip(self.managers, self._pool_of, strict=True):
            wanted[pool] += int(manager.demand(slots, starts, ends).sum())
        if any(count > pool.num_free for count, pool in zip(wanted, self.pools, strict=True)):
            return False
        self.extend(slots, starts, ends)
        return True

    def extend(self, slots: IntArray, starts: IntArray, ends: IntArray, *, announce: bool = True) -> None:
        """Make [starts, ends) writable. ``announce=False``: the slots are new, their tables travel with `NewRequest`."""
        for manager, changes in zip(self.managers, self._changes, strict=True):
            manager.extend(slots, starts, ends, changes if announce else _Quiet(changes))
        self._touch(slots)

    def fork(self, parent: int, child: int, prefix: Prefix, num_tokens: int) -> None:
        """Share the parent's first ``num_tokens`` tokens with an empty slot, whose own ``prefix`` it is."""
        for manager, changes in zip(self.managers, self._changes, strict=True):
            manager.fork(parent, child, num_tokens, changes)
        self._touch(np.array([parent], np.int32))
        self._start(child, prefix, num_tokens)

    def commit(self, slots: IntArray, num_tokens: IntArray, tokens: IntArray) -> None:
        """The first ``num_tokens[i]`` tokens of ``slots[i]`` (rows of ``tokens``) are known and computed: let others find the
        full blocks in them.
        """
        if not self.enable_prefix_caching:
            return
        prefixes = [prefix for slot in slots.tolist() if (prefix := self._prefixes[slot]) is not None]
        for number, hasher in enumerate(self.hashers):
            first, last = self._committed[number, slots], num_tokens // hasher.block_size
            if np.count_nonzero(last - first == 1) == len(slots):  # as in a decode step
                owners, columns = slots, first
                keys = hasher.next_keys(prefixes, number, slots, first, tokens)
            else:
                for prefix, slot, count in zip(prefixes, slots.tolist(), num_tokens.tolist(), strict=True):
                    hasher.extend(prefix.chains[number], tokens[slot, :count], prefix.extra)
                owners, columns, keys = _spans(slots, first, last, [prefix.chains[number] for prefix in prefixes])
            for manager, chain in zip(self.managers, self._chain_of, strict=True):
                if chain == number and keys:
                    manager.commit(owners, columns, keys)
            self._committed[number, slots] = last
        self._set_commit_at(slots)

    def free(self, slot: int) -> None:
        """Give back everything a slot holds."""
        for manager, changes in zip(self.managers, self._changes, strict=True):
            if changes.num_copies:
                blocks = manager.entries(slot)
                changes.cancel_copies(blocks[manager.pool.ref_count[blocks] == 1])
            manager.free(slot)
            changes.drop(slot)
        self.event_at[slot] = 0
        self.commit_at[slot] = NEVER
        self._committed[:, slot] = 0
        self._prefixes[slot] = None

    def entries(self, slot: int) -> tuple[IntArray, ...]:
        """For each group, the slot's table entries in use."""
        return tuple(manager.entries(slot) for manager in self.managers)

    # Steps

    def set_in_flight(self, last_planned: int, last_done: int) -> None:
        """Blocks given back from now on may still be used by step ``last_planned``; those up to ``last_done`` come free."""
        for pool in self.pools:
            pool.set_in_flight(last_planned, last_done)

    def take_changes(self) -> tuple[tuple[TableUpdate | None, ...], tuple[IntArray | None, ...]]:
        """What changed since the last call: ``StepPlan.tables`` and ``StepPlan.block_copies``, each () if nothing did."""
        tables = tuple([changes.take_update() for changes in self._changes])
        copies = tuple([changes.take_copies() for changes in self._changes])
        return tables if any(map(_is_something, tables)) else (), copies if any(map(_is_something, copies)) else ()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. The caller sees to it that no running request goes on committing blocks."""
        for pool in self.pools:
            pool.forget_all()

    def _by_pool(self, counts: Sequence[int]) -> IntArray:
        total = np.zeros(len(self.pools), np.int32)
        for pool, count in zip(self._pool_of, counts, strict=True):
            total[pool] += count
        return total

    def _touch(self, slots: IntArray) -> None:
        bound = self.managers[0].next_change(slots)
        for manager in self.managers[1:]:
            bound = np.minimum(bound, manager.next_change(slots))
        self.event_at[slots] = bound

    def _start(self, slot: int, prefix: Prefix, num_cached_tokens: int) -> None:
        slots = np.array([slot], np.int32)
        self._touch(slots)
        self._prefixes[slot] = prefix
        self._committed[:, slots] = num_cached_tokens // self._chain_sizes
        if self.enable_prefix_caching:
            self._set_commit_at(slots)

    def _set_commit_at(self, slots: IntArray) -> None:
        if len(self.hashers) == 1:
            self.commit_at[slots] = (self._committed[0, slots] + 1) * self.hashers[0].block_size
        else:
            self.commit_at[slots] = ((self._committed[:, slots] + 1) * self._chain_sizes).min(axis=0)


def _spans(
    owners: IntArray, first: IntArray, last: IntArray, keys: Sequence[list[bytes]]
) -> tuple[IntArray, IntArray, list[bytes]]:
    """Every (owner, column, key) with ``first[i]`` <= column < ``last[i]``."""
    counts = last - first
    ends = np.cumsum(counts, dtype=np.int32)
    columns = np.arange(int(ends[-1]), dtype=np.int32) + np.repeat(first - ends + counts, counts)
    spans = zip(keys, first.tolist(), last.tolist(), strict=True)
    return np.repeat(owners, counts), columns, [key for chain, begin, end in spans for key in chain[begin:end]]


def _is_something(change: object) -> bool:
    return change is not None


class _Quiet:
    """Passes copies on and keeps table entries to itself."""

    def __init__(self, changes: GroupChanges) -> None:
        self.copy = changes.copy

    def set_entries(self, slots: IntArray, columns: IntArray, block_ids: IntArray) -> None:
        pass


def _manager_class(group: KVGroupInfo, plugins: Mapping[str, type[KVManager]]) -> type[KVManager]:
    if group.manager is None:
        if type(group.spec) not in MANAGERS:
            raise UsageError(f"core has no manager for the KV spec {group.spec!r}; its group must name a kv_manager plugin")
        return MANAGERS[type(group.spec)]
    if group.manager not in plugins:
        known = ", ".join(sorted(plugins)) or "none"
        raise UsageError(f"KV manager {group.manager!r} isn't loaded (loaded: {known}); install or enable its plugin")
    return plugins[group.manager]
