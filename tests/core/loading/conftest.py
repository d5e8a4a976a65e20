"""Model files made for tests: GGUF by the `gguf` package's writer, safetensors by the `safetensors` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.api.manifest import ModelManifest

MODELS: Mapping[str, ModelManifest] = {
    "llama": ModelManifest(name="llama", architectures=("LlamaForCausalLM", "MistralForCausalLM"), gguf=("llama",)),
    "qwen2": ModelManifest(name="qwen2", architectures=("Qwen2ForCausalLM",), gguf=("qwen2",)),
    "qwen3": ModelManifest(name="qwen3", architectures=("Qwen3ForCausalLM",), gguf=("qwen3",)),
    "gemma3": ModelManifest(
        name="gemma3", architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), gguf=("gemma3",)
    ),
}
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 64, 4, 2, 8, 2
TOKENS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 61)), "()"]  # 32 tokens
CONTROL, NORMAL, USER_DEFINED, BYTE = 3, 1, 4, 6


@pytest.fixture(scope="session")
def models() -> Mapping[str, ModelManifest]:
    """The architectures that Octavo ships, whatever is installed."""
    return MODELS


def gguf_tensors(arch: str = "llama") -> dict[str, np.ndarray[Any, Any]]:
    """A whole small model, float32, by GGUF name; each element says where it is from."""
    rng = np.random.default_rng(3)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal((rows, columns)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(len(TOKENS), HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        parts = {
            "attn_norm": np.ones(HIDDEN, np.float32),
            "attn_q": matrix(HEADS * HEAD_DIM, HIDDEN),
            "attn_k": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": matrix(HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": np.ones(HIDDEN, np.float32),
            "ffn_gate": matrix(INNER, HIDDEN),
            "ffn_up": matrix(INNER, HIDDEN),
            "ffn_down": matrix(HIDDEN, INNER),
        }
        if arch == "gemma3":
            parts |= {name: np.ones(HIDDEN, np.float32) for name in ("post_attention_norm", "post_ffw_norm")}
            parts |= {name: np.full(HEAD_DIM, 1.5, np.float32) for name in ("attn_q_norm", "attn_k_norm")}
        tensors |= {f"blk.{layer}.{name}.weight": value for name, value in parts.items()}
    return tensors


def gguf_metadata(arch: str = "llama") -> dict[str, Any]:
    """What such a model says of itself, its tokenizer included."""
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.value_length": HEAD_DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["( )"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


class Typed:
    """A metadata value with the writer's method that gives it its type."""

    def __init__(self, method: str, value: Any) -> None:
        self.method = method
        self.value = value


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Writes a GGUF; ``metadata`` adds to or replaces the default one, ``tensors`` too; ``without`` leaves keys or tensors out.

    A tensor may be an array, or (array, gguf quantisation type) for raw or quantised data.
    """
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**gguf_metadata(arch), **(metadata or {})}.items():
        if key not in without:
            _add_value(writer, key, value)
    for name, value in {**gguf_tensors(arch), **(tensors or {})}.items():
        if name not in without:
            data, kind = value if isinstance(value, tuple) else (value, None)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, Typed):
        getattr(writer, value.method)(key, value.value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture(scope="session")
def make_gguf() -> Callable[..., Path]:
    """`write_gguf`: a small, whole model in one file."""
    return write_gguf


@pytest.fixture(scope="session")
def typed() -> type[Typed]:
    return Typed


def hf_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a small Llama; None takes a key out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def hf_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """The small model's tensors by Hugging Face name."""
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    tensors = {}
    for name, value in gguf_tensors().items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            tensors[f"model.layers.{layer}.{names[part]}.weight"] = value
    plain = gguf_tensors()
    tensors["model.embed_tokens.weight"] = plain["token_embd.weight"]
    tensors["model.norm.weight"] = plain["output_norm.weight"]
    return tensors


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    files: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Writes a model folder; ``files`` are further ones (text as it is, anything else as JSON)."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer
    from tokenizers import models as tokenizer_models

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config() if config is None else dict(config)))
    save_file(dict(hf_tensors() if tensors is None else tensors), folder / "model.safetensors")
    if tokenizer:
        vocab = {token: index for index, token in enumerate(TOKENS)}
        Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    for name, content in (files or {}).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def make_folder() -> Callable[..., Path]:
    """`write_folder`: the same small model as a Hugging Face folder."""
    return write_folder


@pytest.fixture(scope="session")
def make_config() -> Callable[..., dict[str, Any]]:
    return hf_config


@pytest.fixture(scope="session")
def folder_tensors() -> Callable[[], dict[str, np.ndarray[Any, Any]]]:
    return hf_tensors


@pytest.fixture(scope="session")
def catalogue_model() -> Callable[[str], Path]:
    """The file of a pulled model; skips where it isn't there."""
    from octavo.core.loading.catalogue import find

    def file(name: str) -> Path:
        entry = find(name)
        if not entry.path.exists():
            pytest.skip(f"{entry.path} is not there: octavo models pull {entry.pull_arguments}")
        return entry.path

    return file
