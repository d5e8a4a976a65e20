"""Dtype words (`octavo.core.api.manifest.DTYPES`) and torch's dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from octavo.core.api.errors import UsageError

__all__ = ["TORCH_DTYPES", "dtype_word", "torch_dtype"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}


def torch_dtype(word: str) -> torch.dtype:
    """torch's dtype of a word such as ``"bfloat16"``. Raises `UsageError` for any other word."""
    try:
        return TORCH_DTYPES[word]
    except KeyError:
        raise UsageError(f"no dtype {word!r}", hint=f"one of {', '.join(TORCH_DTYPES)}") from None


def dtype_word(dtype: torch.dtype) -> str:
    """The word of a torch dtype. Raises `UsageError` for a dtype that has none."""
    try:
        return _WORDS[dtype]
    except KeyError:
        raise UsageError(f"dtype {dtype} has no name here", hint=f"use one of {', '.join(TORCH_DTYPES)}") from None
