"""Dtype words and what a number format can hold; the suite's own table, so that a kernel's can't agree with it by accident."""

from __future__ import annotations

import torch

__all__ = ["FLOAT32_ROUNDOFF", "TORCH_DTYPES", "poison_value", "unit_roundoff"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
FLOAT32_ROUNDOFF = 2.0**-24
_SIGNIFICAND_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}  # IEEE 754 and bfloat16, the implicit bit included


def unit_roundoff(dtype: str) -> float:
    """Largest relative error of rounding to nearest: 2^-p for a significand of p bits."""
    return 2.0 ** -_SIGNIFICAND_BITS[dtype]


def poison_value(dtype: str) -> float:
    """What dead cache slots are filled with: NaN, or the largest value of a format that has none."""
    return 127.0 if dtype == "int8" else float("nan")
