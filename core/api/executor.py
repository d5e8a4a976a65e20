"""`Executor` reaches workers; a `Worker` runs steps on one device. Workers compose, nobody subclasses one."""

from __future__ import annotations

from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo.core.api.kv_cache import KVGroupInfo
from octavo.core.api.scheduling import StepPlan, StepResult

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig

__all__ = [
    "Executor",
    "ExecutorInfo",
    "Worker",
    "WorkerFactory",
    "WorkerInfo",
    "WorkerMethod",
]


class WorkerMethod(Enum):
    """What an executor can ask of its workers besides steps. Closed: plugins use EXTENSION."""

    KV_MEMORY = "kv_memory"  # () → {"kv_bytes": …, "free_bytes": …, "peak_bytes": …}
    COUNTERS = "counters"  # () → {"host_to_device": …, "device_to_host": …, …} since start
    ATTENTION_RUNS = "attention_runs"  # () → {layer index: name of the backend that ran it}
    EXTENSION = "extension"  # (name: str, payload: bytes) → bytes


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says once its memory is allocated."""

    kv: tuple[KVGroupInfo, ...]
    vocab_size: int
    weights_bytes: int
    attention: dict[str, str]  # group name → backend that the worker loaded


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor says once its workers are ready."""

    kv: tuple[KVGroupInfo, ...]
    vocab_size: int
    num_workers: int
    max_in_flight: int  # steps that may be submitted before the first has its result; > 1 allows asynchronous scheduling
    attention: dict[str, str]


class Worker(Protocol):
    """One device's part of the engine. Calls come in this order; ``execute`` repeats."""

    def load(self) -> None:
        """Bind the device, load plugins and weights, build the backends. Raises typed errors."""

    def kv_groups(self) -> tuple[KVGroupInfo, ...]:
        """The KV groups and how many blocks the memory allowance gives each; nothing is allocated yet."""

    def allocate(self, groups: tuple[KVGroupInfo, ...]) -> WorkerInfo:
        """Allocate the caches as the engine settled them (the same groups, maybe fewer blocks)."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""

    def call(self, method: WorkerMethod, **kwargs: Any) -> Any:
        """Answer a `WorkerMethod`."""

    def close(self) -> None:
        """Give everything back. May be called at any time, more than once."""


class WorkerFactory(Protocol):
    """Makes a `Worker`; core's own is ``octavo.core.worker.worker:make_worker``."""

    def __call__(self, config: EngineConfig, rank: int, device: int) -> Worker: ...


class Executor(Protocol):
    """Reaches workers: in this process, in others, on other machines. Constructed without arguments."""

    def start(self, config: EngineConfig) -> ExecutorInfo:
        """Start the workers on a resolved configuration (every choice in it is explicit) and allocate their caches."""

    def execute(self, step: StepPlan) -> Future[StepResult]:
        """Submit a step; at most ``max_in_flight`` may be without a result. Results come in order."""

    def call(self, method: WorkerMethod, **kwargs: Any) -> list[Any]:
        """Ask every worker; answers by rank."""

    def check_health(self) -> None:
        """Raises `WorkerDied` if a worker is gone or doesn't answer.

        The engine asks about once a second while it waits for a step's result, and never while results come sooner. Whatever
        is raised stops it, as a failed step does; a result that comes meanwhile isn't seen until this returns. Ctrl-C may
        interrupt it (`KeyboardInterrupt`), and it is asked again at the next wait.
        """

    def shutdown(self) -> None:
        """Stop the workers and leave no process behind. May be called more than once."""
