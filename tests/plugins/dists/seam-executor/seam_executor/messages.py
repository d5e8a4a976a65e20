"""What travels over the pipe: a byte that says what it is, then a message as `octavo.api.wire` encodes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from octavo.api import errors
from octavo.api.config import EngineConfig
from octavo.api.errors import EngineError, OctavoError
from octavo.api.executor import ExecutorInfo
from octavo.api.scheduling import StepPlan, StepResult
from octavo.api.wire import decode, encode

__all__ = ["Answer", "Ask", "Failure", "Start", "receive", "send"]


class Start(msgspec.Struct):
    options: dict[str, Any]
    given: list[str]

    @staticmethod
    def of(config: EngineConfig) -> Start:
        return Start({name: _plain(value) for name, value in config.flat().items()}, sorted(config.given))

    def config(self) -> EngineConfig:
        return replace(EngineConfig.from_flat(**self.options), given=frozenset(self.given))


class Ask(msgspec.Struct):
    method: str
    arguments: dict[str, Any]


class Answer(msgspec.Struct):
    value: Any


class Failure(msgspec.Struct):
    kind: str
    message: str

    def error(self) -> OctavoError:
        cls: type[OctavoError] = getattr(errors, self.kind, EngineError)
        return cls(self.message)


_KINDS: tuple[type[msgspec.Struct], ...] = (Start, StepPlan, StepResult, Ask, Answer, ExecutorInfo, Failure)


def send(pipe: Connection, message: msgspec.Struct) -> None:
    pipe.send_bytes(bytes([_KINDS.index(type(message))]) + encode(message))


def receive(pipe: Connection) -> msgspec.Struct:
    """Raises `EOFError` when the other end is gone."""
    data = pipe.recv_bytes()
    return decode(data[1:], _KINDS[data[0]])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
