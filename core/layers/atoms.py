"""Plain-torch defaults of the atoms of `octavo.core.api.ops`, for any device that torch knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from octavo.core.worker.sampler import Sampled, SamplingBatch

__all__ = [
    "add_rms_norm",
    "embedding",
    "gather_last",
    "gelu_and_mul",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "verify_and_sample",
]


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """``token_ids`` [n], ``weight`` [vocab, hidden] → [n, hidden]."""
    return weight.index_select(0, token_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [..., d] over its last axis, computed in float32; ``weight`` [d] float32 (Zhang & Sennrich 2019)."""
    wide = x.float()
    mean_square = wide.square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(positions: Tensor, q: Tensor, k: Tensor | None, cos_sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate the first ``rotary_dim`` channels of ``q`` [n, h, d] and ``k`` [n, hk, d] (Su et al. 2021).

    Channel i turns with channel i + rotary_dim / 2. ``cos_sin`` [max_pos, rotary_dim] float32: cosines, then sines.
    """
    rows = cos_sin.index_select(0, positions).unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    return _rotate(q, cos, sin), None if k is None else _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        turned.append(rest)
    return torch.cat(turned, dim=-1).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """``x`` [n, 2d] → silu of the first half times the second, [n, d] (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """``x`` [n, 2d] → gelu (tanh approximation) of the first half times the second, [n, d]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def gather_last(x: Tensor, rows: Tensor) -> Tensor:
    """``x`` [n, hidden], ``rows`` [m] → [m, hidden]."""
    return x.index_select(0, rows)


def verify_and_sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Verify drafts and sample: see `octavo.core.worker.sampler`."""
    from octavo.core.worker import sampler

    return sampler.verify_and_sample(logits, batch)
