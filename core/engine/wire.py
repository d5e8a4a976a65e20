"""The engine's messages as bytes: MessagePack, with NumPy arrays as an extension type. Nothing is pickled.

An array travels as one ``Ext``: its dtype and shape, then its elements in C order and little endian. A decoded array is a view
of the message's bytes, hence read-only: messages are never changed in place.
"""

from __future__ import annotations

import struct
from functools import cache
from math import prod
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from octavo.core.api.errors import EngineError, UsageError
from octavo.core.api.executor import ExecutorInfo, WorkerInfo
from octavo.core.api.scheduling import Request, SchedulerStats, StepOutput, StepPlan, StepResult

__all__ = ["MESSAGES", "decode", "encode"]

MESSAGES: tuple[type[msgspec.Struct], ...] = (
    Request,
    StepPlan,
    StepResult,
    StepOutput,
    SchedulerStats,
    WorkerInfo,
    ExecutorInfo,
)
"""Everything that crosses a process boundary between front, engine core and workers."""

_ARRAY = 1
_DTYPES = tuple(np.dtype(word) for word in ("<i4", "<i8", "<f4", "|u1", "|b1"))
_MAX_DIMS = 4
_Message = TypeVar("_Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """The message's bytes. Raises `EngineError` for a field that can't travel."""
    try:
        return _encoder().encode(message)
    except (TypeError, NotImplementedError, OverflowError, msgspec.MsgspecError) as error:
        raise EngineError(f"can't encode a {type(message).__name__}: {error}") from error


def decode(data: bytes | bytearray | memoryview, kind: type[_Message]) -> _Message:
    """The message of that kind in ``data``, checked field by field. Raises `EngineError` when it isn't one."""
    try:
        message: _Message = _decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, UsageError) as error:
        raise EngineError(f"not a {kind.__name__} message: {error}") from error
    return message


@cache
def _encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_to_ext)


@cache
def _decoder(kind: type[Any]) -> Any:
    return msgspec.msgpack.Decoder(kind, ext_hook=_from_ext, dec_hook=_check_array)


def _to_ext(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.generic):
        raise NotImplementedError(f"a bare NumPy scalar ({value.dtype})")
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a {type(value).__name__}")
    dtype = value.dtype.newbyteorder("<")
    if dtype not in _DTYPES or value.ndim > _MAX_DIMS:
        raise NotImplementedError(f"an array of dtype {value.dtype} with {value.ndim} dimensions")
    header = struct.pack(f"<BB{value.ndim}Q", _DTYPES.index(dtype), value.ndim, *value.shape)
    return msgspec.msgpack.Ext(_ARRAY, header + np.ascontiguousarray(value, dtype).tobytes())


def _from_ext(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension type {code}")
    raw = bytes(data)
    if len(raw) < 2 or raw[0] >= len(_DTYPES) or raw[1] > _MAX_DIMS:
        raise ValueError("an array header that isn't one")
    dtype, ndim = _DTYPES[raw[0]], raw[1]
    start = 2 + 8 * ndim
    if len(raw) < start:
        raise ValueError("an array header that is cut short")
    shape = struct.unpack_from(f"<{ndim}Q", raw, 2)
    if len(raw) - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} and dtype {dtype} in {len(raw) - start} bytes")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def _check_array(kind: Any, value: Any) -> Any:
    """``kind`` is a field's ``NDArray[…]``: the dtype must be the one declared."""
    if get_origin(kind) is not np.ndarray or not isinstance(value, np.ndarray):
        raise ValueError(f"expected {kind}, got {type(value).__name__}")
    (scalar,) = get_args(get_args(kind)[1])
    if value.dtype != np.dtype(scalar):
        raise ValueError(f"expected an array of {np.dtype(scalar)}, got {value.dtype}")
    return value
