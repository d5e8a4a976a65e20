"""Output processing: what the scheduler learned in a step becomes text, log probabilities and finish reasons."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.api.errors import EngineError, OctavoError
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import FinishedRequest, FinishReason, Logprobs, Request, StepOutput
from octavo.core.engine.detokenizer import Detokenizer, TokenBytes
from octavo.core.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from octavo.core.engine.stopping import StopStrings

__all__ = ["OutputProcessor", "Processed", "RequestState", "Stop"]


@dataclass(frozen=True, slots=True)
class Stop:
    """A completion that ended at a stop string: the scheduler doesn't know yet."""

    request_id: str
    index: int
    stop_reason: str


class Processed(NamedTuple):
    """What a step changed: requests with new tokens or a new end, and completions to stop in the scheduler."""

    updated: Sequence[RequestState]
    stops: Sequence[Stop]


@dataclass(slots=True)
class CompletionState:
    """One completion as it grows. ``text`` may run ahead of what may be shown: ``num_shown`` characters of it."""

    request: RequestState
    index: int
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_shown: int = 0
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    slot: int | None = None  # while it runs

    def push(self, token_id: int, *, silent: bool = False) -> bool:
        """Append a token; ``silent`` gives it no text. True when it completed a stop string, which ends the completion."""
        self.token_ids.append(token_id)
        if self.detokenizer is None or silent:
            return False
        new = self.detokenizer.push(token_id)
        if not new:
            return False
        self.text += new
        params, stops = self.request.params, self.request.stops
        if len(self.token_ids) > params.min_tokens and (match := stops.find(self.text, len(new))):
            self.text = self.text[: match.end if params.include_stop_str_in_output else match.start]
            self._end("stop", match.string)
            return True
        self.num_shown = len(self.text) - stops.num_held(self.text)
        return False

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The completion ends: everything held back is shown."""
        if self.detokenizer is not None:
            self.text += self.detokenizer.flush()
        self._end(reason, stop_reason)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text[: self.num_shown],
            token_ids=self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.num_shown = len(self.text)
        self.finish_reason, self.stop_reason = reason, stop_reason


class RequestState:
    """A request and its completions, as the front sees them."""

    def __init__(self, request: Request, prompt: str | None, pieces: TokenBytes, public_id: str) -> None:
        self.request_id = request.request_id
        self.public_id = public_id
        self.prompt = prompt
        self.prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
        self.params: SamplingParams = request.sampling
        self.stops = StopStrings(tuple(self.params.stop or ()))
        self.metrics = RequestMetrics(request.arrival_time_s)
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if self.params.prompt_logprobs is None else [None]
        self.error: OctavoError | None = None
        self.completions = [self._completion(index, pieces) for index in range(self.params.n)]

    @property
    def finished(self) -> bool:
        return self.error is not None or all(completion.finish_reason for completion in self.completions)

    def output(self) -> RequestOutput:
        """A copy of the state, with all text so far (not just what is new)."""
        return RequestOutput(
            request_id=self.public_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            metrics=RequestMetrics(self.metrics.arrival_s, self.metrics.first_token_s, self.metrics.finished_s),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.copy(),
            num_cached_tokens=self.num_cached_tokens,
        )

    def _completion(self, index: int, pieces: TokenBytes) -> CompletionState:
        params = self.params
        state = CompletionState(
            request=self,
            index=index,
            detokenizer=self._detokenizer(pieces) if params.detokenize else None,
        )
        if params.logprobs is not None:
            state.logprobs, state.cumulative_logprob = [], 0.0
        return state

    def _detokenizer(self, pieces: TokenBytes) -> Detokenizer:
        return Detokenizer(
            pieces,
            skip_special_tokens=self.params.skip_special_tokens,
            spaces_between_special_tokens=self.params.spaces_between_special_tokens,
        )


class OutputProcessor:
    """Keeps the slot → completion map, of completions that run. One thread at a time may use it."""

    def __init__(self, pieces: TokenBytes) -> None:
        self._pieces = pieces
        self._requests: dict[str, RequestState] = {}
        self._slots: dict[int, CompletionState] = {}

    @property
    def requests(self) -> Mapping[str, RequestState]:
        """Unfinished requests by their id."""
        return self._requests

    def add(self, request: Request, prompt: str | None, *, public_id: str | None = None) -> RequestState:
        """Expect outputs for a request. ``public_id`` is what its `RequestOutput` is called, where that differs."""
        state = RequestState(request, prompt, self._pieces, public_id or request.request_id)
        self._requests[request.request_id] = state
        return state

    def process(self, output: StepOutput) -> Processed:
        """Apply a step. Requests that finished are forgotten afterwards."""
        now_s = time.monotonic()
        updated: dict[str, RequestState] = {}
        stops: list[Stop] = []
        for started in output.started:
            state = self._requests.get(started.request_id)
            if state is None:  # ended by the front; what it still says must not reach the slot's former owner
                self._slots.pop(started.slot, None)
                continue
            self._occupy(started.slot, state.completions[started.index])
            if state.num_cached_tokens is None:
                state.num_cached_tokens = started.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(output.prompt_logprobs)
        ends = {(end.request_id, end.index): end for end in output.finished}
        for completion, tokens, logprobs in self._rows(output):
            request = completion.request
            updated[request.request_id] = request
            if request.metrics.first_token_s is None:
                request.metrics.first_token_s = now_s
            if self._push(completion, tokens, logprobs, ends.get((request.request_id, completion.index))):
                stops.append(Stop(request.request_id, completion.index, str(completion.stop_reason)))
                self._leave(completion)
        for end in output.finished:
            if (ended := self._finish(end)) is not None:
                updated[ended.request_id] = ended
        self._forget(updated.values(), now_s)
        return Processed(tuple(updated.values()), [stop for stop in stops if (stop.request_id, stop.index) not in ends])

    def abort(self, request_id: str) -> None:
        """End every open completion of a request with reason "abort"; nothing when it isn't known (any more)."""
        state = self._requests.get(request_id)
        if state is not None:
            for completion in state.completions:
                if completion.finish_reason is None:
                    completion.finish("abort")
            self._forget([state], time.monotonic())

    def fail(self, error: OctavoError, request_id: str | None = None) -> Sequence[RequestState]:
        """End one request, or every one (the engine is gone), with the error."""
        states = [state for state in self._requests.values() if request_id in (None, state.request_id)]
        for state in states:
            state.error = error
        self._forget(states, time.monotonic())
        return states

    def _rows(self, output: StepOutput) -> Iterator[tuple[CompletionState, list[int], list[TokenLogprobs]]]:
        entries = _by_row(output.logprobs)
        for row, (slot, tokens) in enumerate(zip(output.slots.tolist(), output.token_ids.tolist(), strict=True)):
            completion = self._slots.get(slot)
            if completion is None or completion.finish_reason is not None or completion.request.error is not None:
                continue  # ended by the front while this step ran
            found = entries.get(row, ())
            width = completion.request.params.logprobs
            logprobs = [] if width is None else [self._positions(output.logprobs, entry, width) for entry in found]
            yield completion, [token for token in tokens if token >= 0], logprobs

    def _push(
        self, completion: CompletionState, tokens: list[int], logprobs: list[TokenLogprobs], end: FinishedRequest | None
    ) -> bool:
        """Append a row's tokens; True when a stop string ended the completion (later tokens are dropped)."""
        by_token = end is not None and end.reason == "stop"
        hide_last = by_token and not completion.request.params.include_stop_str_in_output
        for position, token_id in enumerate(tokens):
            if completion.logprobs is not None and position < len(logprobs):
                completion.logprobs.append(logprobs[position])
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + logprobs[position][token_id].logprob
            if completion.push(token_id, silent=hide_last and position == len(tokens) - 1):
                return True
        return False

    def _finish(self, end: FinishedRequest) -> RequestState | None:
        state = self._requests.get(end.request_id)
        if state is None:
            return None
        completion = state.completions[end.index]
        if completion.finish_reason is None:
            completion.finish(end.reason, end.stop_reason)
        self._leave(completion)
        if end.reason == "error" and state.error is None:
            state.error = EngineError(end.message or f"request {end.request_id} failed")
        return state

    def _forget(self, states: Iterable[RequestState], now_s: float) -> None:
        for state in states:
            if state.finished:
                state.metrics.finished_s = now_s
                self._requests.pop(state.request_id, None)
                for completion in state.completions:
                    self._leave(completion)

    def _occupy(self, slot: int, completion: CompletionState) -> None:
        self._leave(completion)  # it was preempted: the slot that it had has nothing for it any more
        completion.slot = slot
        self._slots[slot] = completion

    def _leave(self, completion: CompletionState) -> None:
        """The completion ended or moved. What steps in flight still say in its slot is nobody's."""
        if completion.slot is not None and self._slots.get(completion.slot) is completion:
            del self._slots[completion.slot]
        completion.slot = None

    def _add_prompt_logprobs(self, logprobs: Logprobs) -> None:
        for entry, slot in enumerate(logprobs.rows.tolist()):
            completion = self._slots.get(slot)
            if completion is None or completion.request.prompt_logprobs is None:
                continue
            request, width = completion.request, completion.request.params.prompt_logprobs or 0
            assert request.prompt_logprobs is not None
            if len(request.prompt_logprobs) < len(request.prompt_token_ids):
                request.prompt_logprobs.append(self._positions(logprobs, entry, width))

    def _positions(self, logprobs: Logprobs | None, entry: int, width: int) -> TokenLogprobs:
        """Entry ``entry`` as a dictionary of the token itself and its ``width`` best alternatives."""
        assert logprobs is not None
        shown = slice(None if width == -1 else width + 1)  # -1: the whole vocabulary
        ids = logprobs.token_ids[entry, shown].tolist()
        values = logprobs.logprobs[entry, shown].tolist()
        found: TokenLogprobs = {}
        for rank, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            if token_id >= 0 and token_id not in found:
                found[token_id] = Logprob(value, rank or int(logprobs.ranks[entry]), self._pieces.text(token_id))
        return found


def _by_row(logprobs: Logprobs | None) -> dict[int, list[int]]:
    """Row → its entries, in order."""
    rows: dict[int, list[int]] = {}
    if logprobs is not None:
        for entry, row in enumerate(logprobs.rows.tolist()):
            rows.setdefault(row, []).append(entry)
    return rows
