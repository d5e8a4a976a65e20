"""`share_budget`: how many tokens each running row gets in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.api.scheduling import IntArray


def share_budget(
    wanted: IntArray,
    starts: IntArray,
    *,
    budget: int,
    decode_query_len: int,
    long_prefill_token_threshold: int = 0,
    chunked: bool = True,
    edges: Sequence[int] = (),
) -> IntArray:
    """[n] int32 tokens granted to rows that want ``wanted`` ([n], 0 = nothing) from position ``starts`` ([n]) on.

    Rows of at most ``decode_query_len`` tokens are decodes, and served first, so that no prompt starves them: one token each,
    then what they want besides (guesses). Prompts come after that. Within each of the three, in the order given. ``chunked`` =
    False: a prompt gets everything or nothing. No row crosses a multiple of one of the ``edges``.
    """
    granted = wanted
    prefill = wanted > decode_query_len
    if long_prefill_token_threshold > 0 and chunked:
        granted = np.where(prefill, np.minimum(granted, long_prefill_token_threshold), granted)
    for edge in edges:
        granted = np.minimum(granted, edge - starts % edge)
    if int(granted.sum()) <= budget:
        return granted
    order = np.argsort(prefill, kind="stable")
    ask, num_decodes = granted[order], len(prefill) - int(np.count_nonzero(prefill))
    first = np.minimum(ask[:num_decodes], 1)
    parts = np.concatenate([first, ask[:num_decodes] - first, ask[num_decodes:]])
    before = np.cumsum(parts) - parts
    share = np.clip(budget - before, 0, parts)
    if not chunked:
        share[2 * num_decodes :] = _whole_rows(ask[num_decodes:], budget - int(share[: 2 * num_decodes].sum()))
    granted = np.empty_like(granted)
    granted[order] = np.concatenate([share[:num_decodes] + share[num_decodes : 2 * num_decodes], share[2 * num_decodes :]])
    return granted


def _whole_rows(ask: IntArray, budget: int) -> IntArray:
    share = np.zeros_like(ask)
    for i, tokens in enumerate(ask.tolist()):
        if tokens <= budget:
            share[i] = tokens
            budget -= tokens
    return share
