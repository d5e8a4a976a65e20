"""Imports a chosen plugin, once, and holds it to what its kind must be."""

from __future__ import annotations

import threading
import traceback
from functools import reduce
from importlib import import_module
from typing import Any

from octavo.core.api.errors import OctavoError
from octavo.core.discovery.registry import PluginEntry, unavailable

_LOADING = threading.local()


def load_entry(entry: PluginEntry) -> Any:
    """The entry's object. Raises `PluginUnavailable` with the root cause when it can't be used."""
    if entry.loaded is not None:
        return entry.loaded
    if not entry.usable:
        raise unavailable(entry)
    under_way: set[int] = _LOADING.__dict__.setdefault("entries", set())
    if id(entry) in under_way:
        raise unavailable_now(entry, "it asks for itself while it is being imported")
    under_way.add(id(entry))
    try:
        entry.loaded = _import(entry)
        entry.state = "active"
    except (Exception, SystemExit) as error:
        entry.state, entry.reason, entry.traceback = "failed-to-load", root_cause(error), traceback.format_exc()
        raise unavailable(entry) from error
    finally:
        under_way.discard(id(entry))
    return entry.loaded


def platform_instance(entry: PluginEntry) -> Any:
    """The platform's instance, made on first use. Raises `PluginUnavailable`."""
    cls = load_entry(entry)
    if entry.instance is None:
        try:
            entry.instance = cls()
        except Exception as error:
            entry.state, entry.reason, entry.traceback = "failed-to-load", root_cause(error), traceback.format_exc()
            raise unavailable(entry) from error
    return entry.instance


def root_cause(error: BaseException) -> str:
    """The first cause of an error, on one line: ``ImportError: libacme.so.2: cannot open shared object file``."""
    cause = error
    while cause.__cause__ is not None or (cause.__context__ is not None and not cause.__suppress_context__):
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    if isinstance(cause, OctavoError):
        return str(cause)
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def unavailable_now(entry: PluginEntry, reason: str) -> OctavoError:
    """The error for a use that fails without changing the entry's state."""
    error = unavailable(entry)
    return type(error)(f"{entry.kind} {entry.name!r} ({entry.origin}): {reason}")


def _import(entry: PluginEntry) -> Any:
    module, _, attributes = entry.target.partition(":")
    target = reduce(getattr, attributes.split("."), import_module(module))
    from octavo.core.discovery.contracts import hold_to_contract

    return hold_to_contract(entry, target)
