"""`TinyTestForCausalLM`: attention and feed-forward side by side on one norm, and no position embedding.

With ``attention_chunk_size`` in its configuration, its layers are of kind ``chunked_local``: a query sees the keys of its own
chunk, up to itself. The spec's ``window`` is the chunk's length then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.api.attention import AttentionSpec
from octavo.api.layers import LayerBuilder, Linear, Norm, StepContext
from octavo.api.models import BuildContext, CausalLM, ModelSpec, WeightSource
from octavo.api.platform import Array

__all__ = ["TinyTestForCausalLM"]


@dataclass(frozen=True)
class Layer:
    index: int
    norm: Norm
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear


class TinyTestForCausalLM(CausalLM):
    @classmethod
    def attention(cls, spec: ModelSpec, dtype: str, kv_dtype: str) -> Sequence[AttentionSpec]:
        chunk = spec.raw.get("attention_chunk_size")
        one = AttentionSpec(
            kind="full_attention" if chunk is None else "chunked_local",
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim,
            scale=spec.head_dim**-0.5,
            dtype=dtype,
            kv_dtype=kv_dtype,
            window=chunk,
        )
        return [one] * spec.num_layers

    def __init__(self, spec: ModelSpec, weights: WeightSource, build: BuildContext) -> None:
        self.spec = spec
        builder = LayerBuilder(spec, weights, build)
        self.layers = [self._layer(builder, index) for index in range(spec.num_layers)]
        self.table, self.head = builder.embedding_and_head("model.embed_tokens", "lm_head", "model.norm")

    def forward(self, token_ids: Array, step: StepContext) -> tuple[Array, Array]:
        x, residual = step.ops.embedding(token_ids, self.table), None
        for layer in self.layers:
            if residual is None:
                hidden, residual = step.ops.rms_norm(x, layer.norm.weight, layer.norm.eps), x
            else:
                hidden, residual = step.ops.add_rms_norm(x, residual, layer.norm.weight, layer.norm.eps)
            x = self._attention(layer, hidden, step) + layer.down(step.ops.silu_and_mul(layer.gate_up(hidden)))
        return x, residual

    def logits(self, x: Array, residual: Array, rows: Array, step: StepContext) -> Array:
        return step.ops.lm_head(x, residual, self.head, rows, step)

    def _attention(self, layer: Layer, hidden: Tensor, step: StepContext) -> Tensor:
        spec, count = self.spec, len(hidden)
        sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
        q, k, v = (part.reshape(count, -1, spec.head_dim) for part in layer.qkv(hidden).split(sizes, dim=-1))
        out = step.attend(layer.index, q, k, v, q.new_empty(q.shape))
        output: Tensor = layer.output(out.flatten(1))
        return output

    def _layer(self, builder: LayerBuilder, index: int) -> Layer:
        spec, prefix = self.spec, f"model.layers.{index}"
        hidden, inner, attn = spec.hidden_size, spec.intermediate_size, f"{prefix}.self_attn"
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        names = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
        return Layer(
            index=index,
            norm=builder.norm(f"{prefix}.input_layernorm", hidden),
            qkv=builder.column_linear(*names, inputs=hidden, outputs=(q_size, kv_size, kv_size)),
            output=builder.row_linear(f"{attn}.o_proj", inputs=q_size, outputs=hidden),
            gate_up=builder.column_linear(
                f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", inputs=hidden, outputs=(inner, inner)
            ),
            down=builder.row_linear(f"{prefix}.mlp.down_proj", inputs=inner, outputs=hidden),
        )
