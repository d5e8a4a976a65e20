"""`Roster`: which completion has which slot, and how slots and blocks come back when it leaves."""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np

from octavo.core.api.scheduling import IntArray, NewRequest, SchedulingPolicy
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.scheduling.flight import Flight
from octavo.core.scheduling.state import NO_SLOT, RequestState, SlotArrays, Status
from octavo.core.scheduling.waiting import WaitingQueue


class Roster:
    """Slots and their completions.

    While steps are in flight, a slot whose completion ended or was preempted stays taken until the last of them is done; rows
    of an ended completion are ``ignored`` meanwhile, those of a preempted one still give it its tokens.
    """

    def __init__(
        self, kv: KVCacheManager, arrays: SlotArrays, waiting: WaitingQueue, policy: SchedulingPolicy, flight: Flight
    ) -> None:
        self.kv = kv
        self.flight = flight
        self.arrays = arrays
        self.waiting = waiting
        self.policy = policy
        num_slots = len(arrays.num_tokens)
        self.states: list[RequestState | None] = [None] * num_slots
        self.order: IntArray = np.zeros(0, np.int32)  # running slots, in the order in which they got in
        self.fresh: list[RequestState] = []  # in a slot that the worker hasn't been told of
        self.num_ignored = 0
        self.num_preemptions = 0
        self.changed = True  # the set of running completions isn't the one of the last plan
        self._free = list(range(num_slots))
        self._leaving: deque[tuple[int, int]] = deque()  # (last step that may use it, slot)
        self._released: list[int] = []

    def __len__(self) -> int:
        return len(self.order)

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    @property
    def num_leaving(self) -> int:
        """Slots that come free when the steps in flight are done."""
        return len(self._leaving)

    def state(self, slot: int) -> RequestState:
        state = self.states[slot]
        assert state is not None, f"slot {slot} is empty"
        return state

    def enter(self, state: RequestState, tokens: IntArray, num_computed: int, num_cached: int) -> int:
        """Give a waiting completion the lowest free slot."""
        slot = heapq.heappop(self._free)
        state.status = Status.RUNNING
        self.arrays.enter(state, slot, tokens, num_computed, num_cached)
        self.states[slot] = state
        self.order = np.append(self.order, np.int32(slot))
        self.fresh.append(state)
        self.changed = True
        return slot

    def end(self, state: RequestState) -> None:
        """A completion ends, in whatever state it is."""
        if state.status is Status.WAITING:
            self.waiting.discard(state)
        elif state.status is Status.RUNNING:
            self._leave(state)
        was_leaving, state.status = state.status is Status.LEAVING, Status.FINISHED
        if state.slot == NO_SLOT:
            return
        self.arrays.ignored[state.slot] = True
        self.num_ignored += 1
        if not was_leaving:
            self._retire_if_idle(state)

    def preempt(self, state: RequestState) -> None:
        """Take a running completion's blocks; it waits to be computed again."""
        self._leave(state)
        state.status = Status.LEAVING
        self.num_preemptions += 1
        self._retire_if_idle(state)

    def choose_victim(self) -> RequestState:
        """The running completion that the policy gives up first; those that are parked come last."""
        running = [self.state(slot) for slot in self.order.tolist()]
        return max(running, key=lambda s: (not s.parked, self.policy.victim_key(s), s.arrival, s.index))

    def park(self, state: RequestState) -> None:
        """Give the completion no more rows; it keeps its slot and blocks (unless it has to be preempted)."""
        state.parked = True
        self.arrays.parked[state.slot] = True
        self.changed = True

    def wake(self, state: RequestState) -> None:
        """Let a parked completion go on."""
        state.parked = False
        if state.slot != NO_SLOT:
            self.arrays.parked[state.slot] = False
            self.changed = True
        if state.status is Status.PENDING:
            self._line_up(state)

    def commit_computed(self, slots: IntArray, computed: IntArray) -> None:
        """Blocks filled by a step that was just planned, as far as their tokens are known: the next step may share them."""
        due = (computed >= self.kv.commit_at[slots]) & (computed <= self.arrays.num_known[slots])
        if np.count_nonzero(due):
            self.kv.commit(slots[due], computed[due], self.arrays.tokens)

    def commit_known(self, slots: IntArray, known: IntArray) -> None:
        """Blocks that came to be full and known by the last tokens sampled (whose own positions aren't computed yet)."""
        due = known > self.kv.commit_at[slots]
        if np.count_nonzero(due):
            self.kv.commit(slots[due], known[due] - 1, self.arrays.tokens)

    def reclaim(self) -> None:
        """Free the slots that no step in flight uses any more."""
        while self._leaving and self._leaving[0][0] <= self.flight.last_done:
            self._retire(self._leaving.popleft()[1])

    def take_released(self) -> IntArray | None:
        """Slots that came free since the last call, for ``StepPlan.released``."""
        if not self._released:
            return None
        released, self._released = np.array(self._released, np.int32), []
        return released

    def announce(self) -> list[NewRequest]:
        """The messages that tell the worker of the completions that entered since the last call."""
        fresh, self.fresh = self.fresh, []
        return [self._message(state) for state in fresh]

    def _message(self, state: RequestState) -> NewRequest:
        slot, arrays, request = state.slot, self.arrays, state.request
        return NewRequest(
            slot=slot,
            request_id=request.request_id,
            index=state.index,
            token_ids=state.tokens.copy(),
            num_prompt_tokens=state.num_prompt_tokens,
            num_computed_tokens=int(arrays.num_computed[slot]),
            num_cached_tokens=int(arrays.num_cached[slot]),
            block_ids=self.kv.entries(slot),
            sampling=state.sampling(),
            eos_token_ids=tuple(request.eos_token_ids),
        )

    def _leave(self, state: RequestState) -> None:
        self.kv.free(state.slot)
        self.order = self.order[self.order != state.slot]
        self.changed = True

    def _retire_if_idle(self, state: RequestState) -> None:
        if state in self.fresh:  # no step has used the slot, and the worker doesn't know of it
            self.fresh.remove(state)
            self._retire(state.slot, announced=False)
        elif not len(self.flight):
            self._retire(state.slot)
        else:
            self._leaving.append((self.flight.last_planned, state.slot))

    def _retire(self, slot: int, *, announced: bool = True) -> None:
        """The slot is free from now on; a preempted completion takes its tokens along and waits."""
        state = self.state(slot)
        if state.status is Status.FINISHED:
            self.num_ignored -= 1
        state.leave_slot()
        self.arrays.leave(slot)
        self.states[slot] = None
        heapq.heappush(self._free, slot)
        if announced:
            self._released.append(slot)
        if state.status is Status.LEAVING:
            self._line_up(state)

    def _line_up(self, state: RequestState) -> None:
        """Wait for a slot again, unless it is parked."""
        if state.parked:
            state.status = Status.PENDING
        else:
            self.waiting.push(state)
