"""How parts of `octavo.api` are retired: two minor releases of warnings that name the replacement, then they go."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from octavo.core.api import API_VERSION

__all__ = ["OctavoDeprecationWarning", "deprecated", "removal_of"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

WARNED_MINORS = 2


class OctavoDeprecationWarning(DeprecationWarning):
    """Something of octavo.api will go; the message says when, and what to use."""


def removal_of(since: tuple[int, int]) -> tuple[int, int]:
    """The first version without what was deprecated in ``since``."""
    return since[0], since[1] + WARNED_MINORS


def deprecated(*, since: tuple[int, int], use: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function of the API that is deprecated since octavo.api ``since``; ``use`` names the replacement.

    Raises `RuntimeError` when decorating something whose time is over: it must be deleted then.
    """
    end = removal_of(since)
    if end <= API_VERSION:
        raise RuntimeError(f"deprecated since octavo.api {_text(since)}: it had to be deleted in {_text(end)}")

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        message = f"{function.__qualname__} is deprecated since octavo.api {_text(since)} and goes in {_text(end)}: use {use}"

        @wraps(function)
        def warned(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            warnings.warn(message, OctavoDeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        warned.__deprecated__ = message  # type: ignore[attr-defined]  # PEP 702's name; the load-time lint reads it
        return warned

    return decorate


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
