"""What a loaded plugin's object must be, by kind; and the names that core gives it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from importlib import import_module
from types import new_class
from typing import Any

from octavo.core.api.errors import PluginUnavailable
from octavo.core.discovery import lint
from octavo.core.discovery.registry import PluginEntry

logger = logging.getLogger("octavo")


BASES: Mapping[str, str] = {
    "platform": "octavo.core.api.platform:Platform",
    "attention": "octavo.core.api.attention:AttentionBackend",
    "model": "octavo.core.api.models:CausalLM",
    "scheduling_policy": "octavo.core.api.scheduling:SchedulingPolicy",
    "kv_manager": "octavo.core.api.kv_cache:KVManager",
    "proposer": "octavo.core.api.scheduling:Proposer",
}
"""The class that plugins of a kind derive from."""

PROTOCOLS: Mapping[str, str] = {"executor": "octavo.core.api.executor:Executor"}
"""What plugins of a kind must have without deriving from anything."""


def hold_to_contract(entry: PluginEntry, target: Any) -> Any:
    """``target``, or a subclass that carries the entry's own name. Raises `PluginUnavailable`."""
    base = contract(entry)
    if base is not None:
        if entry.kind in BASES:
            _require_subclass(entry, target, base)
        else:
            _require_members(entry, target, base)
        _lint(entry, target, base)
    if entry.kind == "platform":
        return _with(target, name=entry.name)
    if entry.kind == "attention":
        return _with(target, manifest=entry.table)
    if entry.kind == "ops" and not callable(target):
        raise PluginUnavailable(f"{entry.target} must be a function of the platform that returns a mapping of ops")
    return target


def contract(entry: PluginEntry) -> type[Any] | None:
    """The class or protocol that the plugin's object is held to; None where the kind has none."""
    where = {**BASES, **PROTOCOLS}.get(entry.kind)
    if where is None:
        return None
    module, _, name = where.partition(":")
    if entry.kind == "attention" and set(entry.table.kinds) == {"recurrent"}:
        name = "CacheBackend"
    found: type[Any] = getattr(import_module(module), name)
    return found


def _require_subclass(entry: PluginEntry, target: Any, base: type[Any]) -> None:
    if not isinstance(target, type) or not issubclass(target, base):
        raise PluginUnavailable(f"{entry.target} must be a class that derives from octavo.api's {base.__name__}")
    if inspect.isabstract(target):
        missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
        raise PluginUnavailable(f"{entry.target} lacks required methods of {base.__name__}: {missing}")


def _require_members(entry: PluginEntry, target: Any, protocol: type[Any]) -> None:
    if not isinstance(target, type):
        raise PluginUnavailable(f"{entry.target} must be a class with the methods of octavo.api's {protocol.__name__}")
    wanted = [name for name in vars(protocol) if not name.startswith("_")]
    missing = ", ".join(sorted(name for name in wanted if not callable(getattr(target, name, None))))
    if missing:
        raise PluginUnavailable(f"{entry.target} lacks required methods of {protocol.__name__}: {missing}")


def _lint(entry: PluginEntry, target: type[Any], base: type[Any]) -> None:
    """Refuse what would fail in use; say once what has no effect."""
    problems = lint.errors(target, base)
    if problems:
        raise PluginUnavailable("; ".join(problems))
    found = lint.warnings(target, base, entry.table)
    if found:
        entry.warning = "; ".join(found)
        logger.warning("%s: %s", entry.who, entry.warning)


def _with(cls: type[Any], **attributes: Any) -> type[Any]:
    """``cls`` with class attributes set; a subclass of it where another entry has set its own already."""
    named = {"__module__": cls.__module__, **attributes, "_octavo_named": True}
    taken = {name: value for name, value in cls.__dict__.items() if name in attributes}
    if taken and taken != attributes and cls.__dict__.get("_octavo_named"):
        return new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(named))
    for name, value in named.items():
        setattr(cls, name, value)
    return cls
