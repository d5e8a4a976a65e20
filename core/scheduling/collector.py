"""`Collector`: what a `StepResult` means for the requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from octavo.core.api.errors import EngineError
from octavo.core.api.scheduling import FinishedRequest, IntArray, StepOutput, StepResult
from octavo.core.scheduling.flight import PlannedStep
from octavo.core.scheduling.results import first_logprobs, select_logprobs, select_prompt_logprobs
from octavo.core.scheduling.roster import Roster
from octavo.core.scheduling.state import RequestState
from octavo.core.scheduling.stops import find_stops, stop_cause


class Collector:
    """Appends sampled tokens, ends what has to end, and commits the blocks that became known."""

    def __init__(self, roster: Roster, end: Callable[[RequestState], None]) -> None:
        self._roster = roster
        self._arrays = roster.arrays
        self._end = end
        self.num_accepted = 0

    def collect(self, step: PlannedStep, result: StepResult) -> StepOutput:
        """Raises `EngineError` when a row lacks its token."""
        chosen = self._producing(step, result.failed)
        slots = step.slots if chosen is None else step.slots[chosen]
        tokens = result.sampled if chosen is None else result.sampled[chosen]
        if len(tokens) and tokens.item(lowest := int(tokens[:, 0].argmin()), 0) < 0:
            raise EngineError(
                f"in step {step.number} the row of slot {slots[lowest]} lacks its token, and isn't among the failed"
            )
        prompt_logprobs = select_prompt_logprobs(result.prompt_logprobs, step.slots, self._roster.states)
        logprobs = select_logprobs(result.logprobs, chosen, len(step.slots))
        if result.num_accepted is None:
            finished = self._append(slots, tokens[:, 0])
        else:
            self.num_accepted += int(result.num_accepted.sum())
            tokens, finished = self._append_several(slots, tokens)
            logprobs = first_logprobs(logprobs, np.count_nonzero(tokens >= 0, axis=1))
        return StepOutput(
            slots=slots,
            token_ids=tokens,
            started=step.started,
            finished=[*finished, *self._fail(step.slots, result.failed)],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _producing(self, step: PlannedStep, failed: Collection[int]) -> IntArray | None:
        """Indices of the rows that give tokens: those sampled that didn't fail and whose completion hasn't ended meanwhile.
        None = all.
        """
        if not self._roster.num_ignored and not failed:
            return None if step.samples is None else np.flatnonzero(step.samples).astype(np.int32)
        alive = ~self._arrays.ignored[step.slots]
        alive[list(failed)] = False
        if step.samples is not None:
            alive &= step.samples
        return np.flatnonzero(alive).astype(np.int32)

    def _append(self, slots: IntArray, tokens: IntArray) -> list[FinishedRequest]:
        """One more token for each of these slots ([n]); the completions that end with it."""
        arrays = self._arrays
        known = arrays.num_known[slots]
        arrays.tokens[slots, known] = tokens
        known = known + 1
        arrays.num_known[slots] = known
        self._roster.commit_known(slots, known)
        stopped = find_stops(arrays, slots, tokens, known)
        if not np.count_nonzero(stopped):
            return []
        return [self._finish(*row) for row in zip(slots[stopped].tolist(), tokens[stopped].tolist(), strict=True)]

    def _append_several(self, slots: IntArray, tokens: IntArray) -> tuple[IntArray, list[FinishedRequest]]:
        """Up to 1 + k tokens for each slot ([n, 1 + k], padded with -1): those kept, and the completions that end.

        Positions of rejected guesses count as not computed again: their slots in the blocks are written anew.
        """
        arrays, kept = self._arrays, np.full_like(tokens, -1)
        finished: list[FinishedRequest] = []
        rows = np.arange(len(slots), dtype=np.int32)
        for column in range(tokens.shape[1]):
            rows = rows[tokens[rows, column] >= 0]
            if not len(rows):
                break
            kept[rows, column] = tokens[rows, column]
            ended = self._append(slots[rows], tokens[rows, column])
            finished += ended
            rows = rows[~np.isin(slots[rows], [f.slot for f in ended])]
        known = arrays.num_known[slots]
        arrays.num_tokens[slots] = known
        arrays.num_computed[slots] = known - 1
        return kept, finished

    def _fail(self, slots: IntArray, failed: Mapping[int, str]) -> list[FinishedRequest]:
        """End the completions whose rows have no token, unless they have ended meanwhile."""
        finished = []
        for slot, why in ((int(slots[row]), why) for row, why in failed.items()):
            if not self._arrays.ignored[slot]:
                state = self._roster.state(slot)
                self._end(state)
                finished.append(
                    FinishedRequest(slot=slot, request_id=state.request_id, index=state.index, reason="error", message=why)
                )
        return finished

    def _finish(self, slot: int, token: int) -> FinishedRequest:
        state = self._roster.state(slot)
        reason, cause = stop_cause(state, token, state.num_tokens)
        self._end(state)
        return FinishedRequest(slot=slot, request_id=state.request_id, index=state.index, reason=reason, stop_reason=cause)
