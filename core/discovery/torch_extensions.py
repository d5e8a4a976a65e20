"""Packages that torch itself imports when it is imported (its entry-point group ``torch.backends``).

One that is broken breaks ``import torch`` for everybody. Only metadata is read here.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "torch.backends"


@dataclass(frozen=True)
class TorchExtension:
    """One autoloaded extension and the distribution that brings it."""

    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


def torch_extensions() -> tuple[TorchExtension, ...]:
    """What torch would load on import, unless told not to."""
    import importlib_metadata

    return tuple(
        TorchExtension(point.name, point.dist.name if point.dist else "?", point.dist.version if point.dist else "?")
        for point in importlib_metadata.entry_points(group=GROUP)
    )
