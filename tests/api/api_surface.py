"""What `octavo.api` offers, as lines of text; how two such listings differ; and whether the changelog says so.

Run as a script it rewrites the snapshot, ``tests/api/octavo-api.txt``, once the changelog names every difference::

    python tests/api/api_surface.py
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("octavo-api.txt")
CHANGELOG = ROOT / "CHANGELOG.md"
_MARKS = ("abstractmethod", "classmethod", "staticmethod", "property", "runtime_checkable")
_PUBLIC_DUNDERS = ("__init__", "__call__")


@dataclass(frozen=True, kw_only=True)
class Surface:
    """``members``: dotted name, from the module on, to what it is. Parameters are ``module.Class.method(name)``."""

    version: tuple[int, int]
    provisional: bool
    members: Mapping[str, str]

    def text(self) -> str:
        version = ".".join(map(str, self.version)) + (" provisional" if self.provisional else "")
        return (
            "\n".join([f"octavo.api {version}", *(f"{name} :: {what}" for name, what in sorted(self.members.items()))]) + "\n"
        )

    @staticmethod
    def parse(text: str) -> Surface:
        head, *lines = text.splitlines()
        words = head.split()
        major, minor = words[1].split(".")
        members = dict(line.split(" :: ", 1) for line in lines)
        return Surface(version=(int(major), int(minor)), provisional="provisional" in words[2:], members=members)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference. ``breaks``: a plugin written against the old surface may stop working."""

    name: str
    what: str
    breaks: bool

    def __str__(self) -> str:
        return f"octavo.api.{self.name}: {self.what}" + (" (breaks plugins)" if self.breaks else "")


def read_surface(provisional: bool) -> Surface:
    """The surface of the checkout: names from each module's ``__all__``, the rest from griffe's reading of the source."""
    import octavo.api

    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], allow_inspection=False)
    loader.load("octavo.api")
    loader.resolve_aliases(implicit=True, external=False)
    package = loader.modules_collection["octavo.api"]
    members: dict[str, str] = {}
    for module in pkgutil.iter_modules(octavo.api.__path__):
        exported = importlib.import_module(f"octavo.api.{module.name}").__all__
        for name in exported:
            members |= _describe(f"{module.name}.{name}", package[module.name][name])
    return Surface(version=octavo.api.API_VERSION, provisional=provisional, members=members)


def compare(old: Surface, new: Surface) -> list[Change]:
    """Differences, outermost only: a class that is gone or new doesn't list its members."""
    gone = dict.fromkeys(old.members.keys() - new.members.keys(), "is gone")
    fresh = new.members.keys() - old.members.keys()
    changed = {name for name in old.members.keys() & new.members.keys() if old.members[name] != new.members[name]}
    changes = [Change(name=name, what=what, breaks=True) for name, what in gone.items() if _owner(name) not in gone]
    changes += [Change(name=name, what=f"was {old.members[name]!r}, is {new.members[name]!r}", breaks=True) for name in changed]
    changes += [
        Change(name=name, what=f"is new: {new.members[name]!r}", breaks=_asks_for_more(name, new))
        for name in fresh
        if _owner(name) not in fresh
    ]
    return sorted(changes, key=lambda change: change.name)


def unannounced(changes: list[Change], changelog: str) -> list[Change]:
    """Changes that no ``- **api**`` line of the newest section names in backquotes: `Class.method`, or `octavo.api.module`."""
    newest = changelog.split("\n## ")[1]
    lines = [line for line in re.split(r"\n(?=- )", newest) if line.startswith("- **api**")]
    named = set(re.findall(r"`([^`]+)`", "\n".join(lines)))
    return [change for change in changes if not _names(change.name) & named]


def _names(key: str) -> set[str]:
    """What the changelog may call it: a parameter by its function, anything by its module."""
    module, _, member = key.partition(".")
    return {member.partition("(")[0].partition("[")[0], f"octavo.api.{module}", f"octavo.api.{module}.{member}"}


def _owner(name: str) -> str:
    """The member that this one belongs to; the module itself for a module's own."""
    if name.endswith(")"):
        return name.partition("(")[0]
    if name.endswith("]"):
        return name.partition("[")[0]
    return name.rpartition(".")[0]


def _asks_for_more(name: str, new: Surface) -> bool:
    """Whether a new member makes plugins lack something: a class that they derive from, or a value that they must now give."""
    owner = _owner(name)
    required = " = " not in new.members[name]
    if name.endswith(")"):
        return required or _implemented_by_plugins(_owner(owner), new)
    what = new.members.get(owner, "")
    if "Protocol" in what and name != owner:
        return True
    return new.members[name].startswith("abstractmethod") or (new.members[name].startswith("field") and required)


