"""`PendingStep`: a step that is launched; its result may still be on its way from the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.scheduling import IntArray, Logprobs, StepResult
from octavo.core.worker.input_batch import Advanced, StepLayout
from octavo.core.worker.logprobs import to_message
from octavo.core.worker.sampling_op import FAILED
from octavo.core.worker.transfers import Download

__all__ = ["LogprobRequest", "PendingStep"]

_WHY_FAILED = "the logits are NaN or infinite, or no token is allowed; check the weights, the dtype and the token masks"


@dataclass(frozen=True, kw_only=True)
class LogprobRequest:
    """Rows of the step [q] whose log probabilities are in the download, and the alternatives wanted of each [q]."""

    rows: IntArray
    wanted: IntArray
    owners: IntArray | None = None  # [q] index into the sampled rows; None for prompt tokens
    columns: IntArray | None = None  # [q] which of the row's sampled tokens it is

    def flat(self, width: int) -> NDArray[np.int64]:
        """Where each token [q] lies in the sampled tokens [m, width], flattened."""
        assert self.owners is not None
        assert self.columns is not None
        return self.owners.astype(np.int64) * width + self.columns

    def message(self, arrays: Sequence[NDArray[np.int32]], tokens: IntArray | None) -> Logprobs | None:
        """From the token ids, log probabilities and ranks downloaded; without tokens [m, 1 + k] that came to nothing."""
        token_ids, logprobs, ranks = arrays
        kept = np.ones(len(self.rows), np.bool_)
        if tokens is not None and self.owners is not None:
            kept = tokens[self.owners, self.columns] >= 0
        if not kept.any():
            return None
        return to_message(self.rows[kept], self.wanted[kept], token_ids[kept], logprobs[kept].view(np.float32), ranks[kept])


class PendingStep:
    """The outcome of one launched step. `result` waits for the device and may be called from any thread, more than once.

    The download holds, in this order and as far as the step has them: sampled tokens, accepted drafts, three arrays of log
    probabilities, three of prompt log probabilities.
    """

    def __init__(
        self,
        layout: StepLayout,
        advanced: Advanced,
        download: Download | None,
        *,
        logprobs: LogprobRequest | None = None,
        prompt_logprobs: LogprobRequest | None = None,
        early: Sequence[Sequence[NDArray[np.int32]]] = (),
    ) -> None:
        """``early``: the first prompt log probabilities, three arrays each time, where the device couldn't hold them all."""
        self.advanced = advanced
        self._layout = layout
        self._download = download
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._early = early
        self._lock = threading.Lock()
        self._result: StepResult | None = None

    @property
    def done(self) -> bool:
        """Whether `result` gives an answer at once."""
        return self._result is not None

    @property
    def has_drafts(self) -> bool:
        return self._layout.draft_counts is not None

    def result(self) -> StepResult:
        """The step's result, as soon as it is on the host."""
        with self._lock:
            if self._result is None:
                self._result = self._read()
                self._download, self._early = None, ()
            return self._result

    def sampled(self) -> tuple[IntArray, IntArray | None]:
        """Tokens [m, 1 + k] and accepted drafts [m] of the rows that were sampled."""
        result, rows = self.result(), self._layout.sampled
        return result.sampled[rows], None if result.num_accepted is None else result.num_accepted[rows]

    def _read(self) -> StepResult:
        layout, rows = self._layout, self._layout.sampled
        arrays = self._download.wait() if self._download is not None else []
        tokens: IntArray | None = None
        sampled = np.full((layout.num_reqs, 1), -1, np.int32)
        accepted = None if layout.draft_counts is None else np.zeros(layout.num_reqs, np.int32)
        failed: dict[int, str] = {}
        if len(rows):
            tokens, *arrays = arrays
            failed = {int(row): _WHY_FAILED for row in rows[tokens[:, 0] == FAILED]}
            sampled = np.full((layout.num_reqs, tokens.shape[1]), -1, np.int32)
            sampled[rows] = np.maximum(tokens, -1)
            if accepted is not None:
                accepted[rows], *arrays = arrays
                accepted[list(failed)] = 0
        logprobs = prompt_logprobs = None
        if self._logprobs is not None:
            logprobs, arrays = self._logprobs.message(arrays[:3], tokens), arrays[3:]
        if self._prompt_logprobs is not None:
            columns = zip(*self._early, arrays, strict=True)
            prompt_logprobs = self._prompt_logprobs.message([np.concatenate(column) for column in columns], None)
        return StepResult(
            step=layout.step,
            sampled=sampled,
            num_accepted=accepted,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
        )
