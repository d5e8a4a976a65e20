"""`Scheduler`: what the engine core calls. Requests in, `StepPlan` out, `StepResult` in, `StepOutput` out."""

from __future__ import annotations

from octavo.core.api.errors import EngineError, UsageError
from octavo.core.api.scheduling import (
    FinishedRequest,
    FinishReason,
    Proposer,
    Request,
    SchedulerStats,
    SchedulingPolicy,
    StepOutput,
    StepPlan,
    StepResult,
)
from octavo.core.config.scheduler import SchedulerConfig
from octavo.core.kv_cache.hashing import encode_extra
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.scheduling.admission import Admission
from octavo.core.scheduling.checks import check_request
from octavo.core.scheduling.collector import Collector
from octavo.core.scheduling.drafts import Drafter
from octavo.core.scheduling.flight import Flight
from octavo.core.scheduling.planner import Planner
from octavo.core.scheduling.roster import Roster
from octavo.core.scheduling.state import RequestState, SlotArrays, Status
from octavo.core.scheduling.waiting import WaitingQueue


class Scheduler:
    """Hands out each step's token budget so that every request's ``num_computed_tokens`` catches up with its ``num_tokens``.

    `schedule` plans a step and `update` takes in the result of the oldest one; up to ``max_in_flight`` may be planned ahead
    (asynchronous scheduling). State is in arrays by slot, and a step in which every running request decodes one token repeats
    the last one: a handful of vector operations, however many requests run. Python runs once an event: an arrival, a new
    block, an end, a preemption.

    **Beam search.** Add the request with ``stepwise=True`` (and ``ignore_eos``, log probabilities for the candidates): after
    each token a completion keeps its slot and blocks but gets no row. From the `StepOutput` of that token choose the next
    beams; then, for each parent and before any other call for it, `fork` every child whose token isn't the one that was
    sampled, `advance` the parent if that token is wanted too, else `finish` it. Children share the parent's blocks; only the
    block that each one writes next is copied. A completion that reaches ``max_tokens`` ends by itself.
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
        self.max_in_flight = max_in_flight if proposer is None else 1  # guesses follow tokens that are known
        self._kv = kv
        self._arrays = SlotArrays(config.max_num_seqs, max_model_len)
        self._waiting = WaitingQueue(policy)
        self._flight = Flight(kv)
        self._roster = Roster(kv, self._arrays, self._waiting, policy, self._flight)
        self._admission = Admission(config, kv, self._roster)
        drafter = None if proposer is None else Drafter(proposer, config.num_speculative_tokens, self._arrays)
        self._planner = Planner(config, kv, self._roster, self._admission, self._flight, drafter)
        self._collector = Collector(self._roster, self._end)
        self._requests: dict[str, dict[int, RequestState]] = {}  # id → index → completion
        self._num_arrivals = 0
        self._paused = self._draining = False
        kv.always_fits(config.max_num_batched_tokens)  # worked out now, so that the first request needn't wait for it

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises `UsageError` when it could never run (with the numbers), or when its id is in use;
        `EngineError` while draining.
        """
        if self._draining:
            raise EngineError("the engine is draining and takes no new requests; call resume() first")
        if request.request_id in self._requests:
            raise UsageError(f"request id {request.request_id!r} is in use; ids must be unique among unfinished requests")
        check_request(request, self.config, self._kv, self.max_model_len)
        prefix = self._kv.new_prefix(request.prompt_token_ids, encode_extra(request.cache_salt, request.extra_keys))
        first = RequestState(request, request.index, self._num_arrivals, self._arrays, prefix)
        for index in range(request.index + 1, request.index + request.sampling.n):
            first.forks.append(RequestState(request, index, self._num_arrivals, self._arrays, prefix, Status.PENDING))
        self._num_arrivals += 1
        self._waiting.push(first)  # may fail, in the policy
        self._requests[request.request_id] = {state.index: state for state in (first, *first.forks)}
        self._admission.retry()

    def abort(self, request_id: str) -> list[FinishedRequest]:
        """End every completion of a request, at any moment. [] if there is none of that id (any more)."""
        states = self._requests.pop(request_id, {}).values()
        finished = [FinishedRequest(slot=s.slot, request_id=request_id, index=s.index, reason="abort") for s in states]
        for state in states:
            self._roster.end(state)
        self._admission.retry()
        return finished

    def finish(self, request_id: str, index: int, *, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End one completion from outside (a stop string was found). It is gone afterwards, and in no later `StepOutput`.

        ``reason`` and ``stop_reason`` are the caller's to report; a completion that has ended already is ignored.
        """
        state = self._requests.get(request_id, {}).get(index)
        if state is not None:
            self._end(state)

    def fork(self, request_id: str, index: int, *, new_index: int, token_id: int) -> None:
        """Start completion ``new_index`` of a stepwise request: the tokens of completion ``index``, the last one replaced.

        The parent must be waiting for `advance`. Raises `UsageError` if it isn't, or if ``new_index`` is in use.
        """
        parent = self._parked(request_id, index)
        states = self._requests[request_id]
        if new_index in states:
            raise UsageError(f"completion {new_index} of request {request_id!r} exists already; choose another index")
        child = RequestState(parent.request, new_index, parent.arrival, self._arrays, parent.prefix, Status.PENDING)
        tokens, shared = parent.tokens.copy(), parent.num_tokens - 1
        tokens[-1] = token_id
        states[new_index] = child
        self._admission.fork(parent, child, tokens, num_computed=shared, num_shared=shared)

    def advance(self, request_id: str, index: int) -> None:
        """Let a completion of a stepwise request go on with the token it sampled. Raises `UsageError` if it isn't waiting."""
        self._roster.wake(self._parked(request_id, index))

    def has_unfinished(self) -> bool:
        """Whether requests are left, or steps without a result."""
        return bool(self._requests) or len(self._flight) > 0

    # Steps

    def schedule(self) -> StepPlan | None:
        """The next step; None when nothing can run now (nothing to do, paused, or everything waits for steps in flight)."""
        if self._paused or len(self._flight) >= self.max_in_flight:
            return None
        self._roster.reclaim()
        return self._planner.repeat() or self._planner.replan()

    def update(self, result: StepResult) -> StepOutput:
        """Take in the oldest step's result: tokens, ends, and blocks that can be shared from now on."""
        return self._collector.collect(self._flight.land(result.step), result)

    # Operation

    def pause(self) -> None:
        """Plan no more steps until `resume`; requests keep their slots and blocks, and may be added and aborted."""
        self._paused = True

    def drain(self) -> None:
        """Take no more requests until `resume`; those that are here run to their end."""
        self._draining = True

    def resume(self) -> None:
        """Undo `pause` and `drain`."""
        self._paused = self._draining = False

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False (and nothing done) while requests run: their blocks belong to the old cache."""
        if len(self._roster) or len(self._flight):
            return False
        self._kv.reset_prefix_cache()
        return True

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
            scheduled_tokens_total=self._planner.num_scheduled_tokens,
            steps_total=self._flight.num_planned,
            draft_tokens_total=self._planner.num_drafts,
            accepted_tokens_total=self._collector.num_accepted,
        )

    def _end(self, state: RequestState) -> None:
        states = self._requests[state.request_id]
        del states[state.index]
        if not states:
            del self._requests[state.request_id]
        if state.status is Status.PENDING:  # maybe until the prompt of another is computed
            for other in states.values():
                if state in other.forks:
                    other.forks.remove(state)
        self._roster.end(state)
        if state.forks:  # it ends before its prompt is computed: the next one takes over
            self._waiting.push(state.bequeath())
        self._admission.retry()

    def _parked(self, request_id: str, index: int) -> RequestState:
        state = self._requests.get(request_id, {}).get(index)
        if state is not None and state.parked and state.num_tokens == state.num_planned_tokens:
            return state
        raise UsageError(
            f"completion {index} of request {request_id!r} isn't waiting for its next token to be chosen: "
            "it must have been added with stepwise=True, and its last token must be in a StepOutput"
        )
