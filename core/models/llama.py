"""Llama and the models built like it: SmolLM2, TinyLlama, Mistral (with its sliding window)."""

from __future__ import annotations

from octavo.core.layers.blocks import DecoderLayer
from octavo.core.layers.build import LayerBuilder
from octavo.core.layers.decoder import DecoderModel

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(DecoderModel):
    """Pre-norm decoder with grouped-query attention, rotary embedding and a gated SiLU feed-forward block."""

    def build_layer(self, builder: LayerBuilder, index: int, prefix: str) -> DecoderLayer:
        attention_bias = bool(self.spec.raw.get("attention_bias"))
        return DecoderLayer(
            attention=builder.attention_block(
                index, prefix, cos_sin=self.cos_sin, qkv_bias=attention_bias, output_bias=attention_bias
            ),
            mlp=builder.mlp_block(prefix, bias=bool(self.spec.raw.get("mlp_bias"))),
        )
