"""The float32 kernel that an RMS error is compared with: as plain as can be, and no more exact than a good kernel.

Scores, softmax and accumulation in float32, each sum one term after another; weights rounded to the dtype before they meet the
values. It is computed twice, every sum forwards and then backwards: with one dominant key, or logits that happen to round well,
one of these may be nearly exact, and no kernel can be held to that. Deviations that a manifest declares are made here too, so
that the comparison stays fair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.api.attention import AttentionSpec, LayerParams
from octavo.api.manifest import Numerics
from octavo.conformance.dtypes import TORCH_DTYPES
from octavo.conformance.oracle import AttentionInput, visible_keys

__all__ = ["EXACT", "baseline_attentions"]

EXACT = Numerics()
"""No deviation declared."""

_Float32 = NDArray[np.float32]
_APPROXIMATE_TANH_BITS = 11  # relative error 2^-11, as PTX documents for tanh.approx.f32


def baseline_attentions(
    spec: AttentionSpec, inputs: Sequence[AttentionInput], params: LayerParams, numerics: Numerics = EXACT
) -> tuple[Tensor, ...]:
    """What the baseline gives, in either order: [num_tokens, num_heads, head_dim_v] in the spec's dtype."""
    return tuple(torch.cat([_one_request(spec, request, params, numerics, step) for request in inputs]) for step in (1, -1))


def _one_request(spec: AttentionSpec, request: AttentionInput, params: LayerParams, numerics: Numerics, step: int) -> Tensor:
    dtype = TORCH_DTYPES[spec.dtype]
    kv_head = [head * spec.num_kv_heads // spec.num_heads for head in range(spec.num_heads)]
    keys = _float32(request.k)[:, kv_head] * np.float32(params.k_scale)  # [n, h, d]
    values = (
        keys[:, :, : spec.head_dim_v] if request.v is None else _float32(request.v)[:, kv_head] * np.float32(params.v_scale)
    )
    positions = request.num_computed_tokens + np.arange(request.query_len)
    scores = _scores(spec, request.q, keys, numerics, step)  # [t, h, n]
    if spec.alibi and params.alibi_slopes is not None:
        distance = (np.arange(len(keys)) - positions[:, None]).astype(np.float32)
        scores = scores + _float32(params.alibi_slopes)[None, :, None] * distance[:, None, :]
    for row, position in enumerate(positions):
        seen = visible_keys(spec, int(position), len(keys))
        scores[row, :, : seen.start] = -np.inf
        scores[row, :, seen.stop :] = -np.inf
    top = scores.max(axis=2, initial=np.finfo(np.float32).min)  # [t, h]
    sink_weight = np.zeros_like(top)
    if spec.sinks and params.sinks is not None:
        sinks = _float32(params.sinks)[None, :]
        top = np.maximum(top, sinks)
        sink_weight = np.exp(sinks - top)
    weights = np.exp(scores - top[:, :, None])
    return _mix(weights, sink_weight, values, dtype, step)


def _mix(weights: _Float32, sink_weight: _Float32, values: _Float32, dtype: torch.dtype, step: int) -> Tensor:
    """``weights`` [t, h, n] normalised, rounded and applied to ``values`` [n, h, v], key after key."""
    denominator = sink_weight.copy()
    for key in range(len(values))[::step]:
        denominator += weights[:, :, key]
    normalised = weights / np.maximum(denominator, np.finfo(np.float32).tiny)[:, :, None]
    rounded = _float32(torch.from_numpy(normalised).to(dtype))
    out = np.zeros((*denominator.shape, values.shape[2]), np.float32)
    for key in range(len(values))[::step]:
        out += rounded[:, :, key, None] * values[key]
    return torch.from_numpy(out).to(dtype)


def _scores(spec: AttentionSpec, q: Tensor, keys: _Float32, numerics: Numerics, step: int) -> _Float32:
    """[query_len, num_heads, seq_len]: scaled and capped, every key's."""
    queries, scale = _float32(q), np.float32(spec.scale)
    if numerics.q_prescaled:
        queries, scale = _float32((q.float() * spec.scale).to(q.dtype)), np.float32(1)
    scores = np.zeros((len(queries), spec.num_heads, len(keys)), np.float32)
    columns = np.ascontiguousarray(keys.transpose(2, 1, 0))  # [d, h, n]
    for d in range(spec.head_dim)[::step]:
        scores += queries[:, :, d, None] * columns[d]
    scores *= scale
    if spec.soft_cap is None:
        return scores
    cap = np.float32(spec.soft_cap)
    bent = np.tanh(scores / cap)
    if numerics.soft_cap_approximate:
        mantissa, exponent = np.frexp(bent)
        bent = np.ldexp(np.round(np.ldexp(mantissa, _APPROXIMATE_TANH_BITS)), exponent - _APPROXIMATE_TANH_BITS)
    return np.asarray(cap * bent, np.float32)


def _float32(tensor: Tensor) -> _Float32:
    return np.asarray(tensor.float().numpy())
