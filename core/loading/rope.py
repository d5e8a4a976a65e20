"""`RopeSpec` from a configuration, spelled as in transformers 4 (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).

Source of the scaling rules: the published configurations of Llama 3.1 ("llama3") and the YaRN paper (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from octavo.core.api.errors import UnsupportedModel
from octavo.core.config.model_spec import RopeSpec
from octavo.core.loading.fields import Fields

__all__ = ["rope_specs"]

_SUPPORTED = ("default", "linear", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_specs(config: Fields, head_dim: int, *, theta: float, local_theta: float | None) -> tuple[RopeSpec, RopeSpec | None]:
    """The RoPE of full-attention layers, and that of sliding-window layers where the model has one of its own.

    ``theta`` and ``local_theta`` are what the architecture takes where the file is silent; ``local_theta`` None means that
    sliding-window layers share the global RoPE. Raises `BrokenModel` and `UnsupportedModel`.
    """
    parameters = config.mapping("rope_parameters")
    if any(key in parameters.values for key in _LAYER_TYPES):
        # A kind of layer that the model hasn't may be absent or null; then nothing is built for it.
        kinds = [parameters.mapping(key) if parameters.has(key) else None for key in _LAYER_TYPES]
        full, local = kinds if kinds[0] is not None else (kinds[1], kinds[1])
        if full is None:
            config.broken("'rope_parameters' describes no kind of layer")
        local_spec = _spec(config, local, head_dim, local_theta or theta) if local is not None else None
        return _spec(config, full, head_dim, theta), local_spec
    scaling = parameters if parameters.values else config.mapping("rope_scaling")
    theta = config.positive("rope_theta", theta)
    full_spec = _spec(config, scaling, head_dim, theta)
    if local_theta is None:
        return full_spec, None
    local_base = config.positive("rope_local_base_freq", local_theta)
    # Scaling stretches the global layers only: a window never sees far positions.
    return full_spec, _spec(config, Fields({}, config.where), head_dim, local_base)


def _spec(config: Fields, rope: Fields, head_dim: int, theta: float) -> RopeSpec:
    kind = rope.text("rope_type", rope.values.get("type") or "default")
    if kind not in _SUPPORTED:
        raise UnsupportedModel(
            f"{config.where}: RoPE scaling {kind!r} isn't supported", hint=f"supported: {', '.join(_SUPPORTED)}"
        )
    share = rope.positive("partial_rotary_factor", config.values.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        config.broken(f"RoPE would turn {rotary_dim} of {head_dim} dimensions; an even number is expected")
    plain: dict[str, Any] = {"theta": rope.positive("rope_theta", theta), "rotary_dim": rotary_dim}
    if kind == "default":
        return RopeSpec(**plain)
    if kind == "linear":
        return RopeSpec(**plain, scaling="linear", factor=rope.positive("factor"))
    original = rope.integer(
        "original_max_position_embeddings",
        config.values.get("original_max_position_embeddings") or config.integer("max_position_embeddings"),
    )
    plain |= {"scaling": cast(Literal["llama3", "yarn"], kind), "original_max_position": original}
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            rope.broken(f"'high_freq_factor' {high} must exceed 'low_freq_factor' {low}")
        return RopeSpec(**plain, factor=rope.positive("factor"), low_freq_factor=low, high_freq_factor=high)
    return _yarn(config, rope, plain, original)


def _yarn(config: Fields, rope: Fields, plain: Mapping[str, Any], original: int) -> RopeSpec:
    if not rope.boolean("truncate", True):
        raise UnsupportedModel(f"{config.where}: YaRN with 'truncate' false isn't supported")
    stretched = rope.has("factor") or not config.has("max_position_embeddings")
    factor = rope.positive("factor") if stretched else config.integer("max_position_embeddings") / original
    attention = rope.positive("attention_factor") if rope.has("attention_factor") else None
    if attention is None and rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    return RopeSpec(
        **plain,
        factor=factor,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        attention_factor=attention,
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
