"""Safetensors headers, read as if their author were hostile.

The header is bounded before it is parsed, parsed straight into the few fields that it may have (anything else is refused where
it stands, not built), and then every offset must lie inside the file, fit its shape and dtype, and leave neither gap nor
overlap. Source of the layout: the safetensors format description.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import NoReturn

import msgspec

from octavo.core.api.errors import BrokenModel
from octavo.core.loading.files import map_file

__all__ = ["DTYPE_BYTES", "SafeTensor", "SafetensorsFile"]

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 32 << 20
_MAX_TENSORS = 1 << 16
_MAX_COLONS = 8 * _MAX_TENSORS  # four a tensor, and some for the metadata
_MAX_DIMENSIONS = 8
_MAX_NAME_CHARS = 1024
_REFETCH = "fetch the file again"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Where a tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


class SafetensorsFile:
    """A mapped safetensors file whose header has been checked. Raises `BrokenModel`, or `UsageError` when it can't be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer: mmap = map_file(path, least_bytes=8)
        size = len(self.buffer)
        (header_bytes,) = struct.unpack_from("<Q", self.buffer)
        if header_bytes > size - 8:
            self._broken(f"the header claims {header_bytes} bytes; the file has {size - 8} after the length")
        if header_bytes > _MAX_HEADER_BYTES:
            self._broken(f"the header claims {header_bytes} bytes; at most {_MAX_HEADER_BYTES} are accepted")
        self._data_start = 8 + header_bytes
        self.tensors: Mapping[str, SafeTensor] = self._read_header(self.buffer[8 : self._data_start])
        self._check_layout(size)

    def _broken(self, what: str) -> NoReturn:
        raise BrokenModel(f"broken safetensors file {self.path.name}: {what}", hint=_REFETCH)

    def _read_header(self, header: bytes) -> dict[str, SafeTensor]:
        if header.count(b":") > _MAX_COLONS:
            self._broken(f"the header names more than {_MAX_TENSORS} tensors")
        try:
            named = _decode_names(header)
            if "__metadata__" in named:
                _decode_metadata(named.pop("__metadata__"))
            return {name: self._tensor(name, _decode_entry(raw)) for name, raw in named.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._broken(f"the header is not what it must be: {error}")

    def _tensor(self, name: str, entry: _Entry) -> SafeTensor:
        begin, end = entry.data_offsets
        if len(name) > _MAX_NAME_CHARS or len(entry.shape) > _MAX_DIMENSIONS:
            self._broken(f"tensor {name[:60]!r} has {len(entry.shape)} dimensions")
        if entry.dtype not in DTYPE_BYTES:
            self._broken(f"tensor {name!r} has the unknown dtype {entry.dtype[:20]!r}")
        nbytes = DTYPE_BYTES[entry.dtype]
        for dimension in entry.shape:
            if dimension < 0:
                self._broken(f"tensor {name!r} has shape {entry.shape}")
            nbytes *= dimension
        if begin < 0 or end - begin != nbytes:
            self._broken(f"tensor {name!r} takes {nbytes} bytes by shape and dtype, {end - begin} by its offsets")
        return SafeTensor(name, entry.dtype, tuple(entry.shape), self._data_start + begin, nbytes)

    def _check_layout(self, size: int) -> None:
        """The tensors fill the data exactly."""
        position = self._data_start
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset != position:
                what = "overlaps the one before it" if tensor.offset < position else "leaves a gap before it"
                self._broken(f"tensor {tensor.name!r} {what}")
            position += tensor.nbytes
        if position != size:
            what = f"{position - size} bytes are missing" if position > size else f"{size - position} bytes belong to no tensor"
            self._broken(f"{what} at the end")
