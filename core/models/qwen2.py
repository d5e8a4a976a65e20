"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optionally a sliding window in the upper layers."""

from __future__ import annotations

from octavo.core.layers.blocks import DecoderLayer
from octavo.core.layers.build import LayerBuilder
from octavo.core.layers.decoder import DecoderModel

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(DecoderModel):
    """Pre-norm decoder with q/k/v biases. Which layers have the window is in ``spec.layer_kinds``."""

    def build_layer(self, builder: LayerBuilder, index: int, prefix: str) -> DecoderLayer:
        return DecoderLayer(
            attention=builder.attention_block(index, prefix, cos_sin=self.cos_sin, qkv_bias=True),
            mlp=builder.mlp_block(prefix),
        )
