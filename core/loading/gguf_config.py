"""A GGUF's metadata in Hugging Face's key names, so that one function makes the `ModelSpec` of both kinds of file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.core.api.errors import BrokenModel, UnsupportedModel
from octavo.core.api.manifest import ModelManifest
from octavo.core.loading.fields import Fields
from octavo.core.loading.gguf_header import GGUFTensor

__all__ = ["gguf_architecture", "hf_config_of"]

_MODEL_TYPES: Mapping[str, str] = {"gemma3": "gemma3_text"}
_SCALINGS: Mapping[str, str] = {"none": "default", "linear": "linear", "yarn": "yarn"}
_GEMMA3_27B_LAYERS = 62


def gguf_architecture(metadata: Mapping[str, Any], where: str) -> str:
    """``general.architecture``. Raises `BrokenModel`, or `UnsupportedModel` when the file is one part of several."""
    fields = Fields(metadata, where)
    if fields.integer("split.count", 1, least=0) > 1:
        raise UnsupportedModel(f"{where} is one part of a split GGUF", hint="merge the parts into one file first")
    return fields.text("general.architecture")


def hf_config_of(
    metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], manifest: ModelManifest, where: str
) -> dict[str, Any]:
    """The config.json that this GGUF amounts to. Raises `BrokenModel` and `UnsupportedModel`."""
    fields = Fields(metadata, where)
    arch = gguf_architecture(metadata, where)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise BrokenModel(f"{where}: tensor 'token_embd.weight' is missing", hint="the file isn't a whole language model")
    heads = fields.integer(f"{arch}.attention.head_count", most=1 << 16)
    hidden_size = fields.integer(f"{arch}.embedding_length")
    config: dict[str, Any] = {
        "architectures": [manifest.architectures[0] if manifest.architectures else arch],
        "model_type": _MODEL_TYPES.get(arch, arch),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": fields.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(f"{arch}.attention.head_count_kv", heads, most=1 << 16),
        "head_dim": fields.integer(f"{arch}.attention.key_length", max(hidden_size // heads, 1)),
        "max_position_embeddings": fields.integer(f"{arch}.context_length"),
        "rms_norm_eps": fields.positive(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.positive(f"{arch}.rope.freq_base", 1_000_000.0 if arch == "gemma3" else 10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(tensors),
    }
    if fields.integer(f"{arch}.attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModel(f"{where}: keys and values of different sizes aren't supported")
    if fields.has(f"{arch}.rope.dimension_count"):
        config["partial_rotary_factor"] = fields.integer(f"{arch}.rope.dimension_count") / config["head_dim"]
    if fields.has(f"{arch}.expert_count"):
        raise UnsupportedModel(f"{where}: mixtures of experts aren't supported")
    config |= _rope_scaling(fields, arch)
    if arch == "gemma3":
        config |= _gemma3(fields, config)
    return config


def _rope_scaling(fields: Fields, arch: str) -> dict[str, Any]:
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise UnsupportedModel(
            f"{fields.where}: RoPE scaling {kind[:40]!r} isn't supported", hint=f"supported: {', '.join(_SCALINGS)}"
        )
    # Files older than the scaling keys give only a linear factor.
    old = fields.number(f"{arch}.rope.scale_linear", 0.0)
    if kind == "none" and old > 0 and old != 1:
        return {"rope_scaling": {"rope_type": "linear", "factor": old}}
    if kind == "none":
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.positive(f"{arch}.rope.scaling.factor")}
    if kind == "yarn":
        if fields.has(f"{arch}.rope.scaling.original_context_length"):
            key = f"{arch}.rope.scaling.original_context_length"
            scaling["original_max_position_embeddings"] = fields.integer(key)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if fields.has(f"{arch}.rope.scaling.{theirs}"):
                scaling[ours] = fields.positive(f"{arch}.rope.scaling.{theirs}")
        if fields.has(f"{arch}.rope.scaling.attn_factor"):
            # GGUF's factor multiplies the paper's 0.1 ln(factor) + 1; Hugging Face's replaces it.
            paper = 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0
            scaling["attention_factor"] = paper * fields.positive(f"{arch}.rope.scaling.attn_factor")
    return {"rope_scaling": scaling}


def _gemma3(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 3 files leave to the reader: five windowed layers to a full one, and the scale of the 27B model."""
    # All sizes but one divide scores by sqrt(head_dim); the 27B model, told by its depth, by sqrt(hidden / heads).
    deep = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if deep else config["head_dim"]
    extra = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.integer("gemma3.attention.sliding_window"),
        "rope_local_base_freq": fields.positive("gemma3.rope.freq_base_swa", 10_000.0),
    }
    if isinstance(fields.values.get("gemma3.attention.sliding_window_pattern"), int):
        extra["sliding_window_pattern"] = fields.integer("gemma3.attention.sliding_window_pattern")
    return extra


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """The dtype a file calls its own: that of its matrices where they are floats, else bfloat16."""
    kinds = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F16"}:
        return "float16"
    return "float32" if kinds == {"F32"} else "bfloat16"
