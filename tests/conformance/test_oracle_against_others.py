"""The oracle agrees with independent implementations: torch's float64 SDPA and transformers' eager attention in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager

from octavo.api.attention import AttentionSpec, LayerParams
from octavo.conformance.oracle import AttentionInput, Expected, expected_attention, visible_keys

NOTHING_SPECIAL = LayerParams(index=0)


def spec(**changes: object) -> AttentionSpec:
    base: dict[str, object] = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "head_dim_v": 16,
        "scale": 0.3,
        "dtype": "float32",
        "kv_dtype": "float32",
    }
    return AttentionSpec(**(base | changes))  # type: ignore[arg-type]


def draw(spec: AttentionSpec, query_len: int, context_len: int, seed: int = 0) -> AttentionInput:
    generator = torch.Generator().manual_seed(seed)

    def normal(tokens: int, heads: int, width: int) -> Tensor:
        return torch.randn(tokens, heads, width, generator=generator, dtype=torch.float64)

    seq_len = query_len + context_len
    return AttentionInput(
        q=normal(query_len, spec.num_heads, spec.head_dim),
        k=normal(seq_len, spec.num_kv_heads, spec.head_dim),
        v=None if spec.kind == "mla" else normal(seq_len, spec.num_kv_heads, spec.head_dim_v),
        num_computed_tokens=context_len,
    )


def heads_first(tokens: Tensor) -> Tensor:
    return tokens.transpose(0, 1)[None]


def mask_of(function: object, request: AttentionInput) -> Tensor:
    """[1, 1, query_len, seq_len] bool from one of transformers' mask functions (batch, head, query, key)."""
    rows = [
        [
            bool(function(0, 0, torch.tensor(request.num_computed_tokens + row), torch.tensor(key)))
            for key in range(request.seq_len)
        ]  # type: ignore[operator]
        for row in range(request.query_len)
    ]
    return torch.tensor(rows)[None, None]


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


def assert_same(got: Expected, want: Tensor) -> None:
    """``want`` [1, num_heads, query_len, head_dim_v], as torch gives it."""
    np.testing.assert_allclose(got.out, want[0].transpose(0, 1).numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("query_len", "context_len"), [(1, 0), (1, 20), (7, 0), (5, 11)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_causal_gqa_equals_sdpa(query_len: int, context_len: int, num_kv_heads: int) -> None:
    asked = spec(num_kv_heads=num_kv_heads)
    request = draw(asked, query_len, context_len)
    want = torch.nn.functional.scaled_dot_product_attention(
        heads_first(request.q),
        heads_first(request.k),
        heads_first(request.v),
        attn_mask=mask_of(causal_mask_function, request),
        scale=0.3,
        enable_gqa=True,
    )
    assert_same(expected_attention(asked, [request], NOTHING_SPECIAL), want)


def test_non_causal_with_another_value_width_equals_sdpa() -> None:
    asked = spec(causal=False, head_dim_v=24)
    request = draw(asked, 4, 9)
    want = torch.nn.functional.scaled_dot_product_attention(
        heads_first(request.q), heads_first(request.k), heads_first(request.v), scale=0.3, enable_gqa=True
    )
    assert_same(expected_attention(asked, [request], NOTHING_SPECIAL), want)


def test_mla_values_are_the_first_part_of_the_keys() -> None:
    asked = spec(kind="mla", num_kv_heads=1, head_dim=24, head_dim_v=16)
    request = draw(asked, 3, 5)
    want = torch.nn.functional.scaled_dot_product_attention(
        heads_first(request.q),
        heads_first(request.k),
        heads_first(request.k)[..., :16],
        attn_mask=mask_of(causal_mask_function, request),
        scale=0.3,
        enable_gqa=True,
    )
    assert_same(expected_attention(asked, [request], NOTHING_SPECIAL), want)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_sliding_window_equals_transformers(window: int) -> None:
    asked = spec(window=window)
    request = draw(asked, 9, 4)
    mask = additive(mask_of(sliding_window_causal_mask_function(window), request))
    module = SimpleNamespace(num_key_value_groups=3, training=False)
    want, _ = llama_eager(module, *map(heads_first, (request.q, request.k, request.v)), mask, scaling=0.3)  # type: ignore[arg-type]
    got = expected_attention(asked, [request], NOTHING_SPECIAL)
    # transformers' eager takes its softmax in float32
    np.testing.assert_allclose(got.out, want[0].numpy(), rtol=2e-6, atol=2e-6)


def test_soft_cap_before_the_mask_equals_gemma2() -> None:
    asked = spec(soft_cap=1.5, window=6)
    request = draw(asked, 8, 3)
    mask = additive(mask_of(sliding_window_causal_mask_function(6), request))
    module = SimpleNamespace(num_key_value_groups=3, training=False, head_dim=16)
    want, _ = gemma2_eager(module, *map(heads_first, (request.q, request.k, request.v)), mask, scaling=0.3, softcap=1.5)  # type: ignore[arg-type]
    got = expected_attention(asked, [request], NOTHING_SPECIAL)
    np.testing.assert_allclose(got.out, want[0].numpy(), rtol=2e-6, atol=2e-6)


def test_sinks_equal_gpt_oss() -> None:
    asked = spec(sinks=True)
    request = draw(asked, 6, 5)
    sinks = torch.linspace(-2, 3, 6, dtype=torch.float64)
    module = SimpleNamespace(num_key_value_groups=3, training=False, sinks=sinks)
    mask = additive(mask_of(causal_mask_function, request))
    want, _ = gpt_oss_eager(module, *map(heads_first, (request.q, request.k, request.v)), mask, scaling=0.3)  # type: ignore[arg-type]
    got = expected_attention(asked, [request], LayerParams(index=0, sinks=sinks))
    np.testing.assert_allclose(got.out, want[0].numpy(), rtol=1e-12, atol=1e-13)


def test_alibi_equals_bloom_up_to_what_softmax_ignores() -> None:
    asked = spec(alibi=True, num_heads=4)
    request = draw(asked, 5, 4)
    bias = build_alibi_tensor(torch.ones(1, request.seq_len), 4, torch.float64)[
        None
    ]  # [1, 4, 1, seq_len]: slope * key position
    slopes = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(4)])
    want = torch.nn.functional.scaled_dot_product_attention(
        heads_first(request.q),
        heads_first(request.k),
        heads_first(request.v),
        attn_mask=additive(mask_of(causal_mask_function, request)) + bias,
        scale=0.3,
        enable_gqa=True,
    )
    assert_same(expected_attention(asked, [request], LayerParams(index=0, alibi_slopes=slopes)), want)


