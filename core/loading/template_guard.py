"""What a chat template may spend: rounds of loops, seconds, and characters.

The principle: before an operation runs, an upper bound of what it makes is charged. Since every container was charged in full
when it was made (what it holds, counted as often as printing it would print it), nothing small on paper is gigantic when used.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

__all__ = ["Budget", "BudgetExceeded"]

_MAX_STEPS = 200_000  # rounds of loops, and calls; a long conversation takes thousands
_MAX_SECONDS = 5.0
_MAX_TOTAL_CHARS = 256 << 20  # of everything made on the way
_MAX_VALUE_CHARS = 16 << 20  # of one value
_MAX_VALUE_ITEMS = 200_000  # texts, numbers and containers inside one value
_MAX_INTEGER_BITS = 4096
_MAX_WIDTH = 1000
_WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*(\d{4}|\*)")
"""A ``%`` format whose width has four digits, or comes from an argument."""


class BudgetExceeded(SecurityError):
    """A template asked for more work or memory than any honest one does."""


class Budget:
    """What one rendering may spend. Every method raises `BudgetExceeded`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._steps = 0
        self._chars = 0
        self._deadline = time.monotonic() + _MAX_SECONDS

    def step(self, chars: int = 0) -> str:
        """One round of a loop, or one call, that prints ``chars`` characters of the template's own text."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise BudgetExceeded(f"it takes more than {_MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise BudgetExceeded(f"it runs longer than {_MAX_SECONDS:g} s")
        self.charge(chars)
        return ""

    def charge(self, chars: int) -> None:
        """``chars`` characters, or items, are about to be made."""
        self._chars += chars
        if chars > _MAX_VALUE_CHARS or self._chars > _MAX_TOTAL_CHARS:
            raise BudgetExceeded("it makes gigantic values")

    def charged(self, value: Any) -> Any:
        """``value``, paid for in full."""
        self.charge(weight(value))
        return value

    def joined(self, *parts: Any) -> str:
        """What ``~`` does: the parts' text, end to end."""
        self.charge(sum(map(weight, parts)))
        return "".join(map(str, parts))

    def check_operands(self, operator: str, left: Any, right: Any) -> None:
        """Before ``left operator right``."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "*" and numbers:
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and numbers:
            _check_bits(left.bit_length() * abs(right))
        elif operator == "*":
            sequence, times = (left, right) if isinstance(right, int) else (right, left)
            self.charge(weight(sequence) * max(times, 0) if isinstance(times, int) else weight(sequence))
        elif operator == "%" and isinstance(left, str):
            self.check_format(left, right)
        else:
            self.charge(weight(left) + weight(right))

    def check_format(self, format: str, *values: Any) -> None:
        """Before a ``%`` format: no gigantic width, and room for every value at every place."""
        if _WIDE_FORMAT.search(format):
            raise BudgetExceeded("it formats with a gigantic or computed width")
        self.charge(len(format) + format.count("%") * (sum(map(weight, values)) + _MAX_WIDTH))

    def check_replace(self, text: Any, old: Any, new: Any) -> None:
        size = weight(text)
        matches = str(text).count(old) if isinstance(old, str) and size <= _MAX_VALUE_CHARS else size + 1
        self.charge(size + matches * weight(new))

    def check_join(self, items: Sequence[Any], separator: Any) -> None:
        self.charge(sum(map(weight, items)) + len(items) * weight(separator))

    def check_indent(self, text: Any, width: Any) -> None:
        if isinstance(width, int) and width > _MAX_WIDTH:
            raise BudgetExceeded(f"it indents by {width}")
        size = weight(text)
        per_line = width if isinstance(width, int) else weight(width)
        self.charge(size + (str(text).count("\n") + 1) * max(per_line, 0) if size <= _MAX_VALUE_CHARS else size)


def weight(value: Any) -> int:
    """An upper bound of the characters, or items, that printing ``value`` makes; it stops counting where it is too much."""
    if isinstance(value, str):
        return len(value)
    total = items = 0
    waiting = [value]
    while waiting and total <= _MAX_VALUE_CHARS:
        item = waiting.pop()
        items += 1
        if items > _MAX_VALUE_ITEMS:
            return _MAX_VALUE_CHARS + 1
        if isinstance(item, (str, bytes)):
            total += 2 + len(item)
        elif isinstance(item, Mapping):
            total += 2 + 4 * len(item)
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
            total += 2 + 2 * len(item)
            waiting.extend(item)
        elif isinstance(item, Namespace):
            total += 16
            waiting.append(item._Namespace__attrs)
        elif isinstance(item, int):
            total += 1 + item.bit_length() // 3
        else:
            total += 64
    return total


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise BudgetExceeded("it computes a gigantic number")
