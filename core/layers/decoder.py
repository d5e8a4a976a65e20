"""`DecoderModel`: what the decoder-only architectures share. A model says how each of its layers is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from octavo.core.api.attention import AttentionSpec
from octavo.core.api.models import BuildContext, CausalLM, WeightSource
from octavo.core.api.platform import Array
from octavo.core.config.model_spec import ModelSpec
from octavo.core.layers.blocks import DecoderLayer
from octavo.core.layers.build import LayerBuilder
from octavo.core.layers.context import StepContext

__all__ = ["DecoderModel", "attention_specs"]


class DecoderModel(CausalLM):
    """Token table, layers of attention and feed-forward, final norm and head."""

    norm_offset: float = 0.0
    logit_soft_cap: float | None = None

    @classmethod
    def attention(cls, spec: ModelSpec, dtype: str, kv_dtype: str) -> Sequence[AttentionSpec]:
        return attention_specs(spec, dtype, kv_dtype)

    def __init__(self, spec: ModelSpec, weights: WeightSource, build: BuildContext) -> None:
        self.spec = spec
        builder = LayerBuilder(spec, weights, build, norm_offset=self.norm_offset)
        self.prepare(builder)
        self.layers = [self.build_layer(builder, index, f"model.layers.{index}") for index in range(spec.num_layers)]
        self.table, self.head = builder.embedding_and_head(
            "model.embed_tokens", "lm_head", "model.norm", soft_cap=self.logit_soft_cap
        )

    def prepare(self, builder: LayerBuilder) -> None:
        """Make what the layers share. Default: one rotary table, ``self.cos_sin`` [max_model_len, rotary_dim]."""
        self.cos_sin = builder.rope_table(self.spec.rope)

    @abstractmethod
    def build_layer(self, builder: LayerBuilder, index: int, prefix: str) -> DecoderLayer:
        """Layer ``index``, whose weights are named under ``prefix``."""

    def embed(self, token_ids: Array, step: StepContext) -> Array:
        """[num_tokens] → [num_tokens, hidden_size]."""
        return step.ops.embedding(token_ids, self.table)

    def forward(self, token_ids: Array, step: StepContext) -> tuple[Array, Array]:
        x, residual = self.embed(token_ids, step), None
        for layer in self.layers:
            x, residual = step.ops.decoder_layer(x, residual, layer, step)
        return x, residual

    def logits(self, x: Array, residual: Array, rows: Array, step: StepContext) -> Array:
        return step.ops.lm_head(x, residual, self.head, rows, step)


def attention_specs(
    spec: ModelSpec, dtype: str, kv_dtype: str, *, scale: float | None = None, soft_cap: float | None = None
) -> list[AttentionSpec]:
    """An `AttentionSpec` for each layer, after ``spec.layer_kinds``; ``scale`` defaults to 1 / √head_dim."""

    def layer(kind: str) -> AttentionSpec:
        sliding = kind == "sliding_window" and spec.sliding_window is not None
        return AttentionSpec(
            kind="sliding_window" if sliding else "full_attention",
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim,
            scale=spec.head_dim**-0.5 if scale is None else scale,
            dtype=dtype,
            kv_dtype=kv_dtype,
            window=spec.sliding_window if sliding else None,
            soft_cap=soft_cap,
        )

    return [layer(kind) for kind in spec.layer_kinds]
