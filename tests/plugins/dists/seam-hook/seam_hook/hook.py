"""`StepMetrics`: how many steps there were, and what the engine said when it started and stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.api.config import EngineConfig
from octavo.api.hooks import hookimpl
from octavo.api.scheduling import SchedulerStats

__all__ = ["StepMetrics"]


class StepMetrics:
    seen: list[str] = []  # noqa: RUF012 - of every engine in the process, for whoever looks from outside

    def __init__(self) -> None:
        self.steps = 0
        self.most_running = 0
        self.seconds = 0.0

    @hookimpl
    def octavo_configure(self, config: EngineConfig) -> None:
        self.seen.append(f"configure {config.plugins.platform}")

    @hookimpl
    def octavo_engine_started(self, info: Mapping[str, Any]) -> None:
        self.seen.append(f"started {sorted(info['attention'].values())}")

    @hookimpl
    def octavo_step_finished(self, stats: SchedulerStats, step_s: float) -> None:
        self.steps += 1
        self.seconds += step_s
        self.most_running = max(self.most_running, stats.num_running)

    @hookimpl
    def octavo_metrics(self) -> Mapping[str, float]:
        return {"steps": self.steps, "most_running": self.most_running, "step_seconds": self.seconds}

    @hookimpl
    def octavo_engine_stopped(self) -> None:
        self.seen.append("stopped")
