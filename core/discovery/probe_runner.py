"""Runs probes. This file is the helper process itself: run by its path, it imports nothing of Octavo.

Input, one JSON document on stdin: ``{"path": sys.path, "result_fd": int, "probes": {key: "module:function"}}``. Each probe runs
in a thread of its own; its answer is one JSON line on ``result_fd``, written at once, so that a probe that kills the process
takes no other's answer with it. ``{"key", "started": true}`` comes first.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, is_dataclass
from functools import reduce
from importlib import import_module
from typing import Any


class _TorchWatch:
    """A finder that finds nothing and notes which threads import torch."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            self.threads.add(threading.get_ident())


def _resolve(target: str) -> Any:
    module, _, attributes = target.partition(":")
    found: Any = import_module(module)
    return reduce(getattr, attributes.split("."), found)


def _told(error: BaseException) -> dict[str, str]:
    """The error's cause and traceback as text, whatever its classes do when they are asked for it."""
    cause, seen = error, {id(error)}
    while cause.__cause__ is not None and id(cause.__cause__) not in seen:
        cause = cause.__cause__
        seen.add(id(cause))
    try:
        text = str(cause)
    except BaseException:  # noqa: BLE001 - a vendor's own __str__
        text = "its text can't be shown"
    return {"error": f"{type(cause).__name__}: {text}", "traceback": traceback.format_exc()}


def _run(key: str, target: str, write: Any, watch: _TorchWatch) -> None:
    write({"key": key, "started": True})
    begin = time.monotonic()
    answer: dict[str, Any] = {"key": key}
    try:
        result = _resolve(target)()
        if not is_dataclass(result) or not hasattr(result, "devices"):
            raise TypeError(f"the probe returned {result!r}, not a ProbeResult")
        answer["result"] = asdict(result)  # type: ignore[arg-type]
        json.dumps(answer)
    except BaseException as error:  # noqa: BLE001 - whatever a vendor's code does ends here; the parent reports it
        answer = {"key": key, **_told(error)}
    answer["torch"] = threading.get_ident() in watch.threads
    answer["seconds"] = time.monotonic() - begin
    write(answer)


def main() -> None:
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    lock = threading.Lock()

    def write(answer: dict[str, Any]) -> None:
        with lock:
            os.write(job["result_fd"], json.dumps(answer).encode() + b"\n")

    watch = _TorchWatch()
    sys.meta_path.insert(0, watch)
    threads = [
        threading.Thread(target=_run, args=(key, target, write, watch), daemon=True) for key, target in job["probes"].items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)  # no teardown: what a probe left behind (threads, exit handlers) doesn't run


if __name__ == "__main__":
    main()
