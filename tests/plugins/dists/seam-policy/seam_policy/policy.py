"""`ShortestRemainingFirst`."""

from __future__ import annotations

from octavo.api.scheduling import RequestView, SchedulingPolicy

__all__ = ["ShortestRemainingFirst"]


class ShortestRemainingFirst(SchedulingPolicy):
    """The fewest tokens to go first; the one with the most to go is the first to be preempted."""

    name = "seam-shortest"

    def key(self, request: RequestView) -> tuple[float, ...]:
        remaining = request.num_prompt_tokens + request.max_tokens - request.num_tokens
        return (remaining, request.arrival)
