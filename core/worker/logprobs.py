"""Log probabilities: of the model's own logits, before penalties, temperature and filters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.api.scheduling import IntArray, Logprobs

__all__ = ["TokenLogprobs", "to_message", "token_logprobs"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """``[q, 1 + k]``: the token itself, then the ``k`` most probable; ``ranks`` [q] of the token, from 1."""

    token_ids: Tensor  # int32
    logprobs: Tensor  # float32
    ranks: Tensor  # int32


def token_logprobs(logprobs: Tensor, tokens: Tensor, num_alternatives: int) -> TokenLogprobs:
    """Of ``logprobs`` [q, vocab] float32, what is asked of ``tokens`` [q] (negative ones give an undefined row)."""
    chosen = tokens.clamp(min=0).to(torch.int64).unsqueeze(1)
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(-1, dtype=torch.int32) + 1
    if num_alternatives == 0:
        return TokenLogprobs(token_ids=tokens.to(torch.int32).unsqueeze(1), logprobs=own, ranks=ranks)
    best = logprobs.topk(num_alternatives, dim=-1)
    return TokenLogprobs(
        token_ids=torch.cat([chosen, best.indices], dim=1).to(torch.int32),
        logprobs=torch.cat([own, best.values], dim=1),
        ranks=ranks,
    )


def to_message(
    rows: IntArray, wanted: IntArray, token_ids: IntArray, logprobs: NDArray[np.float32], ranks: IntArray
) -> Logprobs:
    """The arrays as a message: ``rows`` [q] of the step, ``wanted`` [q] alternatives each; what nobody asked for is padded."""
    unwanted = np.arange(token_ids.shape[1]) > wanted[:, None]
    return Logprobs(
        rows=rows.astype(np.int32),
        token_ids=np.where(unwanted, -1, token_ids).astype(np.int32),
        logprobs=np.where(unwanted, -np.inf, logprobs).astype(np.float32),
        ranks=ranks.astype(np.int32),
    )
