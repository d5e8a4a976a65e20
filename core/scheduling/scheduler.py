"""`Scheduler`: hands out each step's tokens so that ``num_computed_tokens`` catches up with ``num_tokens``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.errors import EngineError, UsageError
from octavo.core.api.scheduling import (
    FinishedRequest,
    FinishReason,
    IntArray,
    Proposer,
    Request,
    SchedulerStats,
    SchedulingPolicy,
    StartedRequest,
    StepOutput,
    StepPlan,
    StepResult,
)
from octavo.core.config.scheduler import SchedulerConfig
from octavo.core.kv_cache.hashing import encode_extra
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.scheduling.admission import Admission
from octavo.core.scheduling.grants import share_budget
from octavo.core.scheduling.results import select_logprobs, select_prompt_logprobs
from octavo.core.scheduling.roster import Roster
from octavo.core.scheduling.state import RequestState, SlotArrays, Status
from octavo.core.scheduling.stops import find_stops, stop_cause
from octavo.core.scheduling.waiting import WaitingQueue


@dataclass(slots=True)
class PlannedStep:
    """What the scheduler remembers of a step until its result is there."""

    number: int
    slots: IntArray  # its rows
    samples: NDArray[np.bool_] | None  # rows that are sampled; None = all
    started: list[StartedRequest] = field(default_factory=list)
    num_drafts: IntArray | None = None


class Scheduler:
    """Plans steps (`schedule`) and takes in their results (`update`), in turn; up to ``max_in_flight`` plans may be without a
    result.

    All state is in arrays by slot. A step in which every running request decodes one token and nothing else happens repeats
    the last one (`_repeat`): a handful of vector operations, whatever the number of requests.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        policy: SchedulingPolicy,
        proposer: Proposer | None = None,
        max_in_flight: int = 1,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight if proposer is None else 1  # drafts follow tokens that are known
        self._kv = kv
        self._proposer = proposer
        self._decode_query_len = 1 + (config.num_speculative_tokens if proposer else 0)
        self._budget = config.max_num_batched_tokens
        self._arrays = SlotArrays(config.max_num_seqs, max_model_len)
        self._waiting = WaitingQueue(policy)
        self._roster = Roster(kv, self._arrays, self._waiting, policy)
        self._admission = Admission(
            kv,
            self._arrays,
            self._roster,
            max_chunk=self._budget,
            chunked=config.enable_chunked_prefill,
            cap=config.long_prefill_token_threshold,
        )
        self._requests: dict[str, list[RequestState]] = {}
        self._arrivals = 0
        self._step = 0
        self._in_flight: deque[PlannedStep] = deque()
        self._rows: IntArray | None = None  # those of the last plan
        self._repeatable = False  # the last plan's rows all decode, and nothing has changed since
        self._stuck = False  # the first waiting request can't get in before something ends
        self._paused = self._draining = False
        self._scheduled_tokens = 0

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises `UsageError` when it could never run (with the numbers), or when its id is in use."""
        self._check(request)
        extra = encode_extra(request.cache_salt, request.extra_keys)
        keys = self._kv.new_keys()
        self._kv.extend_keys(keys, request.prompt_token_ids, extra)
        first = RequestState(request, request.index, self._arrivals, self._arrays, keys, extra)
        states = [first]
        for index in range(request.index + 1, request.index + request.sampling.n):
            states.append(RequestState(request, index, self._arrivals, self._arrays, keys, extra))
            states[-1].status = Status.PENDING
        first.forks = states[1:]
        self._arrivals += 1
        self._requests[request.request_id] = states
        self._waiting.push(first)
        self._stuck = False

    def abort(self, request_id: str) -> list[FinishedRequest]:
        """End every completion of a request, at any moment. [] if there is none of that id (any more)."""
        states = self._requests.pop(request_id, [])
        finished = [FinishedRequest(slot=s.slot, request_id=request_id, index=s.index, reason="abort") for s in states]
        for state in states:
            self._roster.end(state)
        self._stuck = False
        return finished

    def finish(self, request_id: str, index: int, *, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End one completion from outside (a stop string was found). It is gone afterwards, and in no `StepOutput`.

        ``reason`` and ``stop_reason`` are the caller's to report; a completion that has ended already is ignored.
        """
        for state in self._requests.get(request_id, []):
            if state.index == index:
                self._end(state)
                return

    def has_unfinished(self) -> bool:
        """Whether requests are left, or steps without a result."""
        return bool(self._requests or self._in_flight)

    # Steps

    def schedule(self) -> StepPlan | None:
        """The next step; None when nothing can run now (nothing to do, paused, or everything waits for steps in flight)."""
        if self._paused or len(self._in_flight) >= self.max_in_flight:
            return None
        self._roster.reclaim()
        return self._repeat() or self._replan()

    def update(self, result: StepResult) -> StepOutput:
        """Take in the oldest step's result: tokens, stops, and blocks that can be shared from now on."""
        step = self._in_flight.popleft()
        if step.number != result.step:
            raise EngineError(f"result of step {result.step} came where step {step.number}'s was due; executors keep the order")
        self._roster.last_done = step.number
        self._kv.set_in_flight(self._roster.last_planned, step.number)
        chosen = self._producing(step)
        slots = step.slots if chosen is None else step.slots[chosen]
        tokens = result.sampled[:, 0] if chosen is None else result.sampled[chosen, 0]
        prompt_logprobs = select_prompt_logprobs(result.prompt_logprobs, step.slots, self._roster.states)
        return StepOutput(
            slots=slots,
            token_ids=tokens[:, None],
            started=step.started,
            finished=self._append(slots, tokens),
            logprobs=select_logprobs(result.logprobs, chosen, len(step.slots)),
            prompt_logprobs=prompt_logprobs,
        )

    def _repeat(self) -> StepPlan | None:
        """The last step again: each row's one new token. None if anything differs."""
        if not self._repeatable or self._roster.changed or self._may_admit():
            return None
        rows, arrays = self._rows, self._arrays
        assert rows is not None
        ends = arrays.num_tokens[rows]
        if self._in_flight and (ends >= arrays.limit[rows]).any():
            return None
        due = ends > self._kv.event_at[rows]
        if due.any() and not self._extend_if_possible(rows[due], ends[due]):
            return None
        arrays.num_computed[rows] = ends
        arrays.num_tokens[rows] = ends + 1
        tables, copies = self._kv.take_changes()
        self._launch(PlannedStep(self._step, rows, None), len(rows))
        return StepPlan(
            step=self._roster.last_planned, released=self._roster.take_released(), tables=tables, block_copies=copies
        )

    def _may_admit(self) -> bool:
        """Whether the first waiting request could get in. One that couldn't is tried again when a completion ends, and now and
        then, for blocks that come free behind windows.
        """
        return len(self._waiting) > 0 and (not self._stuck or self._step % 32 == 0)

    def _extend_if_possible(self, slots: IntArray, ends: IntArray) -> bool:
        starts = ends - 1
        self._kv.trim(slots, starts)
        if (self._kv.demand(slots, starts, ends).sum(axis=1) > self._kv.num_free).any():
            return False
        self._kv.extend(slots, starts, ends)
        return True

    def _replan(self) -> StepPlan | None:
        """A step from scratch: running rows within the budget and the blocks there are, then waiting requests."""
        preemptions = self._roster.num_preemptions
        slots, counts = self._grant()
        slots, counts = self._secure_blocks(slots, counts)
        if self._roster.num_preemptions == preemptions:
            new_slots, new_counts, stuck = self._admission.admit(self._budget - int(counts.sum()))
            self._stuck = stuck and not self._roster.num_leaving and not self._kv.num_limbo.any()
            slots = np.append(slots, np.array(new_slots, np.int32))
            counts = np.append(counts, np.array(new_counts, np.int32))
        if not len(slots):
            return None
        return self._issue(slots, counts)

    def _grant(self) -> tuple[IntArray, IntArray]:
        """Running slots that have something to compute, and how many tokens each gets."""
        slots, arrays = self._roster.order, self._arrays
        computed = arrays.num_computed[slots]
        wanted = np.minimum(arrays.num_tokens[slots], arrays.limit[slots] - 1) - computed
        wanted[arrays.parked[slots]] = 0
        granted = share_budget(
            wanted,
            computed,
            budget=self._budget,
            decode_query_len=self._decode_query_len,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            chunked=self.config.enable_chunked_prefill,
            edges=self._kv.chunk_edges,
        )
        kept = granted > 0
        return slots[kept], granted[kept].astype(np.int32)

    def _secure_blocks(self, slots: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Get every row its blocks; preempt while there are too few, and leave out rows that must wait for steps in flight."""
        kv, arrays = self._kv, self._arrays
        while len(slots):
            computed = arrays.num_computed[slots]
            starts = np.maximum(computed, arrays.num_cached[slots])
            ends = np.maximum(computed + counts, starts)
            due = np.flatnonzero(ends > kv.event_at[slots])
            if not len(due):
                return slots, counts
            kv.trim(slots[due], computed[due])
            demand = kv.demand(slots[due], starts[due], ends[due])
            if (demand.sum(axis=1) <= kv.num_free).all():
                kv.extend(slots[due], starts[due], ends[due])
                return slots, counts
            if (demand.sum(axis=1) <= kv.num_free + kv.num_limbo).all():
                late = due[(np.cumsum(demand, axis=1) > kv.num_free[:, None]).any(axis=0)]
                kept = np.delete(np.arange(len(slots)), late)
            else:
                victim = self._roster.choose_victim()
                kept = np.flatnonzero(slots != victim.slot)
                self._roster.preempt(victim)
            slots, counts = slots[kept], counts[kept]
        return slots, counts

    def _issue(self, slots: IntArray, counts: IntArray) -> StepPlan:
        """Settle the rows' order and turn them into a plan."""
        arrays, roster = self._arrays, self._roster
        prefill = counts > self._decode_query_len
        num_decodes = len(slots) - int(np.count_nonzero(prefill))
        if num_decodes < len(slots):
            order = np.argsort(prefill, kind="stable")
            slots, counts = slots[order], counts[order]
        new = roster.announce()
        computed = arrays.num_computed[slots] + counts
        samples = computed == arrays.num_tokens[slots]
        arrays.num_computed[slots] = computed
        arrays.num_tokens[slots[samples]] += 1
        steady = num_decodes == len(slots) and bool(samples.all()) and bool((counts == 1).all()) and not roster.fresh
        same_rows = self._rows is not None and np.array_equal(slots, self._rows) and bool((counts == 1).all())
        step = PlannedStep(self._step, slots, None if samples.all() else samples)
        step.started = [
            StartedRequest(slot=m.slot, request_id=m.request_id, index=m.index, num_cached_tokens=m.num_cached_tokens)
            for m in new
        ]
        tables, copies = self._kv.take_changes()
        self._rows, roster.changed, self._repeatable = slots, False, steady and self._proposer is None
        self._commit_computed(slots, computed)
        self._fork_prompts(slots[samples])
        plan = StepPlan(step=self._step, released=roster.take_released(), new=new, tables=tables, block_copies=copies)
        if not same_rows:
            plan.rows, plan.num_scheduled_tokens, plan.num_decodes = slots, counts, num_decodes
        self._launch(step, int(counts.sum()))
        return plan

    def _launch(self, step: PlannedStep, num_tokens: int) -> None:
        self._in_flight.append(step)
        self._roster.last_planned = step.number
        self._kv.set_in_flight(step.number, self._roster.last_done)
        self._step += 1
        self._scheduled_tokens += num_tokens

    def _commit_computed(self, slots: IntArray, computed: IntArray) -> None:
        """Blocks that this step fills, as far as their tokens are known: the next step may share them."""
        due = (computed >= self._kv.commit_at[slots]) & (computed <= self._arrays.num_known[slots])
        for slot, count in zip(slots[due].tolist(), computed[due].tolist(), strict=True):
            self._commit(slot, count)

    def _commit(self, slot: int, num_tokens: int) -> None:
        state = self._roster.state(slot)
        self._kv.extend_keys(state.keys, self._arrays.tokens[slot, :num_tokens], state.extra)
        self._kv.commit(slot, state.keys, num_tokens)

    def _fork_prompts(self, slots: IntArray) -> None:
        """Completions 1 … n-1 start from the blocks of completion 0 once its prompt is computed; without room they wait."""
        for slot in slots.tolist():
            parent = self._roster.state(slot)
            forks, parent.forks = parent.forks, []
            for child in forks:
                child.keys = tuple(list(chain) for chain in parent.keys)
                if self._kv.full_hit and self._roster.num_free_slots and self._has_headroom():
                    count = parent.num_prompt_tokens
                    child_slot = self._roster.enter(child, child.known, count - 1, count)
                    self._kv.fork(slot, child_slot, count)
                else:
                    self._waiting.push(child)

    def _has_headroom(self) -> bool:
        return bool((self._kv.num_free - self._admission.reserved() > len(self._roster)).all())

    # Results

    def _producing(self, step: PlannedStep) -> IntArray | None:
        """Indices of the rows that give tokens; None = all."""
        if not self._roster.num_ignored:
            return None if step.samples is None else np.flatnonzero(step.samples).astype(np.int32)
        alive = ~self._arrays.ignored[step.slots]
        if step.samples is not None:
            alive &= step.samples
        return np.flatnonzero(alive).astype(np.int32)

    def _append(self, slots: IntArray, tokens: IntArray) -> list[FinishedRequest]:
        """One more token for each of these slots; the completions that it ends."""
        arrays = self._arrays
        known = arrays.num_known[slots]
        arrays.tokens[slots, known] = tokens
        known = known + 1
        arrays.num_known[slots] = known
        due = known > self._kv.commit_at[slots]
        if due.any():
            for slot, count in zip(slots[due].tolist(), known[due].tolist(), strict=True):
                self._commit(slot, count - 1)
        stopped = np.flatnonzero(find_stops(arrays, slots, tokens, known))
        finished = []
        for slot, token in zip(slots[stopped].tolist(), tokens[stopped].tolist(), strict=True):
            state = self._roster.state(slot)
            reason, cause = stop_cause(state, token, state.num_tokens)
            finished.append(
                FinishedRequest(slot=slot, request_id=state.request_id, index=state.index, reason=reason, stop_reason=cause)
            )
            self._end(state)
        return finished

    def _end(self, state: RequestState) -> None:
        states = self._requests[state.request_id]
        states.remove(state)
        if not states:
            del self._requests[state.request_id]
        self._roster.end(state)
        self._stuck = False

    # Operation

    def stats(self) -> SchedulerStats:
        """Counters since the start, and what is running now."""
        return SchedulerStats(
            num_running=len(self._roster),
            num_waiting=len(self._waiting),
            kv_usage=self._kv.usage,
            prefix_queries_total=self._admission.num_queries,
            prefix_hits_total=self._admission.num_hits,
            preemptions_total=self._roster.num_preemptions,
            evictions_total=self._kv.num_evictions,
            scheduled_tokens_total=self._scheduled_tokens,
            steps_total=self._step,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False (and nothing done) while requests run: their blocks belong to the old cache."""
        if len(self._roster) or self._in_flight:
            return False
        self._kv.reset_prefix_cache()
        return True

    def _check(self, request: Request) -> None:
        prompt, new = len(request.prompt_token_ids), request.max_tokens
        if self._draining:
            raise EngineError("the engine is draining and takes no new requests; call resume() first")
        if request.request_id in self._requests:
            raise UsageError(f"request id {request.request_id!r} is in use; ids must be unique among unfinished requests")
        if prompt == 0:
            raise UsageError("the prompt is empty; it must have at least one token")
        if prompt + 1 > self.max_model_len:
            raise UsageError(
                f"the prompt has {prompt} tokens, the context has room for {self.max_model_len - 1} and an answer; shorten it"
            )
        total = min(prompt + new, self.max_model_len) - 1  # the last token is never written
        if not self.config.enable_chunked_prefill and total > self._budget:
            raise UsageError(
                f"the request may grow to {total} tokens, a step takes {self._budget} and chunked prefill is off; "
                f"raise max_num_batched_tokens or lower max_tokens"
            )
        needed = self._kv.peak_blocks(total, self._budget)
        for pool, count in zip(self._kv.pools, needed.tolist(), strict=True):
            if count > pool.num_blocks - 1:
                raise UsageError(
                    f"the request needs up to {count} KV blocks ({prompt} prompt tokens, at most {new} new ones), "
                    f"the cache has {pool.num_blocks - 1}; lower max_tokens, shorten the prompt or give the KV cache more memory"
                )
