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


def first_logprobs(logprobs: Logprobs | None, counts: IntArray) -> Logprobs | None:
    """The first ``counts[row]`` entries of each row: the tokens that were kept."""
    if logprobs is None:
        return None
    order = np.argsort(logprobs.rows, kind="stable")
    rows = logprobs.rows[order]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)  # of the entry within its row
    kept = np.zeros(len(rows), np.bool_)
    kept[order] = place < counts[rows]
    return _subset(logprobs, np.where(kept, logprobs.rows, -1).astype(np.int32))


def select_prompt_logprobs(logprobs: Logprobs | None, slots: IntArray, states: list[RequestState | None]) -> Logprobs | None:
    """Prompt log probabilities with slots for ``rows``; without those of completions that have ended, and those that were given
    before a preemption.
    """
    if logprobs is None:
        return None
    owner = slots[logprobs.rows]
    wanted = []
    for slot in owner.tolist():
        state = states[slot]
        wanted.append(state is not None and state.take_prompt_logprob())
    return _subset(logprobs, np.where(wanted, owner, -1).astype(np.int32))


def _subset(logprobs: Logprobs, rows: IntArray) -> Logprobs | None:
    """The entries whose new row isn't -1."""
    kept = rows >= 0
    if not kept.any():
        return None
    return Logprobs(
        rows=rows[kept], token_ids=logprobs.token_ids[kept], logprobs=logprobs.logprobs[kept], ranks=logprobs.ranks[kept]
    )
