"""What a loaded plugin's object must be, by kind; and the names that core gives it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import new_class
from typing import Any

from octavo.core.api.errors import PluginUnavailable
from octavo.core.discovery import lint
from octavo.core.discovery.registry import LABELS, PluginEntry

logger = logging.getLogger("octavo")


def hold_to_contract(entry: PluginEntry, target: Any) -> Any:
    """``target``, or a subclass that carries the entry's own name. Raises `PluginUnavailable`."""
    base = _base(entry)
    if base is not None:
        _require_subclass(entry, target, base)
        _lint(entry, target, base)
    if entry.kind == "platform":
        return _with(target, name=entry.name)
    if entry.kind == "attention":
        return _with(target, manifest=entry.table)
    if base is None and not callable(target) and entry.kind not in ("hook", "command"):
        raise PluginUnavailable(f"{LABELS[entry.kind]} {entry.name!r}: {entry.target} isn't callable")
    return target


def _base(entry: PluginEntry) -> type[Any] | None:
    """The class that plugins of this kind derive from; None where the protocol is a structural one."""
    bases: dict[str, Callable[[PluginEntry], type[Any]]] = {
        "platform": _platform,
        "attention": _attention,
        "model": _model,
        "scheduling_policy": _policy,
        "proposer": _proposer,
    }
    return bases[entry.kind](entry) if entry.kind in bases else None


def _platform(_: PluginEntry) -> type[Any]:
    from octavo.core.api.platform import Platform

    return Platform


def _attention(entry: PluginEntry) -> type[Any]:
    from octavo.core.api.attention import AttentionBackend, CacheBackend

    return CacheBackend if set(entry.table.kinds) == {"recurrent"} else AttentionBackend


def _model(_: PluginEntry) -> type[Any]:
    from octavo.core.api.models import CausalLM

    return CausalLM


def _policy(_: PluginEntry) -> type[Any]:
    from octavo.core.api.scheduling import SchedulingPolicy

    return SchedulingPolicy


def _proposer(_: PluginEntry) -> type[Any]:
    from octavo.core.api.scheduling import Proposer

    return Proposer


def _require_subclass(entry: PluginEntry, target: Any, base: type[Any]) -> None:
    if not isinstance(target, type) or not issubclass(target, base):
        raise PluginUnavailable(f"{entry.target} must be a class that derives from octavo.api's {base.__name__}")
    if inspect.isabstract(target):
        missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
        raise PluginUnavailable(f"{entry.target} lacks required methods of {base.__name__}: {missing}")


def _lint(entry: PluginEntry, target: type[Any], base: type[Any]) -> None:
    """Refuse what would fail in use; say once what has no effect."""
    problems = lint.errors(target, base)
    if problems:
        raise PluginUnavailable("; ".join(problems))
    found = lint.warnings(target, base, entry.table)
    if found:
        entry.warning = "; ".join(found)
        logger.warning("%s %r (%s): %s", LABELS[entry.kind], entry.name, entry.origin, entry.warning)


def _with(cls: type[Any], **attributes: Any) -> type[Any]:
    """``cls`` with class attributes set; a subclass of it where another entry has set its own already."""
    named = {"__module__": cls.__module__, **attributes, "_octavo_named": True}
    taken = {name: value for name, value in cls.__dict__.items() if name in attributes}
    if taken and taken != attributes and cls.__dict__.get("_octavo_named"):
        return new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(named))
    for name, value in named.items():
        setattr(cls, name, value)
    return cls
