"""A scheduling policy."""

from __future__ import annotations

from octavo.api.scheduling import RequestView, SchedulingPolicy


class ShortestFirst(SchedulingPolicy):
    name = "frozen-policy"

    def key(self, request: RequestView) -> tuple[float, ...]:
        return (request.num_prompt_tokens, request.arrival)
