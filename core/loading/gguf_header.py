"""GGUF headers, read as if their author were hostile.

Every count, length, offset and dimension is compared with the file's size before anything is made from it. Strings of arrays
stay in the file until they are asked for, so a header costs no memory beyond a bounded number of small objects. There is no
recursion: GGUF's arrays of arrays, which no model uses, are refused. Source of the layout: the GGUF specification (v2, v3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np

from octavo.core.api.errors import BrokenModel, UnsupportedModel
from octavo.core.loading import gguf_types
from octavo.core.loading.files import map_file
from octavo.core.loading.gguf_types import SCALARS, TENSOR_TYPES, TensorType, row_bytes

__all__ = ["GGUFReader", "GGUFTensor", "StringArray", "Value"]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_HEADER_BYTES = 24
_MAX_KEYS = 4096  # real files have tens
_MAX_TENSORS = 65536
_MAX_KEY_BYTES = 1024
_MAX_STRING_BYTES = 16 << 20  # a chat template is tens of kilobytes
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_REFETCH = "fetch the file again"


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings that still lies in the file; its bounds have been checked."""

    buffer: mmap
    start: int  # offset of the first string's length
    end: int  # offset past the last string
    count: int

    def __len__(self) -> int:
        return self.count

    def raw(self) -> Iterator[bytes]:
        """The strings' bytes, in order."""
        data = self.buffer[self.start : self.end]
        offset, unpack = 0, _U64.unpack_from
        for _ in range(self.count):
            begin = offset + 8
            offset = begin + unpack(data, offset)[0]
            yield data[begin:offset]

    def strings(self) -> list[str]:
        """The strings. Raises `BrokenModel` when one isn't UTF-8."""
        try:
            return [text.decode() for text in self.raw()]
        except UnicodeDecodeError as error:
            raise BrokenModel(f"the GGUF holds a string that is not UTF-8: {error.object[:40]!r}") from None


Value: TypeAlias = "int | float | bool | str | StringArray | np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. ``shape`` is row-major: the last dimension is the one that blocks run along."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