def _implemented_by_plugins(name: str, surface: Surface) -> bool:
    """Whether the class is an ABC or a Protocol, itself or through its bases."""
    what = surface.members.get(name, "")
    bases = re.findall(r"\w+", what.partition("(")[2]) if what.startswith("class") else []
    if {"ABC", "Protocol"} & set(bases):
        return True
    classes = {key.rpartition(".")[2]: key for key, value in surface.members.items() if value.startswith("class")}
    return any(_implemented_by_plugins(classes[base], surface) for base in bases if base in classes and classes[base] != name)


def _describe(name: str, member: griffe.Object | griffe.Alias) -> dict[str, str]:
    target = member.final_target if member.is_alias else member
    if target.is_class:
        return dict(_class(name, target))
    if target.is_function:
        return dict(_function(name, target))
    return dict(_attribute(name, target, "constant"))


def _class(name: str, cls: griffe.Object) -> Iterator[tuple[str, str]]:
    decorators = "".join(f" @{decorator.value}" for decorator in cls.decorators)
    yield name, f"class({', '.join(map(str, cls.bases))}{_struct_options(cls)}){decorators}"
    made_from_fields = "kw_only=True" in decorators  # then the constructor says nothing that the fields don't
    for key, member in cls.members.items():
        if (key.startswith("_") and key not in _PUBLIC_DUNDERS) or (key == "__init__" and made_from_fields):
            continue
        if member.is_function:
            yield from _function(f"{name}.{key}", member)
        elif member.is_attribute:
            yield from _attribute(f"{name}.{key}", member, "property" if "property" in member.labels else "field")


def _struct_options(cls: griffe.Object) -> str:
    """Keywords after the bases (msgspec's ``frozen``, ``kw_only``, …), which decide how the class is made."""
    return "".join(f", {key}={value}" for key, value in sorted(getattr(cls, "keywords", {}).items()))


def _function(name: str, function: griffe.Object) -> Iterator[tuple[str, str]]:
    marks = [mark for mark in _MARKS if mark in {str(decorator.value) for decorator in function.decorators}]
    yield name, f"{' '.join([*marks, 'function'])} -> {function.returns}"
    position = 0
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = "keyword"
        if parameter.kind in (griffe.ParameterKind.positional_only, griffe.ParameterKind.positional_or_keyword):
            kind, position = f"positional {position}", position + 1
        default = "" if parameter.default is None else f" = {parameter.default}"
        yield f"{name}({parameter.name})", f"{kind}: {parameter.annotation}{default}"


def _attribute(name: str, attribute: griffe.Object, word: str) -> Iterator[tuple[str, str]]:
    """A constant, a field, a property; closed vocabularies word by word, so that a new word is an addition."""
    value = None if attribute.value is None else str(attribute.value)
    if "instance-attribute" in attribute.labels and attribute.annotation is None:
        value = None  # what a constructor assigns isn't a default
    if value is not None and value.startswith("option("):
        value = value.partition(", help=")[0]  # the help text promises nothing
    what = word if attribute.annotation is None else f"{word}: {attribute.annotation}"
    words = _words(value)
    if words is not None:
        yield name, f"{what} of words"
        yield from ((f"{name}['{one}']", "word") for one in words)
    elif word == "constant" and str(attribute.annotation) != "TypeAlias" and value is not None and len(value) > 60:
        yield name, what
    else:
        yield name, what + ("" if value is None else f" = {value}")


def _words(value: str | None) -> list[str] | None:
    """The strings of ``Literal['a', 'b']`` or of a tuple of strings; None for anything else."""
    if value is None:
        return None
    text = value[len("Literal") :] if value.startswith("Literal[") else value
    try:
        parsed = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    is_words = isinstance(parsed, (tuple, list)) and parsed and all(isinstance(one, str) for one in parsed)
    return [str(one) for one in parsed] if is_words else None


def main() -> int:
    old = Surface.parse(SNAPSHOT.read_text()) if SNAPSHOT.exists() else None
    new = read_surface(old is None or old.provisional)
    missing = [] if old is None else unannounced(compare(old, new), CHANGELOG.read_text())
    if missing:
        print(f"{CHANGELOG.name} must name these in a '- **api**' line first:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    SNAPSHOT.write_text(new.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
