"""`MultiprocessExecutor`: one worker in a process of its own. What ends that process ends no other, and it leaves no orphan."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.api.errors import EngineError, OctavoError, WorkerDied
from octavo.core.api.executor import ExecutorInfo, WorkerMethod
from octavo.core.api.scheduling import StepPlan, StepResult
from octavo.core.executor.channel import Answer, Call, Channel, Failure, Ping, Start, Stop

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig

__all__ = ["MultiprocessExecutor"]

_PING_S = 30.0
_STOP_S = 10.0
_EXIT_S = 5.0


class MultiprocessExecutor:
    """Starts ``octavo.core.executor.worker_process`` and talks to it over a socket pair."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None
        self._steps: deque[tuple[int, Future[StepResult]]] = deque()
        # By position: an answer belongs to the oldest question, also where nobody waits for it any more (Ctrl-C).
        self._questions: deque[Future[msgspec.Struct]] = deque()
        self._asking = threading.Lock()  # they are sent in the order of _questions
        self._lock = threading.Lock()  # of _steps, _questions and _failure
        self._failure: OctavoError | None = None
        self._pings = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self, config: EngineConfig) -> ExecutorInfo:
        """Start the process and its worker. Raises what the worker raised, or `WorkerDied`; no process is left then."""
        assert self._process is None, "an executor starts once"
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "octavo.core.executor.worker_process", str(theirs.fileno()), str(os.getpid())]
        # The worker must find the plugins that this process found, wherever its path came from.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), close_fds=True
            )
        self._channel = Channel(ours)
        self._reader = threading.Thread(target=self._read, name="octavo-worker-messages", daemon=True)
        self._reader.start()
        atexit.register(self.shutdown)
        try:
            answer = self._ask(Start.of(config))
        except BaseException:
            self.shutdown()
            raise
        assert isinstance(answer, ExecutorInfo), "Start is answered with ExecutorInfo"
        return answer

    def execute(self, step: StepPlan) -> Future[StepResult]:
        """Submit a step. Its future fails with what the worker raised, or with `WorkerDied`."""
        future: Future[StepResult] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._steps.append((step.step, future))
        self._send(step)
        return future

    def call(self, method: WorkerMethod, **kwargs: Any) -> list[Any]:
        """Ask the worker, between steps."""
        answer = self._ask(Call(method=method.value, arguments=kwargs))
        assert isinstance(answer, Answer), "Call is answered with Answer"
        return answer.values

    def check_health(self) -> None:
        """Raises `WorkerDied` when the process is gone, or doesn't answer within half a minute."""
        self._pings += 1
        try:
            self._ask(Ping(number=self._pings), timeout_s=_PING_S)
        except TimeoutError:
            self._fail(WorkerDied(f"the worker process {self.pid} hasn't answered for {_PING_S:.0f} s"))
            raise self._failure or EngineError("the worker doesn't answer") from None

    def shutdown(self) -> None:
        """Ask the worker to end, and end it if it doesn't."""
        process, self._process = self._process, None
        channel = self._channel
        if process is None or channel is None:
            return
        atexit.unregister(self.shutdown)
        self._fail(EngineError("the executor has been shut down"))
        if isinstance(self._failure, WorkerDied):
            process.kill()  # it ended, or doesn't answer: asking it is of no use
        with suppress(OSError):  # it may be gone already
            channel.send(Stop())
        _end(process)
        channel.close()
        if self._reader is not None:
            self._reader.join()

    def _ask(self, question: msgspec.Struct, timeout_s: float | None = None) -> msgspec.Struct:
        """The worker's answer. Raises its error, or `WorkerDied`, or `TimeoutError` after the time given."""
        future: Future[msgspec.Struct] = Future()
        with self._asking:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                self._questions.append(future)
            try:
                self._send(question)
            except EngineError:  # it never left
                with self._lock, suppress(ValueError):  # a shutdown may have failed it meanwhile
                    self._questions.remove(future)
                raise
        return future.result(timeout_s)

    def _send(self, message: msgspec.Struct) -> None:
        channel = self._channel
        if channel is None:
            raise EngineError("the executor hasn't been started")
        with suppress(OSError):  # when the process is gone, the reading thread finds out how and fails whatever waits
            channel.send(message)

    def _read(self) -> None:
        """On the reading thread: hand out what the worker sends, until its end of the socket closes."""
        channel, process = self._channel, self._process
        assert channel is not None
        assert process is not None
        try:
            while (message := channel.receive()) is not None:
                self._hand_out(message)
        except EngineError as error:
            self._fail(error)
            process.kill()
            return
        self._fail(WorkerDied(_how_it_ended(process), hint="its last words are on stderr; start the engine again"))

    def _hand_out(self, message: msgspec.Struct) -> None:
        step = message.step if isinstance(message, (StepResult, Failure)) else None
        if step is None:
            self._answer(message)
            return
        with self._lock:
            if not self._steps:
                return  # it was failed by a shutdown
            number, future = self._steps.popleft()
        assert number == step, f"results come in order: expected step {number}, got {step}"
        if isinstance(message, Failure):
            future.set_exception(message.error())
        else:
            assert isinstance(message, StepResult)
            future.set_result(message)

    def _answer(self, message: msgspec.Struct) -> None:
        with self._lock:
            if not self._questions:
                return  # it was failed by a shutdown
            future = self._questions.popleft()
        if isinstance(message, Failure):
            future.set_exception(message.error())
        else:
            future.set_result(message)

    def _fail(self, error: OctavoError) -> None:
        """Fail what waits, and whatever comes after, with ``error``; the first one counts."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            steps, self._steps = self._steps, deque()
            questions, self._questions = self._questions, deque()
        waiting: list[Future[Any]] = [*(future for _, future in steps), *questions]
        for future in waiting:
            future.set_exception(error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was asked to end; then insist."""
    for insist, patience_s in ((process.terminate, _STOP_S), (process.kill, _EXIT_S)):
        try:
            process.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            insist()
    process.wait()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return f"the worker process {process.pid} closed its connection"
    if code >= 0:
        return f"the worker process {process.pid} ended with exit code {code}"
    number = -code
    name = signal.Signals(number).name if number in {known.value for known in signal.Signals} else "unknown"
    killed = " (the system does this when memory runs out)" if number == signal.SIGKILL else ""
    return f"the worker process {process.pid} was ended by signal {number}, {name}{killed}"
