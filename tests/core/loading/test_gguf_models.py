"""A GGUF opens as the model that it holds: spec, names, conventions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.core.api.errors import BrokenModel, UnsupportedModel
from octavo.core.api.manifest import ModelManifest
from octavo.core.loading import ModelSource, open_model
from octavo.core.loading.dequantise import dequantise_weight

Open = Callable[..., ModelSource]


@pytest.fixture
def opened(tmp_path: Path, make_gguf: Callable[..., Path], models: Mapping[str, ModelManifest]) -> Open:
    """Writes a small GGUF with the given changes and opens it."""

    def make(**options: Any) -> ModelSource:
        return open_model(make_gguf(tmp_path / "model.gguf", **options), models=models)

    return make


def test_the_spec_says_what_the_metadata_says(opened: Open) -> None:
    spec = opened(metadata={"llama.rope.freq_base": 50000.0}).spec
    assert (spec.architecture, spec.model_plugin) == ("LlamaForCausalLM", "llama")
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (32, 32, 64)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 8)
    assert (spec.max_position_embeddings, spec.rope.theta, spec.rope.rotary_dim) == (64, 50000.0, 8)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert spec.layer_kinds == ("full_attention",) * 2
    assert spec.raw["num_attention_heads"] == 4


def test_a_file_without_an_output_matrix_ties_it_to_the_embedding(opened: Open) -> None:
    source = opened()
    weights = source.weights()
    assert source.spec.tie_word_embeddings
    assert torch.equal(weights.tensor("lm_head.weight"), weights.tensor("model.embed_tokens.weight"))


def test_a_file_with_an_output_matrix_keeps_it(opened: Open) -> None:
    head = np.full((32, 32), 3.0, np.float32)
    source = opened(tensors={"output.weight": head})
    assert not source.spec.tie_word_embeddings
    assert (source.weights().tensor("lm_head.weight") == 3).all()


def test_llama_query_and_key_rows_are_put_back_in_order(opened: Open) -> None:
    """A converter writes row (head, half, pair) at (head, pair, half); reading undoes it, heads and key heads apart."""
    rows = {"q": 4, "k": 2}
    published = {part: np.arange(heads * 8 * 32, dtype=np.float32).reshape(heads * 8, 32) for part, heads in rows.items()}
    converted = {
        f"blk.1.attn_{part}.weight": value.reshape(rows[part], 2, 4, 32).swapaxes(1, 2).reshape(-1, 32).copy()
        for part, value in published.items()
    }
    weights = opened(tensors=converted).weights()
    for part, value in published.items():
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        assert np.array_equal(weights.tensor(name).numpy(), value)
        assert np.array_equal(dequantise_weight(weights.linear(name), torch.float32).numpy(), value)


def test_a_quantised_query_matrix_is_reordered_without_being_dequantised(opened: Open) -> None:
    value = np.random.default_rng(1).standard_normal((32, 32)).astype(np.float32)
    interleaved = value.reshape(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
    raw = gguf.quantize(interleaved, gguf.GGMLQuantizationType.Q8_0)
    weight = (
        opened(tensors={"blk.0.attn_q.weight": (raw, gguf.GGMLQuantizationType.Q8_0)})
        .weights()
        .linear("model.layers.0.self_attn.q_proj.weight")
    )
    assert weight.parts[0].format == "Q8_0"
    expected = gguf.dequantize(gguf.quantize(value, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(dequantise_weight(weight, torch.float32).numpy(), expected)


def test_a_llama_query_bias_is_reordered_like_its_rows(opened: Open) -> None:
    bias = np.arange(32, dtype=np.float32)
    source = opened(tensors={"blk.0.attn_q.bias": bias.reshape(4, 2, 4).swapaxes(1, 2).reshape(-1).copy()})
    assert np.array_equal(source.weights().tensor("model.layers.0.self_attn.q_proj.bias").numpy(), bias)


def test_qwen2_rows_stay_as_they_are(opened: Open) -> None:
    value = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    source = opened(arch="qwen2", tensors={"blk.0.attn_q.weight": value})
    assert source.spec.architecture == "Qwen2ForCausalLM"
    assert np.array_equal(source.weights().tensor("model.layers.0.self_attn.q_proj.weight").numpy(), value)


def test_a_linear_weight_is_a_view_of_the_file(opened: Open) -> None:
    weights = opened().weights()
    name = "model.layers.0.mlp.up_proj.weight"
    first, second = weights.linear(name), weights.linear(name)
    assert first.parts[0].data.data_ptr() == second.parts[0].data.data_ptr()


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_narrow_floats_keep_their_dtype(opened: Open, kind: str, dtype: torch.dtype) -> None:
    value = torch.randn(32, 64).to(dtype)
    raw = value.view(torch.uint8).numpy() if kind == "BF16" else value.numpy()
    extra = {"blk.0.ffn_down.weight": (raw, gguf.GGMLQuantizationType[kind])}
    weights = opened(tensors=extra).weights()
    assert torch.equal(weights.tensor("model.layers.0.mlp.down_proj.weight"), value)
    assert weights.linear("model.layers.0.mlp.down_proj.weight").parts[0].format == "dense"


def test_gemma_norms_are_given_as_hugging_face_stores_them(opened: Open) -> None:
    extra = {"gemma3.attention.sliding_window": 16}
    weights = opened(arch="gemma3", metadata=extra).weights()
    assert (weights.tensor("model.layers.0.self_attn.q_norm.weight") == 0.5).all()
    assert (weights.tensor("model.norm.weight") == 0).all()
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm", "post_attention_layernorm"):
        assert f"model.layers.1.{name}.weight" in weights


def test_gemma_windows_five_layers_of_six_and_rotates_them_by_a_base_of_their_own(opened: Open) -> None:
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    spec = opened(arch="gemma3", metadata={"gemma3.attention.sliding_window": 16, **scaling}).spec
    assert spec.layer_kinds == ("sliding_window",) * 2
    assert (spec.sliding_window, spec.rope.theta, spec.rope.scaling, spec.rope.factor) == (16, 1e6, "linear", 8.0)
    assert spec.rope_local is not None
    assert (spec.rope_local.theta, spec.rope_local.scaling) == (10000.0, "none")
    assert (spec.hidden_act, spec.raw["query_pre_attn_scalar"]) == ("gelu_pytorch_tanh", 8)


def test_rope_frequency_factors_come_from_their_tensor(opened: Open) -> None:
    spec = opened(tensors={"rope_freqs.weight": np.array([1, 1, 4, 8], np.float32)}).spec
    assert spec.rope.factors == (1.0, 1.0, 4.0, 8.0)


def test_yarn_scaling_is_read(opened: Open) -> None:
    scaling = {
        "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16, "llama.rope.scaling.attn_factor": 2.0,
    }  # fmt: skip
    rope = opened(metadata=scaling).spec.rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 16)
    assert rope.attention_factor == pytest.approx(2 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "mamba"}, "architecture 'mamba' isn't supported.*gemma3, llama, qwen2, qwen3"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "RoPE scaling 'longrope' isn't supported"),
        ({"metadata": {"llama.expert_count": 8}}, "mixtures of experts"),
        ({"metadata": {"llama.attention.value_length": 4}}, "keys and values of different sizes"),
        ({"metadata": {"split.count": 3}}, "one part of a split GGUF; merge the parts"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer kind 'bert'.*gpt2, llama"),
        ({"metadata": {"tokenizer.ggml.pre": "qwen"}}, "pre-tokenizer 'qwen' isn't known; did you mean 'qwen2'"),
    ],
)
def test_what_is_not_supported_is_named(opened: Open, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        opened(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": ("token_embd.weight",)}, "'token_embd.weight' is missing"),
        ({"without": ("blk.1.attn_k.weight",)}, "'model.layers.1.self_attn.k_proj.weight' is missing"),
        ({"without": ("output_norm.weight",)}, "'model.norm.weight' is missing"),
        ({"without": ("tokenizer.ggml.model",)}, "has no tokenizer"),
        ({"without": ("tokenizer.ggml.tokens",)}, "no list of tokens"),
        ({"without": ("tokenizer.ggml.merges",)}, "no merges"),
        ({"without": ("llama.block_count",)}, "'llama.block_count' is missing"),
        ({"metadata": {"llama.block_count": 3}}, "'model.layers.2.self_attn.q_proj.weight' is missing"),
        ({"metadata": {"llama.block_count": 1}}, "has tensors of layer 1; the configuration says 1 layers"),
        ({"metadata": {"llama.block_count": 2**31}}, "'llama.block_count' is 2147483648"),
        ({"metadata": {"llama.attention.head_count": 0}}, "'llama.attention.head_count' is 0"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "4 heads can't share 3"),
        ({"metadata": {"llama.embedding_length": 40}}, "shape .*the configuration implies"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "must be a finite number"),
        ({"metadata": {"llama.context_length": "long"}}, "must be a whole number, not 'long'"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 32}}, "'tokenizer.ggml.eos_token_id' is 32"),
        ({"metadata": {"tokenizer.ggml.tokens": ["a", "b"]}}, "2 tokens, the embedding 32 rows"),
        ({"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, "must hold 32 numbers"),
        ({"tensors": {"blk.0.ffn_up.weight": np.ones((3, 32), np.float32)}}, r"shape \[3, 32\]; .*\[64, 32\]"),
        ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, "must hold 4 F32 numbers"),
        ({"tensors": {"rope_freqs.weight": np.zeros(4, np.float32)}}, "not positive"),
    ],
)
def test_what_is_broken_is_named_before_any_weight_is_read(opened: Open, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenModel, match=message) as caught:
        opened(**changes)
    assert "\n" not in str(caught.value)


def test_an_unsupported_architecture_is_told_before_a_broken_tokenizer(opened: Open) -> None:
    with pytest.raises(UnsupportedModel, match="architecture 'mamba'"):
        opened(arch="mamba", without=("tokenizer.ggml.model", "token_embd.weight"))


def test_a_tensor_that_is_not_there_is_named(opened: Open) -> None:
    weights = opened().weights()
    assert "model.layers.0.self_attn.q_norm.weight" not in weights
    with pytest.raises(BrokenModel, match=r"q_norm.weight' is missing"):
        weights.tensor("model.layers.0.self_attn.q_norm.weight")
    with pytest.raises(BrokenModel, match="a matrix is expected"):
        weights.linear("model.norm.weight")


def test_opening_imports_no_torch(tmp_path: Path, make_gguf: Callable[..., Path]) -> None:
    import subprocess
    import sys

    path = make_gguf(tmp_path / "model.gguf")
    code = (
        f"import sys; from octavo.core.loading import open_model; open_model({str(path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.model
def test_smollm2_equals_the_gguf_package_tensor_by_tensor(
    catalogue_model: Callable[[str], Path], models: Mapping[str, ModelManifest]
) -> None:
    path = catalogue_model("smollm2")
    source = open_model(path, models=models)
    weights = source.weights()
    reader = gguf.GGUFReader(path)
    named = {tensor.name: tensor for tensor in reader.tensors}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.3.mlp.down_proj.weight": "blk.3.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
    }.items():
        expected = gguf.dequantize(named[theirs].data, named[theirs].tensor_type)
        assert np.array_equal(dequantise_weight(weights.linear(ours), torch.float32).numpy(), expected)
    assert source.generation.eos_token_ids == (2,)


@pytest.mark.model
def test_gemma3_270m_is_read_as_published(catalogue_model: Callable[[str], Path], models: Mapping[str, ModelManifest]) -> None:
    spec = open_model(catalogue_model("gemma3-270m"), models=models).spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (18, 4, 1, 256)
    assert [index for index, kind in enumerate(spec.layer_kinds) if kind == "full_attention"] == [5, 11, 17]
    assert (spec.sliding_window, spec.tie_word_embeddings, spec.raw["query_pre_attn_scalar"]) == (512, True, 256)
