"""The kinds of value that an ``octavo-plugin.toml`` may hold. Each reads TOML into Python and describes itself as JSON Schema.

Readers never raise: what is wrong goes to `Problems`, one line each, so that one pass finds everything.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.core.api.manifest import IntRange
from octavo.core.config.suggest import nearest

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
TARGET = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
ARCH = r"^(<=|>=|==|<|>|!=)?[A-Za-z0-9._-]+$"
API = r"^[0-9]{1,4}\.[0-9]{1,4}$"


@dataclass
class Problems:
    """What is wrong with one file, in the order found: ``(key, message)``."""

    found: list[tuple[str, str]] = field(default_factory=list)

    def add(self, key: str, message: str) -> None:
        self.found.append((key, message))


class Value(ABC):
    """A kind of value."""

    @abstractmethod
    def read(self, value: Any, key: str, problems: Problems) -> Any:
        """The value as Python keeps it; None when it is wrong, then ``problems`` has a line for ``key``."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the value."""


@dataclass(frozen=True)
class Text(Value):
    """A string, of a pattern or among a closed list of words."""

    pattern: str | None = None
    expected: str = "a string"
    words: tuple[str, ...] = ()

    def read(self, value: Any, key: str, problems: Problems) -> str | None:
        if not isinstance(value, str):
            problems.add(key, f"must be {self.expected}, not {_kind(value)}")
            return None
        if self.words and value not in self.words:
            problems.add(key, f"{value!r} isn't one of {', '.join(self.words)}" + nearest(value, self.words))
            return None
        if self.pattern and not re.fullmatch(self.pattern, value):
            problems.add(key, f"must be {self.expected}, not {value!r}")
            return None
        return value

    def schema(self) -> dict[str, Any]:
        if self.words:
            return {"enum": list(self.words)}
        return {"type": "string", **({"pattern": self.pattern} if self.pattern else {})}


@dataclass(frozen=True)
class Flag(Value):
    """true or false."""

    def read(self, value: Any, key: str, problems: Problems) -> bool | None:
        if not isinstance(value, bool):
            problems.add(key, f"must be true or false, not {_kind(value)}")
            return None
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class ListOf(Value):
    """A list of texts, each at most once."""

    item: Text

    def read(self, value: Any, key: str, problems: Problems) -> tuple[str, ...] | None:
        if not isinstance(value, list):
            problems.add(key, f"must be a list, not {_kind(value)}")
            return None
        items = [self.item.read(item, f"{key}[{index}]", problems) for index, item in enumerate(value)]
        good = [item for item in items if item is not None]
        for item in sorted({item for item in good if good.count(item) > 1}):
            problems.add(key, f"{item!r} is listed twice")
        return tuple(good) if len(good) == len(items) else None

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema(), "uniqueItems": True}


@dataclass(frozen=True)
class Requirements(Value):
    """A list of requirements in pip's notation: ``["acme-kernels>=2,<3"]``."""

    def read(self, value: Any, key: str, problems: Problems) -> tuple[str, ...] | None:
        texts = ListOf(Text(expected="a requirement")).read(value, key, problems)
        if not texts:
            return texts
        from packaging.requirements import InvalidRequirement, Requirement

        for index, text in enumerate(texts):
            try:
                Requirement(text)
            except InvalidRequirement as error:
                problems.add(f"{key}[{index}]", f"{text!r} isn't a requirement ({str(error).splitlines()[0]})")
        return texts

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@dataclass(frozen=True)
class Integers(Value):
    """An `IntRange`: a list of positive integers, or ``{ multiple_of = 16, max = 256 }``."""

    def read(self, value: Any, key: str, problems: Problems) -> IntRange | None:
        if isinstance(value, list):
            return self._listed(value, key, problems)
        if isinstance(value, Mapping):
            return self._multiples(value, key, problems)
        problems.add(key, f"must be a list of integers or {{ multiple_of, max }}, not {_kind(value)}")
        return None

    def _listed(self, value: list[Any], key: str, problems: Problems) -> IntRange | None:
        bad = [item for item in value if not _positive(item)]
        for item in bad:
            problems.add(key, f"must hold positive integers, not {item!r}")
        if len(set(map(repr, value))) < len(value):
            problems.add(key, "lists a number twice")
            return None
        return None if bad else IntRange(values=tuple(value))

    def _multiples(self, value: Mapping[str, Any], key: str, problems: Problems) -> IntRange | None:
        before = len(problems.found)
        for name in value:
            if name not in ("multiple_of", "max"):
                problems.add(f"{key}.{name}", "unknown key" + nearest(name, ("multiple_of", "max")))
        if "multiple_of" not in value:
            problems.add(f"{key}.multiple_of", "is missing")
        for name in ("multiple_of", "max"):
            if name in value and not _positive(value[name]):
                problems.add(f"{key}.{name}", f"must be a positive integer, not {value[name]!r}")
        if len(problems.found) > before:
            return None
        step, top = value["multiple_of"], value.get("max")
        if top is not None and top < step:
            problems.add(f"{key}.max", f"is below multiple_of ({top} < {step}), which allows nothing; write [] for that")
            return None
        return IntRange(multiple_of=step, max=top)

    def schema(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": 1}
        multiples = {
            "type": "object",
            "properties": {"multiple_of": number, "max": number},
            "required": ["multiple_of"],
            "additionalProperties": False,
        }
        return {"oneOf": [{"type": "array", "items": number, "uniqueItems": True}, multiples]}


@dataclass(frozen=True)
class Key:
    """One key of a table: what it holds, whether it must be there, what it is for, and the name of the Python field."""

    value: Value
    help: str
    required: bool = False
    field: str = ""


@dataclass(frozen=True)
class Table(Value):
    """A table with a closed set of keys; read into keyword arguments for its dataclass."""

    keys: Mapping[str, Key]
    build: Any = dict

    def read(self, value: Any, key: str, problems: Problems, **given: Any) -> Any:
        if not isinstance(value, Mapping):
            problems.add(key, f"must be a table, not {_kind(value)}")
            return None
        before = len(problems.found)
        for name in value:
            if name not in self.keys:
                problems.add(_join(key, name), "unknown key" + nearest(name, self.keys))
        for name, entry in self.keys.items():
            if name in value:
                given[entry.field or name] = entry.value.read(value[name], _join(key, name), problems)
            elif entry.required:
                problems.add(_join(key, name), f"is missing ({entry.help})")
        return self.build(**given) if len(problems.found) == before else None

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: {"description": key.help, **key.value.schema()} for name, key in self.keys.items()},
            "required": [name for name, key in self.keys.items() if key.required],
            "additionalProperties": False,
        }


@dataclass(frozen=True)
class Tables(Value):
    """An array of tables: ``[[attention.acme.except]]``."""

    table: Table

    def read(self, value: Any, key: str, problems: Problems) -> tuple[Any, ...] | None:
        if not isinstance(value, list):
            problems.add(key, f"must be an array of tables, not {_kind(value)}")
            return None
        rows = [self.table.read(row, f"{key}[{index}]", problems) for index, row in enumerate(value)]
        return None if any(row is None for row in rows) else tuple(rows)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.table.schema()}


def words(vocabulary: Iterable[str]) -> ListOf:
    """A list of words from a closed vocabulary."""
    return ListOf(Text(words=tuple(sorted(vocabulary))))


def names(what: str) -> ListOf:
    return ListOf(Text(NAME, f"the name of {what}"))


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "a table"}
    return kinds.get(type(value), type(value).__name__) + (f" ({value!r})" if not isinstance(value, (list, dict)) else "")
