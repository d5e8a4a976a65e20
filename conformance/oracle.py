"""Attention in float64, one query token at a time, written from its definition.

A query's keys are a contiguous range of positions, so the oracle slices each request's own history and needs neither a mask nor
a block table: an error in a kernel's index or mask code has nothing here to agree with. Softmax and soft cap as in their papers
(Vaswani et al. 2017; Gemma 2, 2024), ALiBi as Press et al. 2022, sinks as an extra logit without a value (gpt-oss, 2025).

With ``scale``, ``cap``, ``slope`` and ``sink`` those of the spec and of a head, for a query at position i and a key at j::

    logit(j) = softcap(scale * q·k_j) + slope * (j - i)        softcap(x) = cap * tanh(x / cap)
    p(j)     = exp(logit(j)) / (exp(sink) + Σ exp(logit))      out = Σ p(j) v_j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.api.attention import AttentionSpec, LayerParams

__all__ = ["AttentionInput", "Expected", "Float64Array", "expected_attention", "visible_keys"]

Float64Array: TypeAlias = NDArray[np.float64]
_KINDS = ("full_attention", "sliding_window", "mla", "cross", "draft")


@dataclass(frozen=True, kw_only=True)
class AttentionInput:
    """One request's part of a step, on the host: queries, and every key and value that is in its cache after the step.

    ``k`` and ``v`` hold the values as stored (``kv_dtype``), before ``k_scale`` and ``v_scale``; index = position.
    """

    q: Tensor  # [query_len, num_heads, head_dim]
    k: Tensor  # [seq_len, num_kv_heads, head_dim]
    v: Tensor | None  # [seq_len, num_kv_heads, head_dim_v]; None for MLA, whose values are the first head_dim_v of k
    num_computed_tokens: int  # position of the first query

    @property
    def query_len(self) -> int:
        return self.q.shape[0]

    @property
    def seq_len(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What attention should give, and what the tolerance of `octavo.conformance.tolerance` is made of."""

    out: Float64Array  # [num_tokens, num_heads, head_dim_v]; 0 for a query that sees no key
    lse: Float64Array  # [num_tokens, num_heads]: ln of the softmax denominator, the sink included; -inf where it is 0
    magnitude: Float64Array  # [num_tokens, num_heads, head_dim_v]: A = Σ p|v|
    logit_size: Float64Array  # [num_tokens, num_heads]: S = |scale| * max over keys of Σ|q||k|
    num_keys: NDArray[np.int64]  # [num_tokens]: n, keys that the query sees


def visible_keys(spec: AttentionSpec, position: int, num_keys: int) -> range:
    """Positions of the keys that a query at ``position`` sees, of the ``num_keys`` in its cache.

    A window of W reaches back over positions (i - W, i]; without causality it reaches as far forward.
    """
    first, end = 0, num_keys
    if spec.causal:
        end = min(end, position + 1)
    if spec.window is not None:
        first = max(first, position - spec.window + 1)
        end = min(end, position + spec.window)
    return range(first, max(first, end))


def expected_attention(spec: AttentionSpec, inputs: Sequence[AttentionInput], params: LayerParams) -> Expected:
    """Attention of every query of ``inputs``, concatenated. ``params`` holds host tensors.

    ``q_scale`` doesn't matter: q comes in the spec's dtype, and how a kernel rounds it further is the kernel's error. Raises
    `ValueError` for a layer kind that is not attention over a range of positions.
    """
    if spec.kind not in _KINDS:
        raise ValueError(f"the oracle knows the layer kinds {', '.join(_KINDS)}, not {spec.kind!r}")
    sinks = _host(params.sinks) if spec.sinks else None
    slopes = _host(params.alibi_slopes) if spec.alibi else None
    tokens = [
        _one_query(spec, query, keys, values, position, sinks, slopes)
        for request in inputs
        for query, keys, values, position in _queries(spec, request, params)
    ]
    return Expected(
        out=np.stack([token.out for token in tokens]),
        lse=np.stack([token.lse for token in tokens]),
        magnitude=np.stack([token.magnitude for token in tokens]),
        logit_size=np.stack([token.logit_size for token in tokens]),
        num_keys=np.array([token.num_keys for token in tokens], np.int64),
    )


@dataclass(frozen=True, kw_only=True)
class _Token:
    """`Expected`, for one query."""

    out: Float64Array
    lse: Float64Array
    magnitude: Float64Array
    logit_size: Float64Array
    num_keys: int


def _host(array: Tensor | None) -> Float64Array:
    if array is None:
        raise ValueError("the spec has sinks or alibi, but the layer parameters hold none")
    return np.asarray(array.double().numpy())


def _queries(
    spec: AttentionSpec, request: AttentionInput, params: LayerParams
) -> list[tuple[Float64Array, Float64Array, Float64Array, int]]:
    """For each query: q [num_heads, head_dim], keys and values [seq_len, num_heads, ·] by query head, position."""
    kv_head = [head * spec.num_kv_heads // spec.num_heads for head in range(spec.num_heads)]
    keys = _host(request.k)[:, kv_head] * params.k_scale
    values = keys[:, :, : spec.head_dim_v] if request.v is None else _host(request.v)[:, kv_head] * params.v_scale
    return [(query, keys, values, request.num_computed_tokens + row) for row, query in enumerate(_host(request.q))]


def _one_query(
    spec: AttentionSpec,
    query: Float64Array,
    keys: Float64Array,
    values: Float64Array,
    position: int,
    sinks: Float64Array | None,
    slopes: Float64Array | None,
) -> _Token:
    seen = visible_keys(spec, position, len(keys))
    k, v = keys[seen.start : seen.stop], values[seen.start : seen.stop]
    logits = spec.scale * np.einsum("hd,nhd->hn", query, k)
    sizes = abs(spec.scale) * np.einsum("hd,nhd->hn", np.abs(query), np.abs(k))
    if spec.soft_cap is not None:
        logits = spec.soft_cap * np.tanh(logits / spec.soft_cap)
    if slopes is not None:
        logits = logits + slopes[:, None] * (np.array(seen, np.float64) - position)
    columns = logits if sinks is None else np.concatenate([logits, sinks[:, None]], axis=1)
    if columns.shape[1] == 0:
        nothing = np.zeros((spec.num_heads, spec.head_dim_v))
        no_key = np.zeros(spec.num_heads)
        return _Token(out=nothing, lse=no_key - np.inf, magnitude=nothing, logit_size=no_key, num_keys=0)
    top = columns.max(axis=1)
    denominator = np.exp(columns - top[:, None]).sum(axis=1)
    p = np.exp(logits - top[:, None]) / denominator[:, None]
    return _Token(
        out=np.einsum("hn,nhv->hv", p, v),
        lse=top + np.log(denominator),
        magnitude=np.einsum("hn,nhv->hv", p, np.abs(v)),
        logit_size=sizes.max(axis=1, initial=0.0),
        num_keys=len(seen),
    )
