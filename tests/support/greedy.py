"""Sampling parameters of most tests."""

from __future__ import annotations

from typing import Any

from octavo.core.api.sampling import SamplingParams


def params(max_tokens: int = 10, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)
