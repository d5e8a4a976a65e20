"""The other end of `MultiprocessExecutor`: a process that runs one worker (``python -m …worker_process FD PARENT_PID``).

The main thread reads messages, so that it answers a ping and notices the parent's end while a step runs; the worker is on the
thread of an `InlineExecutor`. Whatever way the parent ends, its socket closes, and this process ends at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

from octavo.core.api.errors import OctavoError
from octavo.core.api.executor import WorkerMethod
from octavo.core.api.scheduling import StepPlan, StepResult
from octavo.core.executor.channel import Answer, Call, Channel, Failure, Ping, Start, Stop
from octavo.core.executor.inline import InlineExecutor

__all__ = ["main", "serve"]

_PARENT_CHECK_S = 2.0
_ABANDONED = 3
"""Exit code of a worker whose parent is gone; nobody is left to read it."""


def main(arguments: list[str]) -> int:
    """Serve on the inherited socket until it closes or `Stop` comes."""
    descriptor, parent = map(int, arguments)
    # An interrupt at the terminal reaches the whole group: the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what plugins print must not end up in the parent's output
    logging.basicConfig(level=logging.WARNING, format="worker: %(message)s", stream=sys.stderr)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    channel = Channel(socket.socket(fileno=descriptor))
    if not serve(channel, InlineExecutor()):
        os._exit(_ABANDONED)  # a step may be running: there is nobody to finish it for
    channel.close()
    return 0


def serve(channel: Channel, executor: InlineExecutor) -> bool:
    """Answer until `Stop` (True) or the other end is gone (False)."""
    while True:
        message = channel.receive()
        if isinstance(message, StepPlan):
            _execute(channel, executor, message)
        elif isinstance(message, Ping):
            channel.send(message)
        elif isinstance(message, Start):
            _start(channel, executor, message)
        elif isinstance(message, Call):
            _call(channel, executor, message)
        elif isinstance(message, Stop):
            executor.shutdown()
            return True
        else:
            assert message is None, "the executor sends nothing else"
            return False


def _start(channel: Channel, executor: InlineExecutor, message: Start) -> None:
    try:
        channel.send(executor.start(message.config()))
    except OctavoError as error:
        channel.send(Failure.of(error))


def _execute(channel: Channel, executor: InlineExecutor, plan: StepPlan) -> None:
    def report(future: Future[StepResult]) -> None:
        error = future.exception()
        with suppress(OSError):  # when the parent is gone, the main thread ends this process
            channel.send(future.result() if error is None else Failure.of(error, plan.step))

    try:
        executor.execute(plan).add_done_callback(report)
    except OctavoError as error:
        channel.send(Failure.of(error, plan.step))


def _call(channel: Channel, executor: InlineExecutor, message: Call) -> None:
    try:
        channel.send(Answer(values=executor.call(WorkerMethod(message.method), **message.arguments)))
    except OctavoError as error:
        channel.send(Failure.of(error))


def _watch_parent(parent: int) -> None:
    """A second way to notice the parent's end: a process forked from it may hold its socket open."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(_ABANDONED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
