"""Choosing tokens: the op ``verify_and_sample`` and its parts. Plain torch, vectorised, for any device, without a host sync.

A row's logits become a token in this order: allowed tokens, logit bias and forbidden tokens, penalties; then greedy rows take
the largest; the others divide by the temperature, filter (min-p, top-k, top-p) and invert the cumulative distribution, in the
order of the vocabulary, at the row's one uniform number. Filters keep every token that ties with the last one kept, so the
outcome depends neither on how a sort breaks ties nor on what else is in the batch.

**Drafts.** Each draft position is sampled as if there were no draft, and drafts are accepted while they equal what was sampled.
For a draft that is a single guess this is exact rejection sampling (Leviathan, Kalman, Matias: "Fast inference from
transformers via speculative decoding", ICML 2023): a guess with probability p is accepted with probability p, and otherwise the
token is distributed as p without it. As the uniform number belongs to the position, speculation changes no token at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FAILED", "PROMPT_BIT", "Penalties", "Sampled", "SamplingBatch", "verify_and_sample"]

FAILED = -2
"""Sampled token of a row whose logits are NaN or infinite, or allow no token."""
PROMPT_BIT = 1 << 30
"""Set in `Penalties.seen` where the token is in the prompt; the bits below count it in the output."""


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Repetition, presence and frequency penalties of the ``p`` logits rows that have any."""

    rows: Tensor  # [p] int64, rows of the logits
    state: Tensor  # [p] int64, rows of ``seen``
    seen: Tensor  # [states, vocab] int32: occurrences in the output, plus `PROMPT_BIT`
    repetition: Tensor  # [p] float32
    presence: Tensor  # [p] float32
    frequency: Tensor  # [p] float32
    earlier: Tensor | None = None  # [p, k] int64: drafts before this position, which count as output; padded with -1


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """How the ``L`` rows of logits become the tokens of ``m`` requests; L = m where there are no drafts.

    ``uniform`` (multiples of 2⁻²⁴) and the parameters beside it are those of the ``s`` rows that are drawn at random;
    ``random`` names them, or is None when they are all rows. Nothing but ``max_top_k`` and ``readable`` is on the host.
    """

    num_random: int  # s
    random: Tensor | None = None  # [s] int64
    uniform: Tensor | None = None  # [s] float32 in [0, 1)
    temperature: Tensor | None = None  # [s] float32, above 0
    top_k: Tensor | None = None  # [s] int64, 0 = off; None when off for all
    top_p: Tensor | None = None  # [s] float32; None when off for all
    min_p: Tensor | None = None  # [s] float32; None when off for all
    max_top_k: int = 0
    bias_rows: Tensor | None = None  # [b] int64: logits[row, token] += value; -inf forbids
    bias_tokens: Tensor | None = None  # [b] int64
    bias_values: Tensor | None = None  # [b] float32
    allowed: Tensor | None = None  # [L, vocab] bool; None = everything
    penalties: Penalties | None = None
    drafts: Tensor | None = None  # [m, k] int32, padded with -1
    draft_rows: Tensor | None = None  # [m, 1 + k] int64: the logits row of each column (any row beyond the drafts)
    readable: bool = False  # the device is the host: looking at a value costs nothing


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """``token_ids`` [m, 1 + k] int32, -1 padded, all `FAILED` where a row failed; with drafts, ``num_accepted`` [m] int32."""

    token_ids: Tensor
    num_accepted: Tensor | None = None


