"""`InlineExecutor`: one worker in this process, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from octavo.core.api.errors import EngineError, OctavoError
from octavo.core.api.executor import ExecutorInfo, Worker, WorkerMethod
from octavo.core.api.scheduling import StepPlan, StepResult
from octavo.core.discovery.loading import root_cause

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig

__all__ = ["InlineExecutor", "Launched", "PipelinedWorker"]

_T = TypeVar("_T")
_MAX_IN_FLIGHT = 2


class Launched(Protocol):
    """A step that was started."""

    @property
    def done(self) -> bool:
        """Whether `result` answers at once."""

    def result(self) -> StepResult:
        """Wait for the step; on any thread."""


@runtime_checkable
class PipelinedWorker(Protocol):
    """A worker that can start a step before the result of the one before is read."""

    def launch(self, plan: StepPlan) -> Launched: ...


class InlineExecutor:
    """Everything of the worker happens on one thread; a second one waits for results where the device works on its own."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._collector: ThreadPoolExecutor | None = None
        self._worker: Worker | None = None
        self._failure: OctavoError | None = None
        self._lock = threading.Lock()

    def start(self, config: EngineConfig) -> ExecutorInfo:
        """Load the worker and allocate its caches. Raises typed errors; no thread is left then."""
        assert self._thread is None, "an executor starts once"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-worker")
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="octavo-results")  # its thread starts with its first use
        try:
            return self._thread.submit(_typed, "starting the worker", lambda: self._start_worker(config)).result()
        except BaseException:
            self.shutdown()
            raise

    def execute(self, step: StepPlan) -> Future[StepResult]:
        """Submit a step. Its future fails with a typed error; after one failure, so does every later step."""
        thread, worker, collector = self._running(), self._worker, self._collector
        assert worker is not None, "a running executor has its worker"
        assert collector is not None, "a running executor has both threads"
        future: Future[StepResult] = Future()
        thread.submit(self._run, worker, collector, step, future)
        return future

    def call(self, method: WorkerMethod, **kwargs: Any) -> list[Any]:
        """Ask the worker, between steps."""
        thread, worker = self._running(), self._worker
        assert worker is not None, "a running executor has its worker"
        return [thread.submit(_typed, method.value, lambda: worker.call(method, **kwargs)).result()]

    def check_health(self) -> None:
        """The worker lives as long as this process; what ended it (a failed step, a shutdown) is raised here too."""
        if self._failure is not None:
            raise self._failure

    def shutdown(self) -> None:
        """Let the step that runs end, fail those that wait, close the worker and end its threads."""
        with self._lock:
            self._failure = self._failure or EngineError("the executor has been shut down")
            thread, self._thread = self._thread, None
            collector, self._collector = self._collector, None
            worker, self._worker = self._worker, None
        if thread is None or collector is None:
            return
        try:
            if worker is not None:
                _close_on(thread, worker)
        finally:
            thread.shutdown()
            collector.shutdown()

    def _running(self) -> ThreadPoolExecutor:
        thread = self._thread
        if thread is None:
            raise EngineError("the executor has been shut down")
        return thread

    def _start_worker(self, config: EngineConfig) -> ExecutorInfo:
        from octavo.core.worker.worker import make_worker

        self._worker = worker = make_worker(config, 0, config.plugins.device)
        worker.load()
        info = worker.allocate(worker.kv_groups())
        return ExecutorInfo(
            kv=info.kv,
            vocab_size=info.vocab_size,
            num_workers=1,
            max_in_flight=_MAX_IN_FLIGHT,
            attention=info.attention,
        )

    def _run(self, worker: Worker, collector: ThreadPoolExecutor, step: StepPlan, future: Future[StepResult]) -> None:
        """On the worker's thread."""
        if self._failure is not None:
            future.set_exception(EngineError(f"step {step.step} wasn't run: {self._failure.message}"))
            return
        what = f"step {step.step}"
        if isinstance(worker, PipelinedWorker):
            launched = self._settle(future, what, lambda: worker.launch(step))
            if launched is None:
                return
            if launched.done:
                self._finish(future, what, launched.result)
            else:
                # It takes no more work when the interpreter ends: then the step fails, rather than being waited for.
                self._settle(future, what, lambda: collector.submit(self._finish, future, what, launched.result))
        else:
            self._finish(future, what, lambda: worker.execute(step))

    def _finish(self, future: Future[StepResult], what: str, action: Callable[[], StepResult]) -> None:
        result = self._settle(future, what, action)
        if result is not None:
            future.set_result(result)

    def _settle(self, future: Future[StepResult], what: str, action: Callable[[], _T]) -> _T | None:
        """``action()``; when it fails, so does ``future``, and the executor runs nothing more."""
        try:
            return _typed(what, action)
        except OctavoError as error:
            self._failure = error
            future.set_exception(error)
            return None


def _close_on(thread: ThreadPoolExecutor, worker: Worker) -> None:
    """Close the worker on its thread; at interpreter exit pools have ended their threads already, and nobody else is on it."""
    try:
        closed = thread.submit(worker.close)
    except RuntimeError:
        worker.close()
    else:
        closed.result()


def _typed(what: str, action: Callable[[], _T]) -> _T:
    """``action()``, with whatever isn't an `OctavoError` made an `EngineError` that names it."""
    try:
        return action()
    except OctavoError:
        raise
    except BaseException as error:  # SystemExit too: on the worker's thread it would end nothing, and leave the step waited for
        raise EngineError(f"the worker failed in {what}: {root_cause(error)}") from error
