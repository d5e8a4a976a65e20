"""Stop conditions, for all rows of a step at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.scheduling import FinishReason, IntArray
from octavo.core.scheduling.state import RequestState, SlotArrays


def find_stops(arrays: SlotArrays, slots: IntArray, tokens: IntArray, num_tokens: IntArray) -> NDArray[np.bool_]:
    """[n] bool: rows that end with this token. ``num_tokens`` [n] counts the token in."""
    stopped: NDArray[np.bool_] = num_tokens >= arrays.limit[slots]
    hits = arrays.stop_ids[:, slots] == tokens
    if np.count_nonzero(hits):
        stopped |= hits.any(axis=0) & (num_tokens >= arrays.stops_from[slots])
    if arrays.stop_sets:
        for row in np.flatnonzero(np.isin(slots, list(arrays.stop_sets))).tolist():
            slot = int(slots[row])
            if int(tokens[row]) in arrays.stop_sets[slot] and num_tokens[row] >= arrays.stops_from[slot]:
                stopped[row] = True
    return stopped


def stop_cause(state: RequestState, token: int, num_tokens: int) -> tuple[FinishReason, int | None]:
    """Reason and stop reason of a completion that `find_stops` said ends: the id of a stop token, None for an end-of-sequence
    one.
    """
    allowed = num_tokens >= state.num_prompt_tokens + state.request.sampling.min_tokens
    if not (allowed and token in state.stop_ids):
        return "length", None
    is_eos = token in state.request.eos_token_ids and not state.request.sampling.ignore_eos
    return "stop", None if is_eos else token
