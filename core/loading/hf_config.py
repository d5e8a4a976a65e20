"""`ModelSpec` from a configuration in Hugging Face's key names: a config.json, or what `gguf_config` makes from a GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.api.errors import BrokenModel, PluginError, UnsupportedModel
from octavo.core.api.manifest import DTYPES, ModelManifest
from octavo.core.config.model_spec import ModelSpec
from octavo.core.config.suggest import nearest
from octavo.core.loading.fields import Fields
from octavo.core.loading.files import read_small_file
from octavo.core.loading.rope import rope_specs

__all__ = ["claim_architecture", "model_spec", "read_json"]

_MAX_JSON_BYTES = 4 << 20
_MAX_LAYERS = 4096
_LAYER_KINDS: Mapping[str, str] = {"full_attention": "full_attention", "sliding_attention": "sliding_window"}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a family's files may leave out, because the architecture's published defaults say it."""

    defaults: Mapping[str, Any]
    theta: float = 10000.0
    local_theta: float | None = None


_GENERAL = _Family(defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"})
_GEMMA3 = _Family(
    defaults={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    theta=1_000_000.0,
    local_theta=10_000.0,
)  # fmt: skip
_FAMILIES: Mapping[str, _Family] = {"gemma3": _GEMMA3, "gemma3_text": _GEMMA3}


def read_json(path: Path, *, most_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """A small JSON object. Raises `BrokenModel`, or `UsageError` when the file can't be read."""
    try:
        value = json.loads(read_small_file(path, most_bytes=most_bytes))
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path.name} is not valid JSON: {error}", hint="fetch it again") from None
    if not isinstance(value, dict):
        raise BrokenModel(f"{path.name} must hold a JSON object, not {type(value).__name__}", hint="fetch it again")
    return value


def claim_architecture(
    named: list[str], models: Mapping[str, ModelManifest], *, where: str, attribute: str = "architectures"
) -> tuple[str, ModelManifest]:
    """The first of the ``named`` architectures that a model plugin claims, with that plugin.

    ``attribute`` is the manifest's list to look in: "architectures" or "gguf". Raises `UnsupportedModel`, listing what
    there is, and `PluginError` when several plugins claim the architecture: nothing says which is meant.
    """
    known: dict[str, list[ModelManifest]] = {}
    for model in models.values():
        for name in dict.fromkeys(getattr(model, attribute)):
            known.setdefault(name, []).append(model)
    for name in named:
        if len(known.get(name, ())) > 1:
            raise PluginError(
                f"{where}: architecture {name!r} is claimed by the model plugins {' and '.join(_origins(known[name]))}",
                hint="uninstall all but one",
            )
        if name in known:
            return name, known[name][0]
    wanted = ", ".join(map(repr, named)) or "none"
    raise UnsupportedModel(
        f"{where}: architecture {wanted} isn't supported{nearest(named[0], known) if named else ''}",
        hint=f"supported: {', '.join(sorted(known)) or 'none, as no model plugin is installed'}",
    )


def _origins(models: list[ModelManifest]) -> list[str]:
    """``'llama' (octavo 0.1.0)`` of each."""
    from octavo.core.discovery import installed

    origins = {entry.name: f" ({entry.origin})" for entry in installed().of_kind("model")}
    return [f"{model.name!r}{origins.get(model.name, '')}" for model in models]


def model_spec(raw: Mapping[str, Any], *, where: str, architecture: str, plugin: str) -> ModelSpec:
    """The model that a configuration describes. ``raw`` may nest the text model's keys under ``text_config``.

    Raises `BrokenModel` for values that can't be, `UnsupportedModel` for what Octavo doesn't run.
    """
    raw = _flattened(raw)
    family = _FAMILIES.get(str(raw.get("model_type")), _GENERAL)
    raw = {**family.defaults, **{key: value for key, value in raw.items() if value is not None or key not in family.defaults}}
    config = Fields(raw, where)
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads", most=1 << 16)
    num_kv_heads = config.integer("num_key_value_heads", num_heads, most=1 << 16)
    if num_heads % num_kv_heads:
        config.broken(f"{num_heads} heads can't share {num_kv_heads} key-value heads evenly")
    head_dim = config.integer("head_dim", hidden_size // num_heads, most=1 << 16)
    num_layers = config.integer("num_hidden_layers", most=_MAX_LAYERS)
    rope, rope_local = rope_specs(config, head_dim, theta=family.theta, local_theta=family.local_theta)
    kinds = _layer_kinds(config, num_layers)
    windowed = "sliding_window" in kinds
    return ModelSpec(
        architecture=architecture,
        model_plugin=plugin,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings"),
        norm_eps=config.positive("rms_norm_eps"),
        rope=rope,
        rope_local=rope_local if windowed else None,
        layer_kinds=kinds,
        sliding_window=config.integer("sliding_window") if windowed else None,
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        hidden_act=_activation(config),
        dtype=_dtype(config),
        raw=raw,
    )


def _flattened(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal configuration's text part on top of the keys around it."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return raw
    around = {key: value for key, value in raw.items() if not key.endswith("_config")}
    return {**around, **text, "architectures": raw.get("architectures")}


def _refuse_unsupported(config: Fields) -> None:
    quantisation = config.mapping("quantization_config")
    if quantisation.values:
        raise UnsupportedModel(
            f"{config.where}: weights quantised with {str(quantisation.values.get('quant_method'))[:40]!r} can't be read",
            hint="use the unquantised model, or a GGUF",
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.values.get(key) and config.values.get("model_type") in _FAMILIES:
            raise UnsupportedModel(f"{config.where}: {key!r} isn't supported")


def _layer_kinds(config: Fields, num_layers: int) -> tuple[str, ...]:
    """One kind a layer: from ``layer_types``, else from each family's older keys."""
    listed = config.values.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers:
            config.broken(f"'layer_types' must list {num_layers} layers")
        strange = [kind for kind in listed if not isinstance(kind, str) or kind not in _LAYER_KINDS]
        if strange:
            raise UnsupportedModel(
                f"{config.where}: layers of kind {str(strange[0])[:40]!r} aren't supported",
                hint=f"supported: {', '.join(_LAYER_KINDS)}",
            )
        return tuple(_LAYER_KINDS[kind] for kind in listed)
    full, sliding = "full_attention", "sliding_window"
    model_type = config.values.get("model_type")
    if model_type in _FAMILIES:
        pattern = config.integer("sliding_window_pattern", 6)
        return tuple(full if (layer + 1) % pattern == 0 else sliding for layer in range(num_layers))
    if not config.has("sliding_window"):
        return (full,) * num_layers
    if model_type in ("qwen2", "qwen3"):
        first = config.integer("max_window_layers", 28, least=0) if config.boolean("use_sliding_window", False) else num_layers
        return tuple(sliding if layer >= first else full for layer in range(num_layers))
    return (sliding,) * num_layers if model_type == "mistral" else (full,) * num_layers


def _activation(config: Fields) -> str:
    name = config.text("hidden_activation", config.values.get("hidden_act") or "silu")
    name = {"gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh", "swish": "silu"}.get(name, name)
    if name not in ("silu", "gelu_pytorch_tanh"):
        raise UnsupportedModel(
            f"{config.where}: activation {name[:40]!r} isn't supported", hint="supported: silu, gelu_pytorch_tanh"
        )
    return name


def _dtype(config: Fields) -> str:
    name = config.text("dtype", config.values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPES[:3]:
        raise UnsupportedModel(
            f"{config.where}: dtype {name[:40]!r} isn't supported", hint=f"supported: {', '.join(DTYPES[:3])}"
        )
    return name
