"""`GatedStatesForCausalLM`: layers of gated linear attention, of full attention, or both; no position embedding.

``mixers`` in its configuration says which a layer is. A recurrent layer gives its gates, one a token and head, as one more
column of ``k``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.api.attention import AttentionSpec
from octavo.api.layers import LayerBuilder, Linear, Norm, StepContext
from octavo.api.models import BuildContext, CausalLM, ModelSpec, WeightSource
from octavo.api.platform import Array

__all__ = ["GatedStatesForCausalLM"]


@dataclass(frozen=True)
class Layer:
    norm: Norm
    qkv: Linear
    gate: Linear | None  # recurrent layers only
    output: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class GatedStatesForCausalLM(CausalLM):
    @classmethod
    def attention(cls, spec: ModelSpec, dtype: str, kv_dtype: str) -> Sequence[AttentionSpec]:
        return [
            AttentionSpec(
                kind=kind,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_heads,
                head_dim=spec.head_dim,
                head_dim_v=spec.head_dim,
                scale=spec.head_dim**-0.5,
                dtype=dtype,
                kv_dtype=kv_dtype,
            )
            for kind in spec.raw["mixers"]
        ]

    def __init__(self, spec: ModelSpec, weights: WeightSource, build: BuildContext) -> None:
        self.spec = spec
        builder = LayerBuilder(spec, weights, build)
        self.layers = [_layer(builder, index, kind) for index, kind in enumerate(spec.raw["mixers"])]
        self.table, self.head = builder.embedding_and_head("model.embed_tokens", "lm_head", "model.norm")

    def forward(self, token_ids: Array, step: StepContext) -> tuple[Array, Array]:
        ops = step.ops
        x, residual = ops.embedding(token_ids, self.table), None
        for index, layer in enumerate(self.layers):
            if residual is None:
                hidden, residual = ops.rms_norm(x, layer.norm.weight, layer.norm.eps), x
            else:
                hidden, residual = ops.add_rms_norm(x, residual, layer.norm.weight, layer.norm.eps)
            x = self._mix(index, layer, hidden, step)
            hidden, residual = ops.add_rms_norm(x, residual, layer.mlp_norm.weight, layer.mlp_norm.eps)
            x = layer.down(torch.tanh(layer.up(hidden)))
        return x, residual

    def logits(self, x: Array, residual: Array, rows: Array, step: StepContext) -> Array:
        return step.ops.lm_head(x, residual, self.head, rows, step)

    def _mix(self, index: int, layer: Layer, hidden: Tensor, step: StepContext) -> Tensor:
        q, k, v = layer.qkv(hidden).view(len(hidden), 3, self.spec.num_heads, self.spec.head_dim).unbind(1)
        if layer.gate is not None:
            k = torch.cat([k, torch.sigmoid(layer.gate(hidden)).unsqueeze(-1)], dim=-1)
        out = step.attend(index, q, k, v, q.new_empty(q.shape))
        output: Tensor = layer.output(out.flatten(1))
        return output


def _layer(builder: LayerBuilder, index: int, kind: str) -> Layer:
    spec, prefix = builder.spec, f"model.layers.{index}"
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    qkv = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
    recurrent = kind == "recurrent"
    gate = f"{prefix}.gate_proj"
    return Layer(
        norm=builder.norm(f"{prefix}.norm", hidden),
        qkv=builder.column_linear(*qkv, inputs=hidden, outputs=(heads, heads, heads)),
        gate=builder.column_linear(gate, inputs=hidden, outputs=(spec.num_heads,), bias=True) if recurrent else None,
        output=builder.row_linear(f"{prefix}.output_proj", inputs=heads, outputs=hidden),
        mlp_norm=builder.norm(f"{prefix}.mlp_norm", hidden),
        up=builder.column_linear(f"{prefix}.up_proj", inputs=hidden, outputs=(inner,)),
        down=builder.row_linear(f"{prefix}.down_proj", inputs=inner, outputs=hidden),
    )
