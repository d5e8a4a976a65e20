"""`PipeExecutor`: one worker in a process of its own, one step at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from octavo.api.config import EngineConfig
from octavo.api.errors import EngineError, WorkerDied
from octavo.api.executor import ExecutorInfo, WorkerMethod
from octavo.api.scheduling import StepPlan, StepResult
from seam_executor.messages import Answer, Ask, Failure, Start, receive, send

__all__ = ["PipeExecutor"]

_PATIENCE_S = 20


class PipeExecutor:
    def __init__(self) -> None:
        self._pipe: Connection | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="seam-pipe")  # one question at a time, in order

    def start(self, config: EngineConfig) -> ExecutorInfo:
        ours, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "seam_executor.child", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._pipe = ours
        try:
            info = self._thread.submit(self._ask, Start.of(config)).result()
        except BaseException:
            self.shutdown()
            raise
        assert isinstance(info, ExecutorInfo)
        return info

    def execute(self, step: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._ask, step)

    def call(self, method: WorkerMethod, **kwargs: Any) -> list[Any]:
        answer = self._thread.submit(self._ask, Ask(method.value, kwargs)).result()
        assert isinstance(answer, Answer)
        return [answer.value]

    def check_health(self) -> None:
        if self.process is None or self.process.poll() is not None:
            raise WorkerDied("the worker process is gone")

    def shutdown(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is None or self.process is None:
            return
        self._thread.shutdown()
        pipe.close()  # the process ends when its end of the pipe does
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ask(self, message: msgspec.Struct) -> Any:
        pipe = self._pipe
        if pipe is None or self.process is None:
            raise EngineError("the executor isn't running")
        try:
            send(pipe, message)
            answer = receive(pipe)
        except (EOFError, OSError) as error:
            code = self.process.wait(_PATIENCE_S)
            raise WorkerDied(f"the worker process {self.process.pid} ended with code {code}") from error
        if isinstance(answer, Failure):
            raise answer.error()
        return answer
