"""`Situation`: what backends and ops are measured against, and the reasons that both can have against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.api.attention import AttentionGroup
from octavo.core.api.manifest import Reason
from octavo.core.config import EngineConfig
from octavo.core.discovery.registry import PluginEntry
from octavo.core.discovery.report import state_reasons

_ANY_PLATFORM = "*"


@dataclass(frozen=True)
class Situation:
    """The configuration, the platform that was chosen with its device's ``arch``, and the model's attention groups."""

    config: EngineConfig
    platform: PluginEntry
    arch: str | None
    groups: Sequence[AttentionGroup]

    def unfit(self, entry: PluginEntry) -> tuple[Reason, ...]:
        """Why the plugin can't be used here whatever is asked of it: its state, or its platforms. Empty when it can."""
        unusable = state_reasons(entry)
        if unusable:
            return unusable
        platforms = entry.table.platforms
        torch_arrays = self.platform.table.device_type != "none"
        if self.platform.name in platforms or (_ANY_PLATFORM in platforms and torch_arrays):
            return ()
        return (Reason(field="platform", wanted=self.platform.name, supported=", ".join(platforms) or "none"),)
