"""One block size for every group: the operator's, or the one that all chosen backends allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.core.api.manifest import IntRange

PREFERRED = 16
_LARGEST_TRIED = 1024


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What one group's backend allows, and the test that decides (lists, ``except`` and ``withheld`` rules together)."""

    group: str
    backend: str
    allowed: IntRange
    accepts: Callable[[int], bool]

    def __str__(self) -> str:
        return f"{self.backend} ({self.group}) allows {self.allowed}"


def solve_block_size(constraints: Sequence[Constraint], wanted: int | None = None) -> int | None:
    """``wanted`` if everyone accepts it; without it the best size for all. None when there is no such size."""
    sizes = _in_order_of_preference(constraints) if wanted is None else iter((wanted,))
    return next((size for size in sizes if all(constraint.accepts(size) for constraint in constraints)), None)


def _in_order_of_preference(constraints: Sequence[Constraint]) -> Iterator[int]:
    """16 first, then larger sizes, smallest first, then smaller ones, largest first."""
    named = {size for constraint in constraints for size in constraint.allowed.values}
    steps = {constraint.allowed.multiple_of or 0 for constraint in constraints}
    sizes = sorted({*range(1, _LARGEST_TRIED + 1), *named, *steps} - {0})
    yield from (size for size in sizes if size >= PREFERRED)
    yield from (size for size in reversed(sizes) if size < PREFERRED)
