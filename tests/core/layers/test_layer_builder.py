"""Layers out of a weight source: shapes are checked, tied weights are one array, ranks get their share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.backends.cpu.platform import CpuPlatform
from octavo.core.api.errors import BrokenModel, OutOfMemory, UnsupportedModel
from octavo.core.api.models import BuildContext
from octavo.core.api.ops import LinearImpl, LinearWeight, ParallelContext, WeightPart
from octavo.core.config.model_spec import ModelSpec, RopeSpec
from octavo.core.layers.build import LayerBuilder
from octavo.core.layers.ops import Ops

SPEC = ModelSpec(
    architecture="Test", model_plugin="test", vocab_size=11, hidden_size=8, intermediate_size=6, num_layers=1, num_heads=4,
    num_kv_heads=2, head_dim=4, max_position_embeddings=32, norm_eps=1e-5, rope=RopeSpec(rotary_dim=4),
    layer_kinds=("full_attention",), tie_word_embeddings=True,
)  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (11, 8), "head.weight": (11, 8), "norm.weight": (8,), "l.input_layernorm.weight": (8,),
    "l.post_attention_layernorm.weight": (8,), "l.self_attn.q_proj.weight": (16, 8), "l.self_attn.k_proj.weight": (8, 8),
    "l.self_attn.v_proj.weight": (8, 8), "l.self_attn.o_proj.weight": (8, 16), "l.self_attn.q_proj.bias": (16,),
    "l.self_attn.k_proj.bias": (8,), "l.self_attn.v_proj.bias": (8,), "l.self_attn.o_proj.bias": (8,),
    "l.mlp.gate_proj.weight": (6, 8), "l.mlp.up_proj.weight": (6, 8), "l.mlp.down_proj.weight": (8, 6),
}  # fmt: skip


class Weights:
    """Random tensors by name; counts what is asked for."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.tensors = {
            name: torch.randn(shape, generator=torch.Generator().manual_seed(number))
            for number, (name, shape) in enumerate((SHAPES | shapes).items())
        }
        self.asked: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        self.asked.append(name)
        return self.tensors[name]

    def linear(self, name: str) -> LinearWeight:
        data = self.tensor(name)
        return LinearWeight(parts=(WeightPart(format="dense", data=data, shape=(data.shape[0], data.shape[1])),), name=name)


def builder(
    weights: Weights, *, spec: ModelSpec = SPEC, dtype: str = "float32", rank: int = 0, size: int = 1, **options: Any
) -> LayerBuilder:
    platform = CpuPlatform()
    overrides = {"linear": options.pop("linear")} if "linear" in options else {}
    build = BuildContext(
        ops=Ops(overrides, platform=platform), platform=platform, dtype=dtype,
        parallel=ParallelContext(rank=rank, size=size), max_model_len=16,
    )  # fmt: skip
    return LayerBuilder(spec, weights, build, **options)


def test_tied_embeddings_are_one_array() -> None:
    weights = Weights()
    table, head = builder(weights).embedding_and_head("embed", "head", "norm")
    assert table is head.projection.prepared
    assert table.data_ptr() == weights.tensors["embed.weight"].data_ptr()
    assert weights.asked.count("embed.weight") == 1
    assert "head.weight" not in weights.asked


def test_untied_embeddings_are_two() -> None:
    weights = Weights()
    table, head = builder(weights, spec=replace(SPEC, tie_word_embeddings=False)).embedding_and_head("embed", "head", "norm")
    assert torch.equal(table, weights.tensors["embed.weight"])
    assert torch.equal(head.projection.prepared, weights.tensors["head.weight"])


def test_a_head_that_packs_its_weight_leaves_the_table_alone() -> None:
    class Packed(LinearImpl):
        def prepare(self, weight: LinearWeight, parallel: ParallelContext, *, dtype: str) -> bytes:
            return b"packed"

        def apply(self, x: Tensor, prepared: bytes, bias: Tensor | None = None) -> Tensor:
            raise AssertionError("not applied here")

    weights = Weights()
    table, head = builder(weights, linear=Packed(), dtype="bfloat16").embedding_and_head("embed", "head", "norm")
    assert head.projection.prepared == b"packed"
    assert torch.equal(table, weights.tensors["embed.weight"].bfloat16())


def test_norms_are_float32_with_the_offset_added() -> None:
    weights = Weights()
    norm = builder(weights, dtype="bfloat16", norm_offset=1.0).norm("norm", 8)
    assert torch.equal(norm.weight, weights.tensors["norm.weight"] + 1)


def test_q_k_and_v_are_stacked_with_their_biases() -> None:
    weights = Weights()
    block = builder(weights).attention_block(0, "l", cos_sin=None, qkv_bias=True, output_bias=True)
    parts = [weights.tensors[f"l.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(block.qkv.prepared, torch.cat(parts))
    assert torch.equal(block.qkv.bias, torch.cat([weights.tensors[f"l.self_attn.{name}_proj.bias"] for name in "qkv"]))
    assert torch.equal(block.output.bias, weights.tensors["l.self_attn.o_proj.bias"])


def test_two_ranks_halve_heads_and_inner_size() -> None:
    weights = Weights()
    for rank in (0, 1):
        block = builder(weights, rank=rank, size=2).attention_block(0, "l", cos_sin=None, qkv_bias=True, output_bias=True)
        assert (block.num_heads, block.num_kv_heads) == (2, 1)
        q, k = weights.tensors["l.self_attn.q_proj.weight"], weights.tensors["l.self_attn.k_proj.weight"]
        assert torch.equal(block.qkv.prepared[:8], q[8 * rank : 8 * rank + 8])
        assert torch.equal(block.qkv.prepared[8:12], k[4 * rank : 4 * rank + 4])
        assert torch.equal(block.qkv.bias[8:12], weights.tensors["l.self_attn.k_proj.bias"][4 * rank : 4 * rank + 4])
        assert torch.equal(block.output.prepared, weights.tensors["l.self_attn.o_proj.weight"][:, 8 * rank : 8 * rank + 8])
        assert (block.output.bias is None) == (rank == 1)  # outputs are added up: one rank brings the bias


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("l.self_attn.k_proj.weight", (16, 8), r"l.self_attn.k_proj.weight has shape \[16, 8\], .* needs \[8, 8\]"),
        ("l.input_layernorm.weight", (9,), r"l.input_layernorm.weight has shape \[9\], .* needs \[8\]"),
    ],
)
def test_a_weight_of_another_shape_is_a_broken_model(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(BrokenModel, match=message):
        builder(Weights(**{name: shape})).attention_block(0, "l", cos_sin=None)


def test_an_embedding_of_another_shape_is_a_broken_model() -> None:
    untied = replace(SPEC, tie_word_embeddings=False)
    with pytest.raises(BrokenModel, match=r"embed.weight has shape \[12, 8\]"):
        builder(Weights(**{"embed.weight": (12, 8)}), spec=untied).embedding_and_head("embed", "head", "norm")


def test_an_unknown_activation_is_unsupported() -> None:
    with pytest.raises(UnsupportedModel, match="activation 'relu'"):
        builder(Weights(), spec=replace(SPEC, hidden_act="relu")).mlp_block("l")


def test_a_context_too_long_for_the_memory_is_refused_before_its_table_is_made() -> None:
    layers = builder(Weights())
    layers.build = replace(layers.build, max_model_len=2**40)
    with pytest.raises(OutOfMemory, match=r"rotary tables of 1099511627776 positions need 16384\.0 GiB.*--max-model-len"):
        layers.rope_table(SPEC.rope)
