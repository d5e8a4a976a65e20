"""`WaitingQueue`: requests without a slot, in the policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from octavo.core.api.errors import PluginError
from octavo.core.api.scheduling import SchedulingPolicy
from octavo.core.scheduling.state import RequestState, Status


class WaitingQueue:
    """A heap; a request that ends while it waits is dropped when it comes to the top, or when there are many of them."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], int, int, int, RequestState]] = []
        self._count = 0
        self._pushed = 0

    def __len__(self) -> int:
        return self._count

    def push(self, state: RequestState) -> None:
        """Raises `PluginError`, and queues nothing, when the policy gives no key."""
        try:
            key = self._policy.key(state)
        except Exception as error:
            name, why = type(self._policy).__name__, f"{type(error).__name__}: {error}"
            raise PluginError(f"scheduling policy {name} gave no key for request {state.request_id!r}: {why}") from error
        state.status = Status.WAITING
        self._count += 1
        self._pushed += 1
        heapq.heappush(self._heap, (key, state.arrival, state.index, self._pushed, state))

    def peek(self) -> RequestState | None:
        while self._heap and self._heap[0][-1].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> RequestState:
        """Take out what `peek` gave."""
        self._count -= 1
        return heapq.heappop(self._heap)[-1]

    def discard(self, state: RequestState) -> None:
        """The request ends while it waits."""
        assert state.status is Status.WAITING
        state.status = Status.FINISHED
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [entry for entry in self._heap if entry[-1].status is Status.WAITING]
            heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[RequestState]:
        return (entry[-1] for entry in self._heap if entry[-1].status is Status.WAITING)
