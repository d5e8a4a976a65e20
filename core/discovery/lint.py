"""Compares a plugin's class with the `octavo.api` class it derives from, when it is loaded.

What would fail in use is an error (a signature that core's calls don't fit); what would silently do nothing is a warning (an
override of a method that doesn't exist any more, a capability that nothing backs).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from octavo.core.api.attention import AttentionBackend
from octavo.core.api.manifest import AttentionManifest

REMOVED: Mapping[str, Mapping[str, str]] = {}
"""Class → method that it once had → what to do instead. Filled when a minor release removes an optional method."""

_NEAR = 0.85
_NOT_YET: Mapping[str, str] = {
    "graph_decode": "octavo.api has no graph capture yet",
    "graph_mixed": "octavo.api has no graph capture yet",
}


def errors(cls: type[Any], base: type[Any]) -> tuple[str, ...]:
    """What will fail as soon as core calls it, one line each."""
    return tuple(
        f"{cls.__name__}.{name}{inspect.signature(ours)} doesn't take what octavo.api passes: "
        f"{base.__name__}.{name}{inspect.signature(theirs)}; {missing}"
        for name, ours, theirs in _overrides(cls, base)
        if (missing := _unfit(ours, theirs))
    )


def warnings(
    cls: type[Any], base: type[Any], table: Any = None, removed: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[str, ...]:
    """What has no effect, or isn't backed, one line each."""
    return (
        *_without_effect(cls, base, REMOVED if removed is None else removed),
        *_on_its_way_out(cls, base),
        *_unbacked(cls, table),
    )


def _overrides(cls: type[Any], base: type[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Public methods that ``cls`` brings itself for ones of ``base``."""
    for name, theirs in _methods(base).items():
        ours = _methods(cls).get(name)
        if ours is not None and ours is not theirs:
            yield name, ours, theirs


def _methods(cls: type[Any]) -> dict[str, Any]:
    """Functions by name, as they are called on an instance (class methods on the class), private ones left out."""
    found = {}
    for name in dir(cls):
        if name.startswith("_"):
            continue
        raw = inspect.getattr_static(cls, name)
        function = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
        if inspect.isfunction(function):
            found[name] = function
    return found


def _unfit(ours: Any, theirs: Any) -> str:
    """Why a call made for ``theirs`` doesn't fit ``ours``; empty when it does."""
    mine, wanted = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    kinds = {parameter.kind for parameter in mine.values()}
    takes_any_positional = inspect.Parameter.VAR_POSITIONAL in kinds
    takes_any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    positional = [p.name for p in mine.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    expected = [p.name for p in wanted.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(expected) and not takes_any_positional:
        return f"it takes {len(positional)} arguments, not {len(expected)}"
    keywords = [p.name for p in wanted.values() if p.kind is p.KEYWORD_ONLY]
    lacking = [name for name in keywords if name not in mine and not takes_any_keyword]
    if lacking:
        return f"it lacks the keyword {', '.join(lacking)}"
    extra = [
        p.name
        for index, p in enumerate(mine.values())
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and index >= len(expected)
        and p.name not in keywords
    ]
    return f"it needs {', '.join(extra)}, which nobody passes" if extra else ""


def _without_effect(cls: type[Any], base: type[Any], removed: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    known = set(dir(base))
    gone = {name: what for parent in base.__mro__ for name, what in removed.get(parent.__name__, {}).items()}
    for name, method in _methods(cls).items():
        if name in known:
            continue
        if name in gone:
            yield f"{cls.__name__}.{name} is never called: {base.__name__} no longer has it; {gone[name]}"
        elif getattr(method, "__override__", False):
            yield f"{cls.__name__}.{name} is marked as an override, but {base.__name__} has no such method"
        elif near := get_close_matches(name, _methods(base), n=1, cutoff=_NEAR):
            yield f"{cls.__name__}.{name} is never called; did you mean {near[0]}?"


def _on_its_way_out(cls: type[Any], base: type[Any]) -> Iterator[str]:
    """Overrides of methods that `octavo.core.api.deprecation.deprecated` marks."""
    for name, _, theirs in _overrides(cls, base):
        if message := getattr(theirs, "__deprecated__", ""):
            yield f"{cls.__name__}.{name} overrides what goes: {message}"


def _unbacked(cls: type[Any], table: Any) -> Iterator[str]:
    if not isinstance(table, AttentionManifest):
        return
    for feature, why in _NOT_YET.items():
        if feature in table.features:
            yield f"{table.name} declares {feature}, which nothing backs: {why}"
    computing = [getattr(cls, "attend", None), getattr(cls, "forward", None)]
    own = [method for method in computing if method is not None and method is not AttentionBackend.forward]
    if "lse" in table.features and own and not any(_mentions(method, "lse_out") for method in own):
        yield f"{table.name} declares lse, but {cls.__name__}.attend never uses lse_out"


def _mentions(function: Any, name: str) -> bool:
    """Whether a Python function's body uses one of its arguments; True where that can't be seen."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return True
    import dis

    return any(instruction.argval == name for instruction in dis.get_instructions(code)) or name in code.co_cellvars
