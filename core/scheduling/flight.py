"""`Flight`: the steps that are planned and have no result yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.errors import EngineError
from octavo.core.api.scheduling import IntArray, StartedRequest
from octavo.core.kv_cache.manager import KVCacheManager


@dataclass(slots=True)
class PlannedStep:
    """What the scheduler remembers of a step until its result is there."""

    number: int
    slots: IntArray  # its rows
    samples: NDArray[np.bool_] | None = None  # rows that are sampled; None = all
    started: Sequence[StartedRequest] = ()


class Flight:
    """Steps in flight, oldest first; keeps the block pools informed of them."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._steps: deque[PlannedStep] = deque()
        self.num_planned = 0  # number of the next step
        self.last_done = -1

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_planned(self) -> int:
        return self.num_planned - 1

    def launch(self, step: PlannedStep) -> None:
        self._steps.append(step)
        self.num_planned += 1
        self._kv.set_in_flight(self.last_planned, self.last_done)

    def land(self, number: int) -> PlannedStep:
        """The oldest step, whose result has this number. Raises `EngineError` if that isn't its number."""
        if not self._steps or self._steps[0].number != number:
            due = f"step {self._steps[0].number}'s was due" if self._steps else "none was due"
            raise EngineError(
                f"the result of step {number} came when {due}; an executor gives each plan's result once, in order"
            )
        step = self._steps.popleft()
        self.last_done = number
        self._kv.set_in_flight(self.last_planned, number)
        return step
