"""Imports a chosen plugin, once, and holds it to what its kind must be."""

from __future__ import annotations

import threading
import traceback
from functools import reduce
from importlib import import_module
from typing import Any

from octavo.core.api.errors import OctavoError
from octavo.core.discovery.registry import PluginEntry, unavailable
from octavo.core.discovery.wording import error_text, first_cause

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
        except (Exception, SystemExit) as error:
            entry.state, entry.reason, entry.traceback = "failed-to-load", root_cause(error), traceback.format_exc()
            raise unavailable(entry) from error
    return entry.instance


def root_cause(error: BaseException) -> str:
    """The first cause of an error, on one line: ``ImportError: libacme.so.2: cannot open shared object file``."""
    cause = first_cause(error)
    return str(cause) if isinstance(cause, OctavoError) else error_text(cause)


def unavailable_now(entry: PluginEntry, reason: str) -> OctavoError:
    """The error for a use that fails without changing the entry's state."""
    error = unavailable(entry)
    return type(error)(f"{entry.kind} {entry.name!r} ({entry.origin}): {reason}")


def _import(entry: PluginEntry) -> Any:
    module, _, attributes = entry.target.partition(":")
    target = reduce(getattr, attributes.split("."), import_module(module))
    from octavo.core.discovery.contracts import hold_to_contract

    return hold_to_contract(entry, target)