def test_scales_multiply_keys_and_values() -> None:
    asked = spec()
    request = draw(asked, 3, 5)
    scaled = AttentionInput(
        q=request.q, k=request.k * 0.37, v=None if request.v is None else request.v * 2.5, num_computed_tokens=5
    )
    got = expected_attention(asked, [request], LayerParams(index=0, k_scale=0.37, v_scale=2.5))
    np.testing.assert_allclose(got.out, expected_attention(asked, [scaled], NOTHING_SPECIAL).out, rtol=1e-12)


def test_mla_scales_values_like_keys() -> None:
    asked = spec(kind="mla", num_kv_heads=1, head_dim=24, head_dim_v=16)
    request = draw(asked, 2, 3)
    scaled = AttentionInput(q=request.q, k=request.k * 0.5, v=None, num_computed_tokens=3)
    got = expected_attention(asked, [request], LayerParams(index=0, k_scale=0.5, v_scale=9.0))
    np.testing.assert_allclose(got.out, expected_attention(asked, [scaled], NOTHING_SPECIAL).out, rtol=1e-12)


def test_lse_is_the_log_of_the_denominator_with_the_sink() -> None:
    asked = spec(sinks=True, num_heads=1, num_kv_heads=1)
    request = draw(asked, 1, 6)
    sink = torch.tensor([0.7], dtype=torch.float64)
    got = expected_attention(asked, [request], LayerParams(index=0, sinks=sink))
    logits = torch.cat([0.3 * request.k[:, 0] @ request.q[0, 0], sink])
    assert got.lse.item() == pytest.approx(torch.logsumexp(logits, 0).item(), rel=1e-13)


def test_tolerance_quantities_follow_their_definitions() -> None:
    asked = spec(num_heads=1, num_kv_heads=1, window=3)
    request = draw(asked, 1, 6)
    assert request.v is not None
    got = expected_attention(asked, [request], NOTHING_SPECIAL)
    keys, values = request.k[4:, 0], request.v[4:, 0]
    weights = torch.softmax(0.3 * keys @ request.q[0, 0], 0)
    np.testing.assert_allclose(got.magnitude[0, 0], (weights @ values.abs()).numpy(), rtol=1e-12)
    assert got.logit_size.item() == pytest.approx((0.3 * keys.abs() @ request.q[0, 0].abs()).max().item(), rel=1e-13)
    assert got.num_keys.tolist() == [3]


def test_requests_of_a_batch_dont_influence_each_other() -> None:
    asked = spec()
    one, two = draw(asked, 2, 3, seed=1), draw(asked, 4, 0, seed=2)
    both = expected_attention(asked, [one, two], NOTHING_SPECIAL)
    np.testing.assert_array_equal(both.out[:2], expected_attention(asked, [one], NOTHING_SPECIAL).out)
    np.testing.assert_array_equal(both.out[2:], expected_attention(asked, [two], NOTHING_SPECIAL).out)


def test_a_query_without_keys_gives_zero() -> None:
    asked = spec(kind="cross", causal=False)
    request = draw(asked, 2, 0)
    empty = AttentionInput(q=request.q, k=request.k[:0], v=None if request.v is None else request.v[:0], num_computed_tokens=0)
    got = expected_attention(asked, [empty], NOTHING_SPECIAL)
    assert not got.out.any()
    assert np.isneginf(got.lse).all()


@pytest.mark.parametrize(
    ("causal", "window", "position", "seen"),
    [
        (True, None, 3, range(4)),
        (True, 2, 3, range(2, 4)),
        (True, 9, 3, range(4)),
        (False, None, 3, range(8)),
        (False, 2, 3, range(2, 5)),
    ],
)
def test_visible_keys(causal: bool, window: int | None, position: int, seen: range) -> None:
    assert visible_keys(spec(causal=causal, window=window), position, 8) == seen


def test_a_kind_without_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="recurrent"):
        expected_attention(spec(kind="recurrent"), [draw(spec(), 1, 0)], NOTHING_SPECIAL)
