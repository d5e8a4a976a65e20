"""Watches Octavo's own functions and classes: none of them may be replaced by what a plugin does."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

_WATCHED = (FunctionType, type, staticmethod, classmethod, property)


class PatchWatch:
    """An import hook. `changed` after each import of a module of ``packages``, and whenever it is asked, compares every
    function, class and method of Octavo with what it was.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        import octavo

        # The entry module runs the command line when it is imported; optional parts may need packages that aren't here.
        for found in pkgutil.walk_packages(octavo.__path__, "octavo."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
        self._packages = tuple(packages)
        self.before = dict(_members())
        self.by_plugin: dict[str, list[str]] = {}
        sys.meta_path.insert(0, self)

    def changed(self) -> list[str]:
        """Dotted names of what isn't what it was, or isn't there any more."""
        now = dict(_members())
        return sorted(name for name, value in self.before.items() if now.get(name) is not value)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a plugin's module as usual, and look at Octavo when it has been executed."""
        if name.partition(".")[0] not in self._packages:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._observe(name, spec.loader)
        return spec

    def _observe(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def observed(module: ModuleType) -> None:
            execute(module)
            self.by_plugin[name] = self.changed()

        loader.exec_module = observed


def _members() -> Iterator[tuple[str, Any]]:
    """Functions and classes of every ``octavo`` module by dotted name, and what the classes define."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "octavo":
            for key, value in list(vars(module).items()):
                if isinstance(value, _WATCHED):
                    yield f"{name}.{key}", value
                if isinstance(value, type) and value.__module__ == name:
                    yield from _class_members(f"{name}.{key}", value)


def _class_members(prefix: str, cls: type) -> Iterator[tuple[str, Any]]:
    for key, value in list(vars(cls).items()):
        if isinstance(value, _WATCHED):
            yield f"{prefix}.{key}", value
