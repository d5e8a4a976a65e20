"""`option`: a dataclass field that is also a command-line flag, a keyword of `LLM` and a key of a config file."""

from __future__ import annotations

from dataclasses import field
from types import MappingProxyType
from typing import Any


def option(default: Any, *, help: str, internal: bool = False) -> Any:
    """A field with its help text. ``internal`` fields are set by Octavo itself and are no flag."""
    metadata = {"help": help, "internal": internal}
    if isinstance(default, dict):
        return field(default_factory=lambda: MappingProxyType(default), metadata=metadata)
    return field(default=default, metadata=metadata)
