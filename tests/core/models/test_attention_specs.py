"""What each architecture asks of its attention backends, known before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.discovery import installed
from octavo.core.loading.hf_config import model_spec

BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip


def specs(plugin: str, **changes: Any) -> list[Any]:
    spec = model_spec(BASE | changes, where="config.json", architecture=plugin, plugin=plugin)
    return list(installed().load("model", plugin).attention(spec, "bfloat16", "fp8_e4m3"))


def test_llama_layers_are_alike() -> None:
    layers = specs("llama", model_type="llama")
    assert len(layers) == 4
    assert len(set(layers)) == 1
    layer = layers[0]
    assert (layer.kind, layer.window, layer.causal) == ("full_attention", None, True)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v) == (4, 2, 8, 8)
    assert (layer.dtype, layer.kv_dtype, layer.scale) == ("bfloat16", "fp8_e4m3", 8**-0.5)


def test_mistral_has_its_window_on_every_layer() -> None:
    assert [(s.kind, s.window) for s in specs("llama", model_type="mistral", sliding_window=9)] == [("sliding_window", 9)] * 4


@pytest.mark.parametrize(("used", "windows"), [(True, [None, None, 5, 5]), (False, [None] * 4)])
def test_qwen2_has_a_window_in_its_upper_layers_if_it_uses_one(used: bool, windows: list[int | None]) -> None:
    layers = specs("qwen2", model_type="qwen2", use_sliding_window=used, max_window_layers=2, sliding_window=5)
    assert [layer.window for layer in layers] == windows
    assert [layer.kind for layer in layers] == ["full_attention" if w is None else "sliding_window" for w in windows]


def test_gemma3_alternates_and_scales_by_its_own_scalar() -> None:
    layers = specs(
        "gemma3", model_type="gemma3_text", sliding_window_pattern=2, sliding_window=7, query_pre_attn_scalar=36, head_dim=16
    )
    assert [layer.window for layer in layers] == [7, None, 7, None]
    assert {layer.scale for layer in layers} == {36**-0.5}
