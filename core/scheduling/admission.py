"""`Admission`: which waiting requests get a slot, and how further completions start from one that runs."""

from __future__ import annotations

import numpy as np

from octavo.core.api.scheduling import IntArray
from octavo.core.config.scheduler import SchedulerConfig
from octavo.core.kv_cache.manager import Hit, KVCacheManager
from octavo.core.scheduling.grants import share_budget
from octavo.core.scheduling.roster import Roster
from octavo.core.scheduling.state import RequestState, Status

RETRY_STEPS = 32


class Admission:
    """Admits in the policy's order, and only what won't push running requests out again soon.

    A request gets in when the free blocks hold all its known tokens, after what running prompts still need and one more block
    for every running request: a request that was just preempted doesn't come back to be preempted at once. With nothing
    running, only its own blocks count, so whatever `check_request` accepted gets in at last.

    A request whose next block is being computed by another one in this very step steps back and finds it in the cache in the
    next step; again only if it found more.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, roster: Roster) -> None:
        self._config = config
        self._kv = kv
        self._roster = roster
        self._stuck = False  # the first waiting request can't get in before something ends
        self._filling: set[bytes] = set()  # keys of the blocks that this step fills
        self.num_queries = 0
        self.num_hits = 0

    def retry(self) -> None:
        """Something changed: the first waiting request may get in now."""
        self._stuck = False

    def may_admit(self, step: int) -> bool:
        """Whether trying is worth it. When the first waiting request can't get in, it is tried again when a completion ends;
        and now and then, for blocks that come free behind windows.
        """
        return len(self._roster.waiting) > 0 and (not self._stuck or step % RETRY_STEPS == 0)

    def admit(self, budget: int, slots: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Slots of the requests admitted, and the tokens each gets. ``slots``, ``counts``: the rows that the step has
        already.
        """
        waiting, roster = self._roster.waiting, self._roster
        new_slots: list[int] = []
        new_counts: list[int] = []
        aside: list[RequestState] = []
        reserved: IntArray | None = None
        self._stuck = False
        if len(waiting):
            self._filling = self._keys_filled(slots, counts)
        while budget > 0 and (state := waiting.peek()) is not None:
            hit = self._look_up(state) if roster.num_free_slots else self._kv.no_hit
            if self._steps_back(state, hit):
                aside.append(waiting.pop())
                continue
            count = self._first_chunk(hit, state.num_tokens, budget)
            if reserved is None:
                reserved = self._reserved()
            if not (roster.num_free_slots and count and self._fits(hit, state.num_tokens, reserved)):
                self._stuck = not (aside or roster.num_leaving or self._kv.num_limbo.any())
                break
            self._enter(state, hit, count)
            new_slots.append(state.slot)
            new_counts.append(count)
            budget -= count
            if hit.num_tokens + count < state.num_tokens:
                reserved = None  # it needs more in the next steps
        for state in aside:
            waiting.push(state)
        return np.array(new_slots, np.int32), np.array(new_counts, np.int32)

    def fork_prompt(self, parent: RequestState) -> None:
        """Completions 1 … n - 1 start from the blocks of completion 0, whose prompt this step computes; without room they
        wait.
        """
        forks, parent.forks = parent.forks, []
        count = parent.num_prompt_tokens
        for child in forks:
            if self._kv.full_hit:
                self.fork(parent, child, child.known, num_computed=count - 1, num_shared=count)
            else:
                self._wait(parent, child, child.known, count)

    def fork(self, parent: RequestState, child: RequestState, tokens: IntArray, *, num_computed: int, num_shared: int) -> None:
        """Start ``child`` with these tokens, sharing the blocks of the parent's first ``num_shared``; without room it waits."""
        if parent.status is Status.RUNNING and self._roster.num_free_slots and self._has_headroom():
            child.prefix = self._kv.cut_prefix(parent.prefix, num_shared)
            slot = self._roster.enter(child, tokens, num_computed, num_shared)
            self._kv.fork(parent.slot, slot, child.prefix, num_shared)
        else:
            self._wait(parent, child, tokens, num_shared)

    def _wait(self, parent: RequestState, child: RequestState, tokens: IntArray, num_shared: int) -> None:
        child.prefix = self._kv.cut_prefix(parent.prefix, num_shared)
        child.known = tokens
        self._roster.waiting.push(child)

    def _look_up(self, state: RequestState) -> Hit:
        if state.prompt_logprobs:  # every position has to be computed
            return self._kv.no_hit
        if state.num_tokens > state.num_prompt_tokens:  # resumed, or a beam: its output is looked up too
            self._kv.extend_prefix(state.prefix, state.known)
        return self._kv.match(state.prefix, state.num_tokens)

    def _steps_back(self, state: RequestState, hit: Hit) -> bool:
        if not self._filling or hit.num_tokens <= state.stepped_back_at:
            return False
        following = self._kv.keys_between(state.prefix, hit.num_tokens, state.num_tokens)[:1]
        if self._filling.isdisjoint(following):
            return False
        state.stepped_back_at = hit.num_tokens
        return True

    def _first_chunk(self, hit: Hit, num_tokens: int, budget: int) -> int:
        computed = min(hit.num_tokens, num_tokens - 1)
        if not self._kv.chunk_edges and not self._config.long_prefill_token_threshold:
            wanted = num_tokens - computed
            return min(wanted, budget) if self._config.enable_chunked_prefill or wanted <= budget else 0
        granted = share_budget(
            _one(num_tokens - computed),
            _one(computed),
            budget=budget,
            decode_query_len=1,
            long_prefill_token_threshold=self._config.long_prefill_token_threshold,
            chunked=self._config.enable_chunked_prefill,
            edges=self._kv.chunk_edges,
        )
        return int(granted[0])

    def _fits(self, hit: Hit, num_tokens: int, reserved: IntArray) -> bool:
        room: IntArray = self._kv.num_free - self._kv.cost(hit, num_tokens, self._config.max_num_batched_tokens)
        if len(self._roster):
            room = room - reserved - len(self._roster)
        return bool((room >= 0).all())

    def _has_headroom(self) -> bool:
        return bool((self._kv.num_free - self._reserved() > len(self._roster)).all())

    def _reserved(self) -> IntArray:
        """[num_pools] blocks that running requests need until the tokens they have now are computed."""
        slots, arrays = self._roster.order, self._roster.arrays
        starts = np.maximum(arrays.num_computed[slots], arrays.num_cached[slots])
        ends = np.maximum(arrays.num_tokens[slots], starts)
        due = ends > self._kv.event_at[slots]
        reserved: IntArray = self._kv.demand(slots[due], starts[due], ends[due]).sum(axis=1)
        return reserved

    def _enter(self, state: RequestState, hit: Hit, count: int) -> None:
        self._roster.waiting.pop()
        tokens, computed = state.known, min(hit.num_tokens, state.num_tokens - 1)
        slot = self._roster.enter(state, tokens, computed, hit.num_tokens)
        self._kv.adopt(slot, state.prefix, hit)
        start, end = max(computed, hit.num_tokens), computed + count
        if end > start:
            self._kv.extend(_one(slot), _one(start), _one(end), announce=False)
        self._filling.update(self._kv.keys_between(state.prefix, hit.num_tokens, end))
        self.num_queries += len(tokens)
        self.num_hits += computed

    def _keys_filled(self, slots: IntArray, counts: IntArray) -> set[bytes]:
        """Keys of the blocks that the prompts among the step's rows fill."""
        keys: set[bytes] = set()
        for slot, count in zip(slots[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
            computed = int(self._roster.arrays.num_computed[slot])
            keys.update(self._kv.keys_between(self._roster.state(slot).prefix, computed, computed + count))
        return keys


def _one(value: int) -> IntArray:
    return np.array([value], np.int32)
