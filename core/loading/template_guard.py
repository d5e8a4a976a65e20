"""Bounds for chat templates: how many rounds, how long, and how large what they make may become."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError

__all__ = ["Budget", "BudgetExceeded", "check_call", "check_operands", "joined"]

_MAX_STEPS = 1_000_000  # rounds of loops and calls of macros; a long conversation takes thousands
_MAX_SECONDS = 10.0
_MAX_OUTPUT_CHARS = 16 << 20
_MAX_ITEMS = 4 << 20  # characters of a string or items of a list that one operation may make
_MAX_WIDTH = 100_000  # a padding, an indent, a batch
_MAX_POWER_BITS = 4096
_WIDE_FORMAT = re.compile(r"\d{6,}|%[-+ #0]*\*|\{[^{}]*\{")
"""A width of six digits or more, or one taken from an argument, in either of Python's format languages."""


class BudgetExceeded(SecurityError):
    """A template asked for more work or memory than any honest one does."""


class Budget:
    """What one rendering may spend."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._steps = 0
        self._output_chars = 0
        self._deadline = time.monotonic() + _MAX_SECONDS

    def spend_step(self) -> str:
        """One round of a loop or one call of a macro. Raises `BudgetExceeded`."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise BudgetExceeded(f"it loops more than {_MAX_STEPS} times")
        if not self._steps & 0xFF and time.monotonic() > self._deadline:
            raise BudgetExceeded(f"it runs longer than {_MAX_SECONDS:g} s")
        return ""

    def spend_output(self, chars: int) -> None:
        self._output_chars += chars
        if self._output_chars > _MAX_OUTPUT_CHARS:
            raise BudgetExceeded(f"it makes more than {_MAX_OUTPUT_CHARS} characters")
        if time.monotonic() > self._deadline:
            raise BudgetExceeded(f"it runs longer than {_MAX_SECONDS:g} s")


def joined(*parts: Any) -> str:
    """What ``~`` does: the parts' text, end to end."""
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Before ``left operator right``. Raises `BudgetExceeded` when the result would be gigantic."""
    if operator == "+" and _sized(left) and _sized(right):
        _check_size(len(left) + len(right))
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if _sized(sequence) and isinstance(times, int):
                _check_size(len(sequence) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)


def check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Before a method or filter runs: refuses widths and formats that would make something gigantic of small arguments."""
    name = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    everything = [*([owner] if isinstance(owner, (str, list)) else []), *args, *kwargs.values()]
    if name != "range":
        for value in everything:
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MAX_WIDTH and name in _WIDENING:
                raise BudgetExceeded(f"it pads or repeats {value} times")
    texts = [value for value in everything if isinstance(value, str)]
    if name in ("format", "format_map", "do_format"):
        for text in texts:
            _check_format(text)
    if name in ("replace", "do_replace", "translate", "join", "sync_do_join", "do_indent", "expandtabs", "do_wordwrap"):
        _check_growth(name, everything, texts)


_WIDENING = frozenset(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "do_center", "do_indent", "do_batch", "sync_do_slice", "do_slice",
     "do_wordwrap", "_to_json", "do_round", "round", "do_tojson", "do_pprint"]
)  # fmt: skip


def _check_growth(name: str, everything: Sequence[Any], texts: Sequence[str]) -> None:
    """An upper bound of what replacing, joining and indenting make: pieces times the longest insertion."""
    longest = max(map(len, texts), default=0)
    if name in ("join", "sync_do_join"):
        items = max((len(value) for value in everything if isinstance(value, (list, tuple))), default=longest)
        inner = sum(
            len(value) for values in everything if isinstance(values, (list, tuple)) for value in values if _sized(value)
        )
        _check_size(inner + items * min(map(len, texts), default=0))
    elif texts:
        widths = [abs(value) for value in everything if isinstance(value, int)]
        insertion = max([*(len(text) for text in texts[1:]), *widths, 1])
        pieces = texts[0].count(texts[1]) if name in ("replace", "do_replace") and len(texts) > 1 else _breaks(texts[0])
        _check_size(len(texts[0]) + pieces * insertion)


def _breaks(text: str) -> int:
    return text.count("\n") + text.count("\t") + 1


def _check_format(format: str) -> None:
    if _WIDE_FORMAT.search(format):
        raise BudgetExceeded("it formats with a gigantic or computed width")


def _sized(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))


def _check_size(items: int) -> None:
    if items > _MAX_ITEMS:
        raise BudgetExceeded(f"it makes a value of {items} items")


def _check_bits(bits: int) -> None:
    if bits > _MAX_POWER_BITS:
        raise BudgetExceeded("it computes a gigantic number")
