"""Beam search: the choice of beams, on completions that the scheduler runs stepwise and forks.

A beam is a completion of one request. After each token of all live beams the best continuations are chosen; a parent goes on as
one of them and is forked for the others. Parents and children share the blocks of what they have in common.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from octavo.core.api.errors import EngineError, UsageError
from octavo.core.api.sampling import MAX_LOGPROBS, SamplingParams
from octavo.core.api.scheduling import FinishReason, Request, StepOutput
from octavo.core.engine.core import EngineCore

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "beam_search"]


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to search. Raises `UsageError` on a value out of range.

    A sequence's score is its log probability divided by ``length ** length_penalty``, the length counting generated tokens with
    the end-of-text token. ``early_stopping`` ends the search with ``beam_width`` finished sequences; without it the search goes
    on while a live beam could still become better than the worst of them.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -100 <= penalty <= 100:
            raise UsageError(f"length_penalty must be a number from -100 to 100, not {penalty!r}")


@dataclass(slots=True)
class BeamSearchSequence:
    """A finished sequence. ``tokens`` and ``text`` begin with the prompt."""

    tokens: list[int]
    cum_logprob: float
    score: float
    finish_reason: FinishReason
    text: str = ""


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences, best first."""

    sequences: list[BeamSearchSequence]


class Candidate(NamedTuple):
    """A beam with one more token."""

    cum_logprob: float
    parent: int
    token_id: int


@dataclass(slots=True)
class Beam:
    """A live completion: the tokens it has generated, and what it said last."""

    tokens: list[int]
    cum_logprob: float
    sampled: int | None = None
    alternatives: Mapping[int, float] = field(default_factory=dict)


class Moves(NamedTuple):
    """What the scheduler must do: ``forks`` of (parent, child, token), completions that go on, completions that end."""

    forks: Sequence[tuple[int, int, int]] = ()
    advance: Sequence[int] = ()
    finish: Sequence[int] = ()


class Search:
    """The state of one prompt's search."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._next_index = 1
        self.beams: dict[int, Beam] = {0: Beam([], 0.0)}
        self.ended: list[BeamSearchSequence] = []
        self.done = False

    def report(self, index: int, sampled: int, alternatives: Mapping[int, float]) -> Moves | None:
        """A beam's next token as sampled, and the log probabilities of the likeliest ones. Moves when it was the last beam."""
        beam = self.beams[index]
        beam.sampled, beam.alternatives = sampled, alternatives
        if any(other.sampled is None for other in self.beams.values()):
            return None
        return self._decide()

    def _decide(self) -> Moves:
        width = self._params.beam_width
        length = len(next(iter(self.beams.values())).tokens) + 1
        chosen: list[Candidate] = []
        for rank, candidate in enumerate(heapq.nlargest((1 + len(self._eos)) * width, self._candidates())):
            if candidate.token_id in self._eos:
                if rank < width:
                    self._end(candidate, "stop")
            elif len(chosen) < width:
                chosen.append(candidate)
        if length == self._max_tokens:
            if not self._is_settled(chosen, length):
                for candidate in chosen:
                    self._end(candidate, "length")
            self.done = True
        else:
            self.done = not chosen or self._is_settled(chosen, length)
        return Moves() if self.done else self._moves(chosen)

    def _candidates(self) -> Iterator[Candidate]:
        for index, beam in self.beams.items():
            for token_id, logprob in beam.alternatives.items():
                yield Candidate(beam.cum_logprob + logprob, index, token_id)

    def _moves(self, chosen: Sequence[Candidate]) -> Moves:
        """The chosen candidates become the live beams: one of each parent's goes on in its place, if it was sampled."""
        forks, advance = [], []
        beams: dict[int, Beam] = {}
        for candidate in chosen:
            parent = self.beams[candidate.parent]
            tokens = [*parent.tokens, candidate.token_id]
            if candidate.token_id == parent.sampled:
                index = candidate.parent
                advance.append(index)
            else:
                index, self._next_index = self._next_index, self._next_index + 1
                forks.append((candidate.parent, index, candidate.token_id))
            beams[index] = Beam(tokens, candidate.cum_logprob)
        gone = [index for index in self.beams if index not in beams]
        self.beams = beams
        return Moves(forks, advance, gone)

    def _end(self, candidate: Candidate, reason: FinishReason) -> None:
        tokens = [*self.beams[candidate.parent].tokens, candidate.token_id]
        score = self._score(candidate.cum_logprob, len(tokens))
        self.ended.append(BeamSearchSequence(tokens, candidate.cum_logprob, score, reason))
        self.ended.sort(key=lambda sequence: -sequence.score)
        del self.ended[self._params.beam_width :]

    def _is_settled(self, chosen: Sequence[Candidate], length: int) -> bool:
        """Whether the finished sequences can't become better."""
        if len(self.ended) < self._params.beam_width:
            return False
        if self._params.early_stopping:
            return True
        longest = self._max_tokens if self._params.length_penalty > 0 else length
        return all(self._score(candidate.cum_logprob, longest) <= self.ended[-1].score for candidate in chosen)

    def _score(self, cum_logprob: float, length: int) -> float:
        return float(cum_logprob / length**self._params.length_penalty)


