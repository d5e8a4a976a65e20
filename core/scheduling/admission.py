"""`Admission`: which waiting requests get a slot."""

from __future__ import annotations

import numpy as np

from octavo.core.api.scheduling import IntArray
from octavo.core.kv_cache.manager import Hit, KVCacheManager
from octavo.core.scheduling.grants import share_budget
from octavo.core.scheduling.roster import Roster
from octavo.core.scheduling.state import RequestState, SlotArrays


class Admission:
    """Admits in the policy's order, and only what won't push running requests out again soon.

    A request gets in when the free blocks hold all its known tokens, after what running prompts still need and one more block
    for every running request: a request that was just preempted doesn't come back to be preempted at once. With nothing
    running, only its own blocks count, so whatever `Scheduler.add` accepted gets in at last.
    """

    def __init__(
        self, kv: KVCacheManager, arrays: SlotArrays, roster: Roster, *, max_chunk: int, chunked: bool, cap: int
    ) -> None:
        self._kv = kv
        self._arrays = arrays
        self._roster = roster
        self._max_chunk = max_chunk
        self._chunked = chunked
        self._cap = cap
        self.num_queries = 0
        self.num_hits = 0

    def admit(self, budget: int) -> tuple[list[int], list[int], bool]:
        """Slots of the requests admitted, the tokens each one gets in this step, and whether the first one left waits for
        room.
        """
        slots: list[int] = []
        counts: list[int] = []
        waiting, roster = self._roster.waiting, self._roster
        while budget > 0 and roster.num_free_slots:
            state = waiting.peek()
            if state is None:
                break
            count = self._try_admit(state, budget)
            if count is None:
                return slots, counts, True
            slots.append(state.slot)
            counts.append(count)
            budget -= count
        return slots, counts, len(waiting) > 0 and not roster.num_free_slots

    def _try_admit(self, state: RequestState, budget: int) -> int | None:
        kv, tokens = self._kv, state.known
        if len(tokens) > state.num_prompt_tokens:  # resumed: its output is looked up too
            kv.extend_keys(state.keys, tokens, state.extra)
        hit = kv.no_hit if state.prompt_logprobs else kv.match(state.keys, len(tokens))
        computed = min(hit.num_tokens, len(tokens) - 1)
        count = self._first_chunk(computed, len(tokens), budget)
        if count == 0 or not self._fits(hit, len(tokens)):
            return None
        self._roster.waiting.pop()
        slot = self._roster.enter(state, tokens, computed, hit.num_tokens)
        kv.adopt(slot, hit)
        start = max(computed, hit.num_tokens)
        if computed + count > start:
            kv.extend(_one(slot), _one(start), _one(computed + count), announce=False)
        self.num_queries += len(tokens)
        self.num_hits += computed
        return count

    def _first_chunk(self, computed: int, num_tokens: int, budget: int) -> int:
        granted = share_budget(
            _one(num_tokens - computed),
            _one(computed),
            budget=budget,
            decode_query_len=1,
            long_prefill_token_threshold=self._cap,
            chunked=self._chunked,
            edges=self._kv.chunk_edges,
        )
        return int(granted[0])

    def _fits(self, hit: Hit, num_tokens: int) -> bool:
        room: IntArray = self._kv.num_free - self._kv.cost(hit, num_tokens, self._max_chunk)
        if len(self._roster):
            room = room - self.reserved() - len(self._roster)
        return bool((room >= 0).all())

    def reserved(self) -> IntArray:
        """[num_pools] blocks that running requests need until the tokens they have now are computed."""
        slots, arrays = self._roster.order, self._arrays
        starts = np.maximum(arrays.num_computed[slots], arrays.num_cached[slots])
        reserved: IntArray = self._kv.demand(slots, starts, np.maximum(arrays.num_tokens[slots], starts)).sum(axis=1)
        return reserved


def _one(value: int) -> IntArray:
    return np.array([value], np.int32)