class GGUFReader:
    """A GGUF file: `metadata` first, then, on `read_tensors`, where every tensor lies.

    The two steps let the caller refuse an architecture before the tensors are looked at.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and checks its metadata. Raises `BrokenModel`, or `UsageError` when it can't be read."""
        self.path = path
        self.buffer = map_file(path, least_bytes=_MIN_HEADER_BYTES)
        self._end = len(self.buffer)
        self._position = 0
        self._read_magic()
        num_tensors, num_keys = self._u64(), self._u64()
        if num_keys > _MAX_KEYS or num_keys * 13 > self._left:
            self._broken(f"claims {num_keys} metadata entries in {self._end} bytes")
        if num_tensors > _MAX_TENSORS or num_tensors * 32 > self._left:
            self._broken(f"claims {num_tensors} tensors in {self._end} bytes")
        self.num_tensors = num_tensors
        self.metadata: Mapping[str, Value] = self._read_metadata(num_keys)
        self._tensors_start = self._position

    def read_tensors(self) -> dict[str, GGUFTensor]:
        """Every tensor by name; all of them inside the file, none on top of another.

        Raises `BrokenModel`, or `UnsupportedModel` for a tensor type that Octavo doesn't read.
        """
        self._position = self._tensors_start
        found = [self._read_tensor_info() for _ in range(self.num_tensors)]
        alignment = self._alignment()
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, relative in found:
            nbytes = row_bytes(kind, shape[-1])
            for size in shape[:-1]:
                nbytes *= size
            if relative % alignment:
                self._broken(f"tensor {name!r} starts at offset {relative}, not a multiple of {alignment}")
            if data_start + relative + nbytes > self._end:
                self._broken(
                    f"tensor {name!r} ends {data_start + relative + nbytes - self._end} bytes past the end of the file"
                )
            if name in tensors:
                self._broken(f"has two tensors named {name!r}")
            tensors[name] = GGUFTensor(name, kind, shape, data_start + relative, nbytes)
        self._check_overlap(tensors)
        return tensors

    # ---- pieces

    def _broken(self, what: str) -> NoReturn:
        raise BrokenModel(f"broken GGUF {self.path.name}: {what}", hint=_REFETCH)

    @property
    def _left(self) -> int:
        return self._end - self._position

    def _take(self, nbytes: int) -> int:
        """Moves past ``nbytes`` bytes and returns where they start."""
        if nbytes > self._left:
            self._broken(f"truncated: {nbytes} bytes wanted at offset {self._position}, {self._left} left")
        start = self._position
        self._position += nbytes
        return start

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self.buffer, self._take(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self.buffer, self._take(8))[0]
        return value

    def _string(self, most_bytes: int) -> str:
        length = self._u64()
        if length > most_bytes:
            self._broken(f"a string of {length} bytes at offset {self._position}; at most {most_bytes} are expected")
        start = self._take(length)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError:
            self._broken(f"the string at offset {start} is not UTF-8")

    def _read_magic(self) -> None:
        if self.buffer[self._take(4) : 4] != b"GGUF":
            self._broken("it doesn't start with 'GGUF'")
        version = self._u32()
        if version in (2 << 24, 3 << 24):
            raise UnsupportedModel(f"{self.path.name} is a big-endian GGUF; Octavo reads little-endian ones")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path.name} has GGUF version {version}; Octavo reads 2 and 3")

    def _read_metadata(self, num_keys: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._string(_MAX_KEY_BYTES)
            if key in metadata:
                self._broken(f"has the metadata key {key!r} twice")
            metadata[key] = self._read_value(key, self._u32())
        return metadata

    def _read_value(self, key: str, kind: int) -> Value:
        if kind == gguf_types.STRING:
            return self._string(_MAX_STRING_BYTES)
        if kind == gguf_types.ARRAY:
            return self._read_array(key)
        return self._numbers(key, kind, 1)[0].item()  # type: ignore[no-any-return]

    def _read_array(self, key: str) -> StringArray | np.ndarray[Any, Any]:
        kind, count = self._u32(), self._u64()
        if kind == gguf_types.STRING:
            return self._skip_strings(key, count)
        return self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray[Any, Any]:
        """A view of ``count`` numbers in the file."""
        if kind not in SCALARS:
            self._broken(f"metadata {key!r} has a value of type {kind}, which is none that Octavo knows")
        dtype = np.dtype(SCALARS[kind])
        start = self._take(count * dtype.itemsize)
        # frombuffer takes a count of 0 for "an empty array" only where the buffer goes on; slicing has no such corner.
        return np.frombuffer(memoryview(self.buffer)[start : self._position], dtype=dtype) if count else np.empty(0, dtype)

    def _skip_strings(self, key: str, count: int) -> StringArray:
        if count * 8 > self._left:
            self._broken(f"metadata {key!r} claims {count} strings in {self._left} bytes")
        start, end, buffer, unpack = self._position, self._end, self.buffer, _U64.unpack_from
        position = start
        for _ in range(count):
            if position + 8 > end:
                self._broken(f"metadata {key!r} is truncated")
            position += 8 + unpack(buffer, position)[0]
        if position > end:
            self._broken(f"metadata {key!r} is truncated")
        self._position = position
        return StringArray(buffer, start, position, count)

    def _read_tensor_info(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = self._string(_MAX_KEY_BYTES)
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._broken(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._u64() for _ in range(num_dimensions)]))
        number, offset = self._u32(), self._u64()
        kind = TENSOR_TYPES.get(number)
        if kind is None and number in gguf_types.UNREAD:
            raise UnsupportedModel(
                f"tensor {name!r} of {self.path.name} has type {gguf_types.UNREAD[number]}",
                hint=f"Octavo reads {', '.join(gguf_types.READABLE)}: fetch the model in one of these",
            )
        if kind is None:
            self._broken(f"tensor {name!r} has the unknown type {number}")
        # Every element takes at least half a byte, so no honest dimension exceeds twice the file.
        if any(not 1 <= size <= 2 * self._end for size in shape):
            self._broken(f"tensor {name!r} has shape {list(shape)} in a file of {self._end} bytes")
        if shape[-1] % kind.block_elements:
            self._broken(f"rows of {name!r} have {shape[-1]} elements, not a multiple of {kind.block_elements} ({kind.name})")
        return name, kind, shape, offset

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int):
            self._broken("general.alignment is not a number")
        if not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._broken(f"general.alignment is {alignment}, not a power of two up to {_MAX_ALIGNMENT}")
        return alignment

    def _check_overlap(self, tensors: Mapping[str, GGUFTensor]) -> None:
        before: GGUFTensor | None = None
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if before is not None and before.offset + before.nbytes > tensor.offset:
                self._broken(f"tensors {before.name!r} and {tensor.name!r} overlap")
            before = tensor
