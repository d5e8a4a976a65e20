"""`parse_toml`: TOML whose every fault is one kind of error."""

from __future__ import annotations

import tomllib
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """The document in ``text``. Raises `ValueError` for what isn't TOML, nests too deeply, or has a number that TOML can't."""
    try:
        data = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if _has_huge_number(data):
        raise ValueError("a whole number has more than 64 bits")
    return data


def _has_huge_number(data: Any) -> bool:
    """Whether a whole number is longer than TOML allows: Python reads it, but can't print it in a message."""
    left = [data]
    while left:  # no recursion: a key may have thousands of dots
        value = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, int) and value.bit_length() > 63:
            return True
    return False
