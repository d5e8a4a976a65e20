"""Qwen3 (dense): Llama with RMS norms on each head's q and k, before the rotary embedding."""

from __future__ import annotations

from octavo.core.layers.blocks import DecoderLayer
from octavo.core.layers.build import LayerBuilder
from octavo.core.layers.decoder import DecoderModel

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(DecoderModel):
    """Pre-norm decoder with q and k norms; biases only where the configuration asks for them."""

    def build_layer(self, builder: LayerBuilder, index: int, prefix: str) -> DecoderLayer:
        bias = bool(self.spec.raw.get("attention_bias"))
        return DecoderLayer(
            attention=builder.attention_block(
                index, prefix, cos_sin=self.cos_sin, qkv_bias=bias, output_bias=bias, qk_norm=True
            ),
            mlp=builder.mlp_block(prefix),
        )
