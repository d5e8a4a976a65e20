"""`LayerBuilder`: reads a model's weights one layer at a time and makes layers of them, so memory holds about one copy."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octavo.core.api.errors import BrokenModel, OutOfMemory, UnsupportedModel
from octavo.core.api.models import BuildContext, WeightSource
from octavo.core.api.ops import LinearWeight
from octavo.core.api.platform import Array
from octavo.core.config.model_spec import ModelSpec, RopeSpec
from octavo.core.layers.blocks import AttentionBlock, LmHead, MlpBlock, Norm
from octavo.core.layers.dtypes import torch_dtype
from octavo.core.layers.linear import Linear, shard_columns, shard_rows
from octavo.core.layers.rope import rope_table

__all__ = ["LayerBuilder"]

_ACTIVATIONS: dict[str, Literal["silu_and_mul", "gelu_and_mul"]] = {
    "silu": "silu_and_mul",
    "gelu_pytorch_tanh": "gelu_and_mul",
}


class LayerBuilder:
    """Makes `Norm`, `Linear` and block parameters out of a `WeightSource`, on the platform of a `BuildContext`.

    Every method that reads a weight raises `BrokenModel` when it is missing or has another shape than expected.
    """

    def __init__(self, spec: ModelSpec, weights: WeightSource, build: BuildContext, *, norm_offset: float = 0.0) -> None:
        """``norm_offset`` is added to the weights of every norm (1 where the architecture stores w and means 1 + w)."""
        self.spec = spec
        self.weights = weights
        self.build = build
        self.norm_offset = norm_offset

    def norm(self, name: str, size: int) -> Norm:
        """The RMS norm ``{name}.weight`` [size]."""
        weight = self._vector(f"{name}.weight", size).float() + self.norm_offset
        return Norm(self.build.platform.from_host(weight), self.spec.norm_eps)

    def optional_norm(self, name: str, size: int, present: bool) -> Norm | None:
        return self.norm(name, size) if present else None

    def column_linear(self, *names: str, inputs: int, outputs: tuple[int, ...], bias: bool = False) -> Linear:
        """``names`` stacked into one layer whose outputs the ranks share: each rank has its rows and needs no exchange."""
        weight = shard_rows(self._stack(names, inputs, outputs), self.build.parallel)
        if not bias:
            return self._linear(weight, None)
        biases = [self._vector(f"{name}.bias", size) for name, size in zip(names, outputs, strict=True)]
        rank, size = self.build.parallel.rank, self.build.parallel.size
        return self._linear(weight, torch.cat([part.chunk(size)[rank] for part in biases]))

    def row_linear(self, name: str, *, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """A layer whose inputs the ranks share; their outputs add up to the layer's (the first rank adds the bias)."""
        weight = shard_columns(self._stack((name,), inputs, (outputs,)), self.build.parallel)
        own_bias = bias and self.build.parallel.rank == 0
        return self._linear(weight, self._vector(f"{name}.bias", outputs) if own_bias else None)

    def attention_block(
        self,
        index: int,
        prefix: str,
        *,
        cos_sin: Array | None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        norm: str = "input_layernorm",
        post_norm: str | None = None,
    ) -> AttentionBlock:
        """The attention block of the layer under ``prefix``, in the naming that Llama began."""
        spec, ranks, attn = self.spec, self.build.parallel.size, f"{prefix}.self_attn"
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = self.column_linear(
            f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj",
            inputs=spec.hidden_size, outputs=(q_size, kv_size, kv_size), bias=qkv_bias,
        )  # fmt: skip
        return AttentionBlock(
            layer=index,
            norm=self.norm(f"{prefix}.{norm}", spec.hidden_size),
            qkv=qkv,
            output=self.row_linear(f"{attn}.o_proj", inputs=q_size, outputs=spec.hidden_size, bias=output_bias),
            num_heads=spec.num_heads // ranks,
            num_kv_heads=spec.num_kv_heads // ranks,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim,
            cos_sin=cos_sin,
            q_norm=self.optional_norm(f"{attn}.q_norm", spec.head_dim, qk_norm),
            k_norm=self.optional_norm(f"{attn}.k_norm", spec.head_dim, qk_norm),
            post_norm=None if post_norm is None else self.norm(f"{prefix}.{post_norm}", spec.hidden_size),
        )

    def mlp_block(
        self, prefix: str, *, bias: bool = False, norm: str = "post_attention_layernorm", post_norm: str | None = None
    ) -> MlpBlock:
        """The gated feed-forward block of the layer under ``prefix``."""
        spec, mlp = self.spec, f"{prefix}.mlp"
        inner = spec.intermediate_size
        if spec.hidden_act not in _ACTIVATIONS:
            known = " or ".join(_ACTIVATIONS)
            raise UnsupportedModel(f"activation {spec.hidden_act!r} isn't supported", hint=f"the model needs {known}")
        return MlpBlock(
            norm=self.norm(f"{prefix}.{norm}", spec.hidden_size),
            gate_up=self.column_linear(
                f"{mlp}.gate_proj", f"{mlp}.up_proj", inputs=spec.hidden_size, outputs=(inner, inner), bias=bias
            ),
            down=self.row_linear(f"{mlp}.down_proj", inputs=inner, outputs=spec.hidden_size, bias=bias),
            activation=_ACTIVATIONS[spec.hidden_act],
            post_norm=None if post_norm is None else self.norm(f"{prefix}.{post_norm}", spec.hidden_size),
        )

    def embedding_and_head(
        self, embedding: str, head: str, norm: str, *, soft_cap: float | None = None
    ) -> tuple[Array, LmHead]:
        """The token table [vocab, hidden] and the head; one array for both where they are tied and the head keeps a matrix."""
        spec = self.spec
        name = embedding if spec.tie_word_embeddings else head
        projection = self._linear(self._stack((name,), spec.hidden_size, (spec.vocab_size,)), None)
        table = projection.prepared if spec.tie_word_embeddings else None
        if not self._is_table(table):
            table = self._table(embedding)
        return table, LmHead(norm=self.norm(norm, spec.hidden_size), projection=projection, soft_cap=soft_cap)

    def rope_table(self, rope: RopeSpec) -> Array:
        """[max_model_len, rotary_dim] float32 on the device.

        Raises `OutOfMemory` where it would take more than a quarter of the free memory: a file may claim any context.
        """
        positions = self.build.max_model_len
        needed_bytes, free_bytes = positions * rope.rotary_dim * 4, self.build.platform.memory().free_bytes
        if needed_bytes > free_bytes // 4:
            raise OutOfMemory(
                f"rotary tables of {positions} positions need {needed_bytes / 2**30:.1f} GiB, "
                f"{free_bytes / 2**30:.1f} GiB is free and at most a quarter of it may go there",
                hint="set --max-model-len to what you need",
            )
        return self.build.platform.from_host(rope_table(rope, self.build.max_model_len))

    def _is_table(self, prepared: object) -> bool:
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        dtype = torch_dtype(self.build.dtype)
        return isinstance(prepared, Tensor) and prepared.dtype == dtype and tuple(prepared.shape) == shape

    def _table(self, name: str) -> Array:
        table = self.weights.tensor(f"{name}.weight").to(torch_dtype(self.build.dtype))
        _check_shape(f"{name}.weight", tuple(table.shape), (self.spec.vocab_size, self.spec.hidden_size))
        return self.build.platform.from_host(table)

    def _linear(self, weight: LinearWeight, bias: Tensor | None) -> Linear:
        impl = self.build.ops.linear
        prepared = impl.prepare(weight, self.build.parallel, dtype=self.build.dtype)
        if bias is not None:
            bias = self.build.platform.from_host(bias.to(torch_dtype(self.build.dtype)))
        return Linear(impl, prepared, bias)

    def _stack(self, names: tuple[str, ...], inputs: int, outputs: tuple[int, ...]) -> LinearWeight:
        weights = []
        for name, size in zip(names, outputs, strict=True):
            weight = self.weights.linear(f"{name}.weight")
            _check_shape(f"{name}.weight", weight.shape, (size, inputs))
            weights.append(weight)
        return weights[0] if len(weights) == 1 else LinearWeight.stack(*weights)

    def _vector(self, name: str, size: int) -> Tensor:
        vector = self.weights.tensor(name)
        _check_shape(name, tuple(vector.shape), (size,))
        return vector


def _check_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if got != wanted:
        raise BrokenModel(f"tensor {name} has shape {list(got)}, the model's configuration needs {list(wanted)}")
