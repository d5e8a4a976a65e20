"""The worker's process: ``python -m seam_executor.child FD``."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from octavo.api.errors import OctavoError
from octavo.api.executor import ExecutorInfo, Worker, WorkerMethod
from octavo.api.scheduling import StepPlan
from octavo.api.worker import make_worker
from seam_executor.messages import Answer, Ask, Failure, Start, receive, send


def main(descriptor: int) -> None:
    pipe = Connection(descriptor)
    worker: Worker | None = None
    with suppress(EOFError, OSError):  # the engine's process is gone, or has closed its end: nothing is left to do
        while True:
            message = receive(pipe)
            try:
                if isinstance(message, Start):
                    config = message.config()
                    worker = make_worker(config, 0, config.plugins.device)
                send(pipe, _answer(worker, message))
            except OctavoError as error:
                send(pipe, Failure(type(error).__name__, str(error)))
    if worker is not None:
        worker.close()


def _answer(worker: Worker | None, message: msgspec.Struct) -> msgspec.Struct:
    assert worker is not None, "Start comes first"
    if isinstance(message, StepPlan):
        return worker.execute(message)
    if isinstance(message, Ask):
        return Answer(worker.call(WorkerMethod(message.method), **message.arguments))
    worker.load()
    info = worker.allocate(worker.kv_groups())
    return ExecutorInfo(kv=info.kv, vocab_size=info.vocab_size, num_workers=1, max_in_flight=1, attention=info.attention)


if __name__ == "__main__":
    main(int(sys.argv[1]))
