"""Near matches for names that people mistyped."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x' or 'y'?"``, or ``""`` when nothing is near."""
    names = list(known)
    begun = [other for other in names if len(name) >= 3 and other.startswith(name)]
    near = list(dict.fromkeys([*get_close_matches(name, names, n=3, cutoff=0.5), *begun]))[:3]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
