"""The composites' parameter classes and their defaults, which call atoms through ``step.ops``.

Activations travel as ``(x, residual)``: a block's input is ``x + residual`` (``residual`` None at the start of the model), its
output again such a pair, so that the addition can be fused into the next norm. ``n`` is the step's number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.core.api.platform import Array
from octavo.core.layers.context import StepContext
from octavo.core.layers.linear import Linear

__all__ = [
    "AttentionBlock",
    "DecoderLayer",
    "LmHead",
    "MlpBlock",
    "Norm",
    "attention_block",
    "decoder_layer",
    "lm_head",
    "mlp_block",
]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: ``weight`` [d] float32 (already 1 + w where the architecture counts from 1) and epsilon."""

    weight: Array
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Norm, q/k/v projection, optional q and k norms, optional rotary, attention, output projection, optional norm.

    ``qkv`` [n, hidden] → [n, (num_heads + num_kv_heads) * head_dim + num_kv_heads * head_dim_v], q first, then k, then v; for a
    layer that shares another's cache (``shared_kv``) it gives q alone.
    """

    layer: int
    norm: Norm
    qkv: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    cos_sin: Array | None = None  # [max_pos, rotary_dim] float32; None = no rotary embedding
    q_norm: Norm | None = None  # over head_dim, before rotary
    k_norm: Norm | None = None
    post_norm: Norm | None = None  # of the block's output, before it joins the residual
    shared_kv: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpBlock:
    """Norm, gate and up projection as one matrix (gate first), activation, down projection, optional norm."""

    norm: Norm
    gate_up: Linear
    down: Linear
    activation: Literal["silu_and_mul", "gelu_and_mul"] = "silu_and_mul"
    post_norm: Norm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer: attention, then the feed-forward block."""

    attention: AttentionBlock
    mlp: MlpBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class LmHead:
    """Final norm and projection to the vocabulary; ``soft_cap`` turns logits into ``cap * tanh(logits / cap)``."""

    norm: Norm
    projection: Linear
    soft_cap: float | None = None


def attention_block(x: Array, residual: Array | None, params: AttentionBlock, step: StepContext) -> tuple[Array, Array]:
    """Default of the composite ``attention_block``."""
    hidden, residual = _enter(x, residual, params.norm, step)
    q, k, v = _project(hidden, params, step)
    out = q.new_empty((q.shape[0], params.num_heads, params.head_dim_v))
    out = step.attend(params.layer, q, k, v, out)
    x = params.output(out.reshape(out.shape[0], params.num_heads * params.head_dim_v))
    return _leave(x, params.post_norm, step), residual


def _project(hidden: Array, params: AttentionBlock, step: StepContext) -> tuple[Array, Array | None, Array | None]:
    """q [n, num_heads, head_dim], k and v [n, num_kv_heads, …] (None for shared KV), normed and rotated."""
    ops, n = step.ops, hidden.shape[0]
    q_size, k_size = params.num_heads * params.head_dim, params.num_kv_heads * params.head_dim
    qkv = params.qkv(hidden)
    q = qkv[:, :q_size].reshape(n, params.num_heads, params.head_dim)
    k = v = None
    if not params.shared_kv:
        k = qkv[:, q_size : q_size + k_size].reshape(n, params.num_kv_heads, params.head_dim)
        v = qkv[:, q_size + k_size :].reshape(n, params.num_kv_heads, params.head_dim_v)
    if params.q_norm is not None:
        q = ops.rms_norm(q, params.q_norm.weight, params.q_norm.eps)
    if params.k_norm is not None and k is not None:
        k = ops.rms_norm(k, params.k_norm.weight, params.k_norm.eps)
    if params.cos_sin is not None:
        q, k = ops.rotary(step.positions, q, k, params.cos_sin)
    return q, k, v


def mlp_block(x: Array, residual: Array | None, params: MlpBlock, step: StepContext) -> tuple[Array, Array]:
    """Default of the composite ``mlp_block``."""
    hidden, residual = _enter(x, residual, params.norm, step)
    activate = step.ops.silu_and_mul if params.activation == "silu_and_mul" else step.ops.gelu_and_mul
    x = params.down(activate(params.gate_up(hidden)))
    return _leave(x, params.post_norm, step), residual


def decoder_layer(x: Array, residual: Array | None, params: DecoderLayer, step: StepContext) -> tuple[Array, Array]:
    """Default of the composite ``decoder_layer``."""
    x, residual = step.ops.attention_block(x, residual, params.attention, step)
    return step.ops.mlp_block(x, residual, params.mlp, step)


def lm_head(x: Array, residual: Array | None, params: LmHead, rows: Array, step: StepContext) -> Array:
    """Default of the composite ``lm_head``: logits [m, vocab] float32 of the rows given, and of no others."""
    x = step.ops.gather_last(x, rows)
    residual = None if residual is None else step.ops.gather_last(residual, rows)
    hidden, _ = _enter(x, residual, params.norm, step)
    logits = params.projection(hidden).float()
    if params.soft_cap is not None:
        logits = (logits / params.soft_cap).tanh() * params.soft_cap
    return logits


def _enter(x: Array, residual: Array | None, norm: Norm, step: StepContext) -> tuple[Array, Array]:
    if residual is None:
        return step.ops.rms_norm(x, norm.weight, norm.eps), x
    return step.ops.add_rms_norm(x, residual, norm.weight, norm.eps)


def _leave(x: Array, norm: Norm | None, step: StepContext) -> Array:
    return x if norm is None else step.ops.rms_norm(x, norm.weight, norm.eps)