def verify_and_sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Tokens for ``logits`` [L, vocab] float32, which are overwritten."""
    _adjust(logits, batch)
    tokens = _choose(logits, batch)
    if batch.drafts is None or batch.draft_rows is None:
        return Sampled(token_ids=tokens.unsqueeze(1))
    return _verify(tokens[batch.draft_rows], batch.drafts)


def _verify(tokens: Tensor, drafts: Tensor) -> Sampled:
    """Accept drafts [m, k] while they equal ``tokens`` [m, 1 + k]; the token after the last one accepted is kept too."""
    accepted = (tokens[:, :-1] == drafts).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
    columns = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    kept = columns <= accepted.unsqueeze(1)
    # A failed row anywhere among those kept fails the request.
    failed = ((tokens == FAILED) & kept).any(1, keepdim=True)
    tokens = torch.where(kept, tokens, -1)
    return Sampled(token_ids=torch.where(failed, FAILED, tokens), num_accepted=accepted)


def _adjust(logits: Tensor, batch: SamplingBatch) -> None:
    if batch.allowed is not None:
        logits.masked_fill_(~batch.allowed, -torch.inf)
    if batch.bias_rows is not None and batch.bias_tokens is not None and batch.bias_values is not None:
        logits.index_put_((batch.bias_rows, batch.bias_tokens), batch.bias_values, accumulate=True)
    if batch.penalties is not None:
        _penalise(logits, batch.penalties)


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    rows = logits.index_select(0, penalties.rows)
    seen = penalties.seen.index_select(0, penalties.state)
    if penalties.earlier is not None:
        present = (penalties.earlier >= 0).to(seen.dtype)
        seen.scatter_add_(1, penalties.earlier.clamp(min=0), present)
    count = seen & (PROMPT_BIT - 1)
    factor = torch.where(seen > 0, penalties.repetition.unsqueeze(1), 1.0)
    rows = torch.where(rows > 0, rows / factor, rows * factor)
    rows -= penalties.frequency.unsqueeze(1) * count + penalties.presence.unsqueeze(1) * (count > 0)
    logits.index_copy_(0, penalties.rows, rows)


def _choose(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """A token for each row [L] int32; `FAILED` where there is none to choose."""
    if batch.num_random == logits.shape[0] and batch.random is None:
        return _draw(logits, batch)
    best = logits.argmax(-1, keepdim=True)
    # argmax takes a NaN for the largest, so the value found tells of one anywhere in the row.
    finite = logits.gather(1, best).isfinite()
    tokens = torch.where(finite, best, FAILED).squeeze(1).to(torch.int32)
    if batch.random is not None:
        tokens.index_copy_(0, batch.random, _draw(logits.index_select(0, batch.random), batch))
    return tokens


def _draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token for each row [s] int32 by inverting the cumulative distribution at ``batch.uniform``."""
    assert batch.temperature is not None
    assert batch.uniform is not None
    probs = (logits / batch.temperature.unsqueeze(1)).softmax(-1)
    probs = _filter(probs, batch)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # The target is below the total, hence not past every token: the uniform number is at most 1 - 2⁻²⁴, and a float32 times
    # that never rounds back to itself.
    target = batch.uniform.unsqueeze(1) * total
    found = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.shape[1] - 1)
    if not batch.readable:
        # A parallel prefix sum may step back by a rounding error and so let a token of probability 0 be found.
        found = torch.where(probs.gather(1, found) > 0, found, probs.argmax(-1, keepdim=True))
    return torch.where(total > 0, found, FAILED).squeeze(1).to(torch.int32)


def _filter(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """``probs`` [s, vocab] with the tokens that the filters drop at 0."""
    if batch.min_p is not None:
        probs = _at_least(probs, probs.amax(-1, keepdim=True) * batch.min_p.unsqueeze(1))
    if batch.top_k is not None:
        probs = _at_least(probs, _top_k_threshold(probs, batch.top_k, batch.max_top_k))
    if batch.top_p is not None:
        probs = _at_least(probs, _top_p_threshold(probs, batch))
    return probs


def _at_least(probs: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(probs >= threshold, probs, 0.0)


def _top_k_threshold(probs: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """The k-th largest probability of each row [s, 1]; 0 where top-k is off."""
    width = min(max_top_k, probs.shape[1])
    largest = _largest(probs, width)
    kth = largest.gather(1, (top_k.clamp(1, width) - 1).unsqueeze(1))
    return torch.where(top_k.unsqueeze(1) > 0, kth, 0.0)


_NUCLEI = (128, 2048)
"""Widths tried first for top-p where the host can look: a nucleus is rarely larger, and a full sort is 5 to 30 times dearer."""


def _top_p_threshold(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """The smallest probability in the smallest set of most probable tokens that reaches top-p of the total, [s, 1]."""
    assert batch.top_p is not None
    top_p = batch.top_p.unsqueeze(1)
    vocab_size = probs.shape[1]
    wanted = torch.where(top_p < 1, top_p, 0.0) * probs.sum(-1, keepdim=True)
    for width in (*(_NUCLEI if batch.readable else ()), vocab_size):
        largest = _largest(probs, min(width, vocab_size))
        cumulative = largest.cumsum(-1)
        if width >= vocab_size or bool((cumulative[:, -1:] >= wanted).all()):
            break
    size = ((cumulative - largest) < wanted).sum(-1, keepdim=True).clamp(min=1)
    return torch.where(top_p < 1, largest.gather(1, size - 1), 0.0)


def _largest(probs: Tensor, width: int) -> Tensor:
    """The ``width`` largest values of each row, in descending order."""
    if width * 8 > probs.shape[1]:
        return probs.sort(-1, descending=True).values[:, :width]
    return probs.topk(width, dim=-1).values
