"""Three ops plugins. Each counts its calls, so that a test can tell which one ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from octavo.api.errors import Unsupported
from octavo.api.layers import MlpBlock, StepContext
from octavo.api.ops import LinearImpl, LinearWeight, ParallelContext
from octavo.api.platform import Platform

__all__ = ["CALLS", "linear", "mlp", "norm"]

CALLS: Counter[str] = Counter()


def norm(platform: Platform) -> Mapping[str, Callable[..., object]]:
    """The atoms of normalisation, in float32 throughout."""
    return {"rms_norm": _rms_norm, "add_rms_norm": _add_rms_norm}


def mlp(platform: Platform) -> Mapping[str, Callable[..., object]]:
    """The feed-forward block in one piece."""
    return {"mlp_block": _mlp_block}


def linear(platform: Platform) -> Mapping[str, LinearImpl]:
    """Weights kept the other way round."""
    return {"linear": TransposedLinear(platform)}


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    CALLS["rms_norm"] += 1
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    CALLS["add_rms_norm"] += 1
    total = x + residual
    return _rms_norm(total, weight, eps), total


def _mlp_block(x: Tensor, residual: Tensor | None, params: MlpBlock, step: StepContext) -> tuple[Tensor, Tensor]:
    CALLS["mlp_block"] += 1
    if params.post_norm is not None or params.activation != "silu_and_mul":
        raise Unsupported("this block is fused for SiLU without a norm behind it")
    total = x if residual is None else x + residual
    scale = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + params.norm.eps)
    hidden = (total.float() * scale * params.norm.weight).to(x.dtype)
    gate, up = params.gate_up(hidden).chunk(2, dim=-1)
    return params.down(functional.silu(gate) * up), total


class TransposedLinear(LinearImpl):
    """[in, out] matrices; dense weights only."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def prepare(self, weight: LinearWeight, parallel: ParallelContext, *, dtype: str) -> Tensor:
        CALLS["prepare"] += 1
        strange = [part.format for part in weight.parts if part.format != "dense"]
        if strange:
            raise Unsupported(f"{weight.name} is {strange[0]}", hint="--op linear=default reads it")
        rows = torch.cat([part.data.float() for part in weight.parts])
        matrix: Tensor = self._platform.from_host(rows.t().contiguous())
        return matrix

    def apply(self, x: Tensor, prepared: Tensor, bias: Tensor | None = None) -> Tensor:
        CALLS["apply"] += 1
        product = x @ prepared
        return product if bias is None else product + bias
