"""A metrics hook."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.api.hooks import hookimpl
from octavo.api.scheduling import SchedulerStats


class StepCounter:
    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def octavo_step_finished(self, stats: SchedulerStats, step_s: float) -> None:
        self.steps += 1

    @hookimpl
    def octavo_metrics(self) -> Mapping[str, float]:
        return {"steps": self.steps}
