"""From a `StepResult`'s row numbers to those of a `StepOutput`."""

from __future__ import annotations

import numpy as np

from octavo.core.api.scheduling import IntArray, Logprobs
from octavo.core.scheduling.state import RequestState


def select_logprobs(logprobs: Logprobs | None, chosen: IntArray | None, num_rows: int) -> Logprobs | None:
    """Log probabilities of the ``chosen`` rows of a step ([n] indices; None = all), whose ``rows`` then index into
    ``chosen``.
    """
    if logprobs is None or chosen is None:
        return logprobs
    place = np.full(num_rows, -1, np.int32)
    place[chosen] = np.arange(len(chosen), dtype=np.int32)
    return _subset(logprobs, place[logprobs.rows])


def select_prompt_logprobs(logprobs: Logprobs | None, slots: IntArray, states: list[RequestState | None]) -> Logprobs | None:
    """Prompt log probabilities with slots for ``rows``; those of completions that have ended are dropped."""
    if logprobs is None:
        return None
    owner = slots[logprobs.rows]
    wanted = [state is not None and state.wants_prompt_logprobs() for state in (states[slot] for slot in owner.tolist())]
    return _subset(logprobs, np.where(wanted, owner, -1).astype(np.int32))


def _subset(logprobs: Logprobs, rows: IntArray) -> Logprobs | None:
    """The entries whose new row isn't -1."""
    kept = rows >= 0
    if not kept.any():
        return None
    return Logprobs(
        rows=rows[kept], token_ids=logprobs.token_ids[kept], logprobs=logprobs.logprobs[kept], ranks=logprobs.ranks[kept]
    )
