"""What the device is like. Environment variables are read here and nowhere else; worker processes inherit them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["Settings", "Strictness", "cache_folder"]

Strictness: TypeAlias = Literal[False, True, "copies"]
"""False: reads that make the host wait are counted. True: they are errors. "copies": so are unplanned copies to the host."""

_STRICT_WORDS: dict[str, Strictness] = {"0": False, "1": True, "copies": "copies"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The device's name for torch, how many there are, the memory of each, how strict they are."""

    name: str = "pyaccel"
    devices: int = 2
    memory_bytes: int = 4 << 30
    strict: Strictness = False
    reserve_bytes: int = 1 << 40  # address space taken at a time; halved until the system grants it

    @classmethod
    def from_environment(cls) -> Settings:
        """The defaults, changed by ``PYACCEL_{NAME,DEVICES,MEMORY_BYTES,STRICT,RESERVE_BYTES}``. Raises ValueError."""
        strict = os.environ.get("PYACCEL_STRICT", "0")
        if strict not in _STRICT_WORDS:
            raise ValueError(f"PYACCEL_STRICT must be one of {', '.join(_STRICT_WORDS)}, not {strict!r}")
        return cls(
            name=os.environ.get("PYACCEL_NAME", cls.name),
            devices=_number("PYACCEL_DEVICES", cls.devices),
            memory_bytes=_number("PYACCEL_MEMORY_BYTES", cls.memory_bytes),
            strict=_STRICT_WORDS[strict],
            reserve_bytes=_number("PYACCEL_RESERVE_BYTES", cls.reserve_bytes),
        )


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{variable} must be a positive number, not {text!r}")
    return int(text)


def cache_folder() -> Path:
    """Where built libraries are kept: ``PYACCEL_CACHE_DIR``, or ``pyaccel`` in the user's cache folder."""
    if folder := os.environ.get("PYACCEL_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyaccel"
