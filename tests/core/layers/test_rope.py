"""Rotary tables equal transformers' to the last bit that matters: an error grows with the position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.core.api.errors import BrokenModel
from octavo.core.config.model_spec import RopeSpec
from octavo.core.layers.rope import inverse_frequencies, rope_table

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


def theirs(kind: str, theta: float, head_dim: int, **parameters: Any) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    if kind == "default":
        embedding = LlamaRotaryEmbedding(config)
        return embedding.inv_freq, embedding.attention_scaling
    return ROPE_INIT_FUNCTIONS[kind](config, None)


CASES = [
    (RopeSpec(theta=10000.0, rotary_dim=64), ("default", 10000.0, 64), {}),
    (RopeSpec(theta=1e6, rotary_dim=256), ("default", 1e6, 256), {}),
    (RopeSpec(theta=1e4, rotary_dim=32, scaling="linear", factor=8.0), ("linear", 1e4, 32), {"factor": 8.0}),
    (
        RopeSpec(theta=5e5, rotary_dim=128, scaling="llama3", factor=8.0, original_max_position=8192),
        ("llama3", 5e5, 128),
        LLAMA3,
    ),
    (RopeSpec(theta=1e6, rotary_dim=128, scaling="yarn", factor=4.0, original_max_position=4096), ("yarn", 1e6, 128), YARN),
    (
        RopeSpec(
            theta=1e4, rotary_dim=64, scaling="yarn", factor=16.0, original_max_position=4096, beta_fast=20.0, beta_slow=2.0,
            attention_factor=0.9,
        ),
        ("yarn", 1e4, 64),
        YARN | {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 0.9},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rope", "named", "parameters"), CASES, ids=lambda value: getattr(value, "scaling", None))
def test_frequencies_are_those_of_transformers(rope: RopeSpec, named: tuple[str, float, int], parameters: Any) -> None:
    frequencies, magnitude = inverse_frequencies(rope)
    wanted, wanted_magnitude = theirs(*named, **parameters)
    torch.testing.assert_close(frequencies, wanted, rtol=2e-7, atol=0)
    assert magnitude == pytest.approx(wanted_magnitude, rel=1e-12)


def test_the_table_holds_cosines_then_sines_of_every_position() -> None:
    rope = RopeSpec(theta=1e4, rotary_dim=8)
    table = rope_table(rope, 5)
    frequencies = torch.tensor([1e4 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    angles = torch.arange(5, dtype=torch.float64)[:, None] * frequencies
    assert table.dtype is torch.float32
    torch.testing.assert_close(table.double(), torch.cat([angles.cos(), angles.sin()], dim=1), rtol=0, atol=1e-6)


def test_a_yarn_magnitude_multiplies_cosines_and_sines() -> None:
    plain = RopeSpec(theta=1e4, rotary_dim=8, scaling="yarn", factor=1.0, original_max_position=64)
    louder = RopeSpec(theta=1e4, rotary_dim=8, scaling="yarn", factor=1.0, original_max_position=64, attention_factor=1.5)
    torch.testing.assert_close(rope_table(louder, 9), 1.5 * rope_table(plain, 9))


def test_factors_of_the_file_divide_the_frequencies() -> None:
    plain, _ = inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=8))
    divided, _ = inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=8, factors=(1.0, 2.0, 4.0, 8.0)))
    torch.testing.assert_close(divided * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


def test_a_wrong_number_of_factors_is_a_broken_model() -> None:
    with pytest.raises(BrokenModel, match="expected 4 of them, the file has 3"):
        inverse_frequencies(RopeSpec(rotary_dim=8, factors=(1.0, 1.0, 1.0)))
