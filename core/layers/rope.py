"""Rotary tables: cosines and sines for every position, computed on the host in float32, as the models were trained.

Sources: Su et al. 2021 (rotary), kaiokendev 2023 (linear), Peng et al. 2023, YaRN (NTK by parts), Llama 3.1's model card.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.core.api.errors import BrokenModel
from octavo.core.config.model_spec import RopeSpec

__all__ = ["inverse_frequencies", "rope_table"]


def rope_table(rope: RopeSpec, max_positions: int) -> Tensor:
    """[max_positions, rotary_dim] float32 on the host: cosines of every frequency, then sines."""
    frequencies, magnitude = inverse_frequencies(rope)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * magnitude


def inverse_frequencies(rope: RopeSpec) -> tuple[Tensor, float]:
    """Radians a position, [rotary_dim / 2] float32, and the factor that cosines and sines are multiplied with."""
    exponents = torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim
    periods = rope.theta**exponents  # positions a radian
    magnitude = 1.0
    if rope.scaling == "yarn":
        frequencies, magnitude = _yarn(rope, periods)
    else:
        frequencies = 1.0 / periods
        if rope.scaling == "linear":
            frequencies = frequencies / rope.factor
        elif rope.scaling == "llama3":
            frequencies = _llama3(rope, frequencies)
    if rope.factors is not None:
        frequencies = frequencies / _factors(rope)
    return frequencies, magnitude


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Waves longer than the original context are stretched by the factor, short ones kept, those between interpolated."""
    turns = rope.original_max_position / (2 * math.pi / frequencies)  # of each channel, over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = frequencies / rope.factor
    blended = (1 - kept) * stretched + kept * frequencies
    return torch.where(
        turns < rope.low_freq_factor, stretched, torch.where(turns > rope.high_freq_factor, frequencies, blended)
    )


def _yarn(rope: RopeSpec, periods: Tensor) -> tuple[Tensor, float]:
    """NTK by parts: channels that turn often keep their frequency, those that turn rarely are stretched, a ramp between."""
    half = rope.rotary_dim // 2

    def channel(turns: float) -> float:
        """The channel (a real number) that makes so many turns over the original context."""
        return rope.rotary_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(channel(rope.beta_fast)), 0)
    high = min(math.ceil(channel(rope.beta_slow)), rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretch = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - stretch
    frequencies = 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    return frequencies, 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _factors(rope: RopeSpec) -> Tensor:
    assert rope.factors is not None
    factors = torch.tensor(rope.factors, dtype=torch.float32)
    if factors.numel() != rope.rotary_dim // 2:
        raise BrokenModel(f"rope factors: expected {rope.rotary_dim // 2} of them, the file has {factors.numel()}")
    return factors
