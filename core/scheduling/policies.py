"""The policies that ship with Octavo. Another one is a plugin of kind ``scheduling_policy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from octavo.core.api.scheduling import SchedulingPolicy

if TYPE_CHECKING:
    from octavo.core.scheduling.state import RequestView


class FirstComeFirstServed(SchedulingPolicy):
    """In the order of arrival; the last to come is the first to be preempted."""

    name: ClassVar[str] = "fcfs"

    def key(self, request: RequestView) -> tuple[float, ...]:
        return (request.arrival,)


class Priority(SchedulingPolicy):
    """Lower ``priority`` first, then in the order of arrival; the highest number is the first to be preempted."""

    name: ClassVar[str] = "priority"

    def key(self, request: RequestView) -> tuple[float, ...]:
        return (request.priority, request.arrival)