def beam_search(
    core: EngineCore, requests: Sequence[Request], params: BeamSearchParams, *, max_num_seqs: int
) -> Iterator[tuple[int, list[BeamSearchSequence]]]:
    """Search for each request; (its number, its best sequences without the prompt) as they are done.

    As many requests run at once as have slots for all their beams; beams that have no room in the KV cache together take turns
    there. Raises `UsageError` when one request has too few slots, `EngineError` when the engine fails.
    """
    if params.beam_width > max_num_seqs:
        raise UsageError(f"beam_width {params.beam_width} exceeds max_num_seqs {max_num_seqs}", hint="raise max_num_seqs")
    for request in requests:
        _check_width(request, params, core.info.vocab_size)
    waiting = list(enumerate(requests))[::-1]
    running: dict[str, tuple[int, Search]] = {}
    slots: dict[int, tuple[str, int]] = {}
    most_at_once = max_num_seqs // params.beam_width
    try:
        while waiting or running:
            while waiting and len(running) < most_at_once:
                number, request = waiting.pop()
                core.add(_stepwise(request, params, core.info.vocab_size))
                running[request.request_id] = number, Search(params, request.max_tokens, request.eos_token_ids)
            output = core.step()
            if output is None:
                raise EngineError("beams are waiting, but the scheduler finds none that can run")
            _apply(core, output, slots, running)
            for request_id, (number, search) in list(running.items()):
                if search.done:
                    core.abort(request_id)
                    del running[request_id]
                    yield number, search.ended
    finally:
        for request_id in running:
            core.abort(request_id)


def _num_candidates(request: Request, params: BeamSearchParams) -> int:
    """How many continuations of a beam are looked at: ``beam_width`` are left when all ends of text are among them."""
    return (1 + (0 if params.ignore_eos else len(request.eos_token_ids))) * params.beam_width


def _check_width(request: Request, params: BeamSearchParams, vocab_size: int) -> None:
    """Raises `UsageError` when a beam would have to report more log probabilities than a token may have."""
    wanted = _num_candidates(request, params)
    if min(wanted, vocab_size) > MAX_LOGPROBS:
        most = MAX_LOGPROBS * params.beam_width // wanted
        raise UsageError(
            f"beam_width must be at most {most} for this model, not {params.beam_width}: a beam would report the log "
            f"probabilities of {wanted} tokens, and {MAX_LOGPROBS} are the most"
        )


def _stepwise(request: Request, params: BeamSearchParams, vocab_size: int) -> Request:
    wanted = min(_num_candidates(request, params), vocab_size)
    sampling = SamplingParams(temperature=0, logprobs=wanted, max_tokens=request.max_tokens, ignore_eos=True)
    return msgspec.structs.replace(request, sampling=sampling, stepwise=True)


def _apply(
    core: EngineCore,
    output: StepOutput,
    slots: dict[int, tuple[str, int]],
    running: Mapping[str, tuple[int, Search]],
) -> None:
    """Tell the searches what was said, and the scheduler what they chose."""
    for started in output.started:
        slots[started.slot] = started.request_id, started.index
    for end in output.finished:
        if end.reason == "error":
            raise EngineError(end.message or f"request {end.request_id} failed")
    rows = {} if output.logprobs is None else {row: entry for entry, row in enumerate(output.logprobs.rows.tolist())}
    for row, (slot, tokens) in enumerate(zip(output.slots.tolist(), output.token_ids.tolist(), strict=True)):
        request_id, index = slots[slot]
        if request_id not in running:
            continue
        moves = running[request_id][1].report(index, tokens[0], _alternatives(output.logprobs, rows[row]))
        if moves is not None:
            _move(core, request_id, moves)


def _move(core: EngineCore, request_id: str, moves: Moves) -> None:
    for parent, child, token_id in moves.forks:
        core.fork(request_id, parent, new_index=child, token_id=token_id)
    for index in moves.advance:
        core.advance(request_id, index)
    for index in moves.finish:
        core.finish(request_id, index, reason="stop")


def _alternatives(logprobs: Any, entry: int) -> dict[int, float]:
    pairs = zip(logprobs.token_ids[entry].tolist(), logprobs.logprobs[entry].tolist(), strict=True)
    return {token_id: value for token_id, value in pairs if token_id >= 0}
