"""`Fields`: typed, bounded reads from a config.json or a GGUF's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from octavo.core.api.errors import BrokenModel

__all__ = ["Fields"]

_MISSING = object()


class Fields:
    """A mapping read key by key. Every method raises `BrokenModel`, naming the file and the key.

    Numbers that sizes are made from are bounded, so a lying file can't make anyone allocate for ever.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def broken(self, what: str) -> NoReturn:
        raise BrokenModel(f"{self.where}: {what}", hint="the file is broken or incomplete: fetch it again")

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.values.get(key) is not None

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is _MISSING:
            self.broken(f"{key!r} is missing")
        return value

    def integer(self, key: str, default: Any = _MISSING, *, most: int = 1 << 27, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.broken(f"{key!r} must be a whole number, not {str(value)[:60]!r}")
        if not least <= value <= most:
            self.broken(f"{key!r} is {value}; between {least} and {most} is expected")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.broken(f"{key!r} must be a finite number, not {str(value)[:60]!r}")
        return float(value)

    def positive(self, key: str, default: Any = _MISSING) -> float:
        value = self.number(key, default)
        if value <= 0:
            self.broken(f"{key!r} is {value}; more than 0 is expected")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.broken(f"{key!r} must be true or false, not {str(value)[:60]!r}")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.broken(f"{key!r} must be a string, not {str(value)[:60]!r}")
        return value

    def mapping(self, key: str) -> Fields:
        """A nested object; an empty one when it is missing."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            self.broken(f"{key!r} must be an object, not {str(value)[:60]!r}")
        return Fields(value, f"{self.where}: {key}")
