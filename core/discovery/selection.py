"""`select`: which platform, which attention backend for each group, which block size. One pure function.

It sees the configuration and the plugins' entries (manifests and probe results), and returns the choice with a report of every
candidate and every reason. An explicit choice is honoured or the selection fails; nothing is decided anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from octavo.core.api.attention import AttentionGroup
from octavo.core.api.errors import SelectionError
from octavo.core.api.manifest import Reason
from octavo.core.config import EngineConfig
from octavo.core.discovery.attention_selection import AttentionChoice, select_attention
from octavo.core.discovery.platform_selection import select_platform
from octavo.core.discovery.registry import PluginEntry
from octavo.core.discovery.report import Candidate, Report

__all__ = ["Candidate", "Choice", "Chosen", "Report", "select"]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What runs."""

    platform: str
    attention: Mapping[str, str] = field(default_factory=dict)  # group name → backend
    block_size: int | None = None
    ops: Mapping[str, str] = field(default_factory=dict)  # op → implementation, "default" for core's own


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What runs, and the report on every candidate."""

    chosen: Chosen
    report: Report


def select(
    config: EngineConfig,
    entries: Sequence[PluginEntry],
    *,
    groups: Sequence[AttentionGroup] | None = None,
    arch: str | None = None,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
) -> Choice:
    """The choice for ``config``. Without ``groups`` (before the model is known) the platform alone.

    ``arch`` is the device's, when the platform itself has said it; the probe's otherwise. ``dtypes`` are the platform's
    activation dtypes, for advice. Raises `SelectionError` with the report in it.
    """
    platform, candidates = select_platform(config, entries)
    if groups is None:
        return Choice(chosen=Chosen(platform=platform.name), report=Report(candidates=candidates))
    arch = arch or _probed_arch(platform, config.plugins.device)
    try:
        attention: AttentionChoice = select_attention(config, entries, platform, groups, arch, dtypes)
    except SelectionError as error:
        if isinstance(error.report, Report):
            error.report = replace(error.report, candidates=(*candidates, *error.report.candidates))
        raise
    return Choice(
        chosen=Chosen(platform=platform.name, attention=attention.backends, block_size=attention.block_size),
        report=Report(
            candidates=(*candidates, *attention.candidates),
            notices=attention.notices,
            block_size=attention.block_size_reason,
        ),
    )


def _probed_arch(platform: PluginEntry, device: int) -> str | None:
    return next((probed.arch for probed in platform.devices if probed.index == device), None)


def refusal(reasons: Sequence[Reason]) -> str:
    """Reasons on one line."""
    return "; ".join(map(str, reasons))
