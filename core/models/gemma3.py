"""Gemma 3 (text): norms around both blocks, q/k norms, sliding-window layers with a rotary base of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.core.api.attention import AttentionSpec
from octavo.core.api.models import BuildContext, WeightSource
from octavo.core.api.platform import Array
from octavo.core.config.model_spec import ModelSpec
from octavo.core.layers.blocks import DecoderLayer
from octavo.core.layers.build import LayerBuilder
from octavo.core.layers.context import StepContext
from octavo.core.layers.decoder import DecoderModel, attention_specs
from octavo.core.layers.dtypes import torch_dtype

__all__ = ["Gemma3ForCausalLM"]


class Gemma3ForCausalLM(DecoderModel):
    """Norm weights are stored as w and mean 1 + w; the embedding is scaled by √hidden_size."""

    norm_offset = 1.0

    @classmethod
    def attention(cls, spec: ModelSpec, dtype: str, kv_dtype: str) -> Sequence[AttentionSpec]:
        scale = float(spec.raw.get("query_pre_attn_scalar") or spec.head_dim) ** -0.5
        return attention_specs(spec, dtype, kv_dtype, scale=scale, soft_cap=spec.raw.get("attn_logit_softcapping"))

    def __init__(self, spec: ModelSpec, weights: WeightSource, build: BuildContext) -> None:
        self.logit_soft_cap = spec.raw.get("final_logit_softcapping")
        super().__init__(spec, weights, build)

    def prepare(self, builder: LayerBuilder) -> None:
        super().prepare(builder)
        local = self.spec.rope_local
        self.cos_sin_local = self.cos_sin if local is None else builder.rope_table(local)
        # The model was trained with the factor as a number of the activations' dtype: in bfloat16 it differs by up to 0.4 %.
        self.embedding_scale = float(torch.tensor(self.spec.hidden_size**0.5, dtype=torch_dtype(builder.build.dtype)))

    def build_layer(self, builder: LayerBuilder, index: int, prefix: str) -> DecoderLayer:
        sliding = self.spec.layer_kinds[index] == "sliding_window"
        bias = bool(self.spec.raw.get("attention_bias"))
        return DecoderLayer(
            attention=builder.attention_block(
                index,
                prefix,
                cos_sin=self.cos_sin_local if sliding else self.cos_sin,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=True,
                post_norm="post_attention_layernorm",
            ),
            mlp=builder.mlp_block(prefix, norm="pre_feedforward_layernorm", post_norm="post_feedforward_layernorm"),
        )

    def embed(self, token_ids: Array, step: StepContext) -> Array:
        return super().embed(token_ids, step) * self.embedding_scale
