"""Stop strings: found across token boundaries, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["StopMatch", "StopStrings"]


class StopMatch(NamedTuple):
    """A stop string at ``start`` … ``end`` of the text."""

    string: str
    start: int
    end: int


class StopStrings:
    """The stop strings of one request."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._longest = max(map(len, self.strings), default=0)

    def find(self, text: str, num_new: int) -> StopMatch | None:
        """The match that ends first, the longest of those, among the matches that end in the last ``num_new`` characters.

        So the result doesn't depend on how the text was cut into tokens.
        """
        if not self.strings or not num_new:
            return None
        base = max(0, len(text) - num_new - self._longest + 1)
        best: StopMatch | None = None
        for string in self.strings:
            start = text.find(string, max(base, len(text) - num_new - len(string) + 1))
            if start < 0:
                continue
            match = StopMatch(string, start, start + len(string))
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
        return best

    def num_held(self, text: str) -> int:
        """How many of the text's last characters may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(string) > length and string.startswith(tail) for string in self.strings):
                return length
        return 0
