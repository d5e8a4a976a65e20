"""GGUF's value types and the tensor types that Octavo reads, with their block sizes. Source: the GGUF specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["READABLE", "SCALARS", "TENSOR_TYPES", "TensorType", "row_bytes"]

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)

SCALARS: Mapping[int, str] = {
    UINT8: "<u1", INT8: "<i1", UINT16: "<u2", INT16: "<i2", UINT32: "<u4", INT32: "<i4",
    FLOAT32: "<f4", BOOL: "|b1", UINT64: "<u8", INT64: "<i8", FLOAT64: "<f8",
}  # fmt: skip
"""Value type → numpy dtype of the fixed-size ones."""


class TensorType(NamedTuple):
    """How a tensor type stores a row: blocks of ``block_elements`` values in ``block_bytes`` bytes."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""The types that Octavo reads, by their number in the file."""
READABLE: Mapping[str, TensorType] = {kind.name: kind for kind in TENSOR_TYPES.values()}

UNREAD: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Types that exist but that Octavo doesn't read: a well-formed file of one of them is unsupported, not broken."""


def row_bytes(kind: TensorType, elements: int) -> int:
    """Bytes of a row of ``elements`` values, which must be a multiple of the block."""
    return elements // kind.block_elements * kind.block_bytes
