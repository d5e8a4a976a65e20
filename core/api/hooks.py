"""Lifecycle hooks (pluggy). A plugin of kind ``hook`` is an object with any of these, marked with `hookimpl`.

A hook that raises is logged with its plugin's name, disabled and counted; it never takes the engine down. A hook slower than
its budget is reported by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from octavo.core.api.scheduling import SchedulerStats

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig

__all__ = [
    "HookSpecs",
    "hookimpl",
    "hookspec",
]

hookspec = pluggy.HookspecMarker("octavo")
hookimpl = pluggy.HookimplMarker("octavo")


class HookSpecs:
    """The hooks there are."""

    @hookspec
    def octavo_configure(self, config: EngineConfig) -> None:
        """The configuration is resolved; nothing is loaded yet."""

    @hookspec
    def octavo_engine_started(self, config: EngineConfig, info: Mapping[str, Any]) -> None:
        """Workers are ready. ``info``: platform, attention, num_blocks, startup_s."""

    @hookspec
    def octavo_step_finished(self, stats: SchedulerStats, step_s: float) -> None:
        """A step's results were applied."""

    @hookspec
    def octavo_metrics(self) -> Mapping[str, float]:
        """Figures of the plugin's own, merged into the engine's metrics under ``plugin_name/key``."""
        return {}

    @hookspec
    def octavo_engine_stopped(self) -> None:
        """The engine has shut down."""
