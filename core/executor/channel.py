"""Messages between an executor and its worker process: frames on a stream socket. Nothing is pickled.

A frame is the length of what follows as 8 bytes little endian, one byte that names the message's kind, and the message as
`octavo.core.engine.wire` encodes it.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import msgspec

from octavo.core.api import errors
from octavo.core.api.errors import EngineError, OctavoError
from octavo.core.api.executor import ExecutorInfo
from octavo.core.api.scheduling import StepPlan, StepResult
from octavo.core.config import EngineConfig
from octavo.core.engine.wire import decode, encode

__all__ = ["Answer", "Call", "Channel", "Failure", "Ping", "Start", "Stop"]

_HEADER = struct.Struct("<QB")
_MOST_BYTES = 1 << 32


class Start(msgspec.Struct, kw_only=True):
    """To the worker: start on this configuration. It answers with `ExecutorInfo` or `Failure`."""

    options: dict[str, Any]  # the flat configuration
    given: list[str]

    @staticmethod
    def of(config: EngineConfig) -> Start:
        plain = {name: _plain(value) for name, value in config.flat().items()}
        return Start(options=plain, given=sorted(config.given))

    def config(self) -> EngineConfig:
        from dataclasses import replace

        return replace(EngineConfig.from_flat(**self.options), given=frozenset(self.given))


class Call(msgspec.Struct, kw_only=True):
    """To the worker: answer a `WorkerMethod`, by its value."""

    method: str
    arguments: dict[str, Any]


class Ping(msgspec.Struct, kw_only=True):
    """To the worker, and back: still there?"""

    number: int


class Stop(msgspec.Struct, kw_only=True):
    """To the worker: end."""


class Answer(msgspec.Struct, kw_only=True):
    """From the worker: what a `Call` gave."""

    values: list[Any]


class Failure(msgspec.Struct, kw_only=True):
    """From the worker: what was asked for ended with an error. ``step`` None = start or call."""

    kind: str  # name of the class in `octavo.core.api.errors`
    message: str
    hint: str | None = None
    step: int | None = None

    @staticmethod
    def of(error: BaseException, step: int | None = None) -> Failure:
        if not isinstance(error, OctavoError):
            return Failure(kind="EngineError", message=f"{type(error).__name__}: {error}", step=step)
        known = next(cls for cls in type(error).__mro__ if cls.__name__ in errors.__all__)
        return Failure(kind=known.__name__, message=error.message, hint=error.hint, step=step)

    def error(self) -> OctavoError:
        cls = getattr(errors, self.kind, None) if self.kind in errors.__all__ else None
        return (cls or EngineError)(self.message, hint=self.hint)


_KINDS: tuple[type[msgspec.Struct], ...] = (
    Start, StepPlan, Call, Ping, Stop, ExecutorInfo, StepResult, Answer, Failure,
)  # fmt: skip
"""A frame's kind is the position here: both ends are the same version of Octavo."""


class Channel:
    """One end of the connection. `send` from any thread; `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Raises `OSError` when the other end is gone, `EngineError` for a message that can't travel."""
        payload = encode(message)
        header = _HEADER.pack(len(payload) + 1, _KINDS.index(type(message)))
        with self._sending:
            self._connection.sendall(header + payload)

    def receive(self) -> msgspec.Struct | None:
        """The next message; None when the other end is gone. Raises `EngineError` for anything that is no message."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        length, kind = _HEADER.unpack(header)
        if not 1 <= length <= _MOST_BYTES or kind >= len(_KINDS):
            raise EngineError(f"no message: {length} bytes of kind {kind}")
        payload = self._read(length - 1)
        return None if payload is None else decode(payload, _KINDS[kind])

    def close(self) -> None:
        """Also wakes a thread that waits in `receive`."""
        with suppress(OSError):  # the other end may have closed it already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, size: int) -> bytearray | None:
        """Exactly ``size`` bytes; None at the connection's end, be it within a frame."""
        buffer = bytearray(size)
        view, filled = memoryview(buffer), 0
        while filled < size:
            try:
                count = self._connection.recv_into(view[filled:])
            except OSError:
                return None
            if count == 0:
                return None
            filled += count
        return buffer


def _plain(value: Any) -> Any:
    """A configuration value as MessagePack has it."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value]
