"""Asks plugins' probes what is there, in one helper process, concurrently and time-limited.

What a probe raises, prints, hangs on or kills stays in the helper. When the helper dies, or a hanging probe starves the others,
each probe without an answer is asked again in a helper of its own, so that one plugin never costs another its answer.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from octavo.core.api.manifest import ProbedDevice, ProbeResult
from octavo.core.discovery.wording import one_line

_RUNNER = str(Path(__file__).with_name("probe_runner.py"))


@dataclass(frozen=True, kw_only=True)
class ProbeOutcome:
    """What became of one probe: a result, or an error with its traceback."""

    result: ProbeResult | None = None
    error: str = ""
    traceback: str = ""
    imported_torch: bool = False
    seconds: float = 0.0


@dataclass
class _Helper:
    """One helper process and what it has answered so far."""

    process: subprocess.Popen[bytes]
    results: int  # file descriptor
    output: IO[bytes]
    probes: Mapping[str, str]
    answers: dict[str, ProbeOutcome] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    pending: bytes = b""
    ended: bool = False

    @classmethod
    def start(cls, probes: Mapping[str, str]) -> _Helper:
        read, write = os.pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the helper
        process = subprocess.Popen(
            [sys.executable, "-P", _RUNNER],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(write,),
            start_new_session=True,  # an interrupt at the terminal is for us; and we can end its children with it
        )
        os.close(write)
        job = {"path": [entry or os.getcwd() for entry in sys.path], "result_fd": write, "probes": dict(probes)}
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once; `read` will find its answers missing
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        return cls(process, read, output, probes)

    def read(self) -> None:
        """Take in what is there. Call when the descriptor is readable."""
        data = os.read(self.results, 1 << 16)
        self.ended = not data
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            answer = _answer(line)
            if answer.get("key") not in tuple(self.probes):
                continue  # not the runner's: a probe writes where it shouldn't
            if answer.get("started"):
                self.started.add(answer["key"])
            else:
                self.answers[answer["key"]] = _outcome(answer)

    @property
    def unanswered(self) -> tuple[str, ...]:
        return tuple(key for key in self.probes if key not in self.answers)

    def stop(self) -> int:
        """End the helper and everything it started; its return code."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.results)
        return self.process.wait()

    def last_words(self) -> str:
        """The last line that the helper printed."""
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        self.output.close()
        return lines[-1].strip()[:200] if lines else ""


class Probes:
    """A round of probes under way: started on construction, answered by `outcomes`."""

    def __init__(self, probes: Mapping[str, str], *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._helper = _Helper.start(probes) if probes else None
        self._deadline = time.monotonic() + limit_s

    def outcomes(self) -> Mapping[str, ProbeOutcome]:
        """Every probe's outcome, by its key."""
        if self._helper is None:
            return {}
        helper = self._helper
        _wait([helper], self._deadline)
        answers = dict(helper.answers)
        alone = helper.unanswered
        code = helper.stop()
        words = helper.last_words()
        if len(alone) == 1:
            answers[alone[0]] = _lost(helper.ended, code, words, self._limit_s)
        elif alone:
            answers |= self._each_alone({key: helper.probes[key] for key in alone})
        return answers

    def _each_alone(self, probes: Mapping[str, str]) -> Mapping[str, ProbeOutcome]:
        helpers = [_Helper.start({key: target}) for key, target in probes.items()]
        _wait(helpers, time.monotonic() + self._limit_s)
        answers: dict[str, ProbeOutcome] = {}
        for helper in helpers:
            code = helper.stop()
            words = helper.last_words()
            answers |= helper.answers
            for key in helper.unanswered:
                answers[key] = _lost(helper.ended, code, words, self._limit_s)
        return answers


def _wait(helpers: list[_Helper], deadline: float) -> None:
    """Until every helper has ended or answered everything, or the deadline has passed. An interrupt leaves no helper behind."""
    try:
        _read_until(helpers, deadline)
    except BaseException:
        for helper in helpers:
            helper.stop()
            helper.output.close()
        raise


def _read_until(helpers: list[_Helper], deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        for helper in helpers:
            selector.register(helper.results, selectors.EVENT_READ, helper)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                helper = key.data
                helper.read()
                if helper.ended or not helper.unanswered:
                    selector.unregister(helper.results)


def _lost(ended: bool, code: int, words: str, limit_s: float) -> ProbeOutcome:
    """The outcome of a probe that gave no answer."""
    if not ended:
        return ProbeOutcome(error=f"gave no answer within {limit_s:g} s")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended the process with exit code {code}"
    return ProbeOutcome(error=how + (f" ({words})" if words else ""))


def _answer(line: bytes) -> Mapping[str, Any]:
    """One line of the helper; empty when it isn't a JSON object."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _outcome(answer: Mapping[str, Any]) -> ProbeOutcome:
    extra: dict[str, Any] = {"imported_torch": answer.get("torch", False), "seconds": answer.get("seconds", 0.0)}
    if "error" in answer:
        traceback = str(answer.get("traceback", "")).encode(errors="backslashreplace").decode()
        return ProbeOutcome(error=one_line(answer["error"]).rstrip(":"), traceback=traceback, **extra)
    result = answer.get("result", {})
    try:
        devices = tuple(ProbedDevice(**device) for device in result["devices"])
        wrong = _wrong(devices)
    except (KeyError, TypeError) as error:
        devices, wrong = (), one_line(str(error))
    if wrong:
        return ProbeOutcome(error=f"gave no ProbeResult of ProbedDevices: {wrong}", **extra)
    said = {name: one_line(str(result.get(name, ""))) for name in ("reason", "hint")}
    return ProbeOutcome(result=ProbeResult(devices=devices, **said), **extra)


def _wrong(devices: Sequence[Any]) -> str:
    """What is wrong with the first device that isn't as `ProbedDevice` says; empty when all are."""
    seen: set[int] = set()
    for device in devices:
        index = device.index
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            return f"index {index!r} isn't a whole number from 0 up"
        if index in seen:
            return f"two devices have index {index}"
        seen.add(index)
        if not isinstance(device.name, str) or not isinstance(device.arch, str | None):
            return f"name {device.name!r} and arch {device.arch!r} of device {index} aren't text"
        if not isinstance(device.total_bytes, int | None):
            return f"total_bytes {device.total_bytes!r} of device {index} isn't a number of bytes"
    return ""
