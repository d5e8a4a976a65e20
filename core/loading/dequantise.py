"""Weights back to floats: every GGUF type that Octavo reads, in vectorised torch.

A block of 32 or 256 weights shares one or two half-precision scales; the K types add 6-bit scales for sub-blocks. Elements come
out in the file's order. The arithmetic is in float32, each step rounded on its own, so results equal the format's definition
bit for bit. Work goes chunk by chunk, so that the several passes over a chunk stay in the processor's cache.
Source of the layouts: the GGUF and ggml format documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from octavo.core.api.errors import UnsupportedModel
from octavo.core.api.ops import LinearWeight, WeightPart
from octavo.core.loading.gguf_types import READABLE

__all__ = ["dequantise", "dequantise_weight"]

_CHUNK_ELEMENTS = 1 << 17

_FLOATS: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantise(part: WeightPart, dtype: torch.dtype) -> Tensor:
    """``part`` as a dense tensor [out, in] of ``dtype``. A dense part of that dtype is returned as it is, not copied.

    Raises `UnsupportedModel` for a format that isn't known.
    """
    if part.format == "dense":
        return part.data.to(dtype)
    if part.format in _FLOATS:
        return _as_dtype(part.data, _FLOATS[part.format]).view(part.shape).to(dtype)
    if part.format not in _BLOCKS:
        raise UnsupportedModel(f"weights of format {part.format!r} can't be dequantised", hint=f"known: {', '.join(READABLE)}")
    kind = READABLE[part.format]
    blocks = part.data.reshape(-1, kind.block_bytes)
    out = torch.empty(blocks.shape[0], kind.block_elements, dtype=dtype)
    unpack = _BLOCKS[part.format]
    step = _CHUNK_ELEMENTS // kind.block_elements
    scratch = torch.empty(min(step, blocks.shape[0]), kind.block_elements)
    for start in range(0, blocks.shape[0], step):
        chunk = blocks[start : start + step]
        values = scratch[: chunk.shape[0]]
        unpack(chunk, values)
        out[start : start + step] = values
    return out.view(part.shape)


def dequantise_weight(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """A whole linear weight [out, in]: its parts dequantised and stacked."""
    if len(weight.parts) == 1:
        return dequantise(weight.parts[0], dtype)
    out = torch.empty(weight.shape, dtype=dtype)
    row = 0
    for part in weight.parts:
        out[row : row + part.shape[0]] = dequantise(part, dtype)
        row += part.shape[0]
    return out


def _as_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., n * itemsize] seen as ``dtype`` [..., n]; copied only where a view isn't possible."""
    if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize or not data.is_contiguous():
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The half-precision number at byte ``start`` of every block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low halves of the bytes [n, 16] to the first 16 elements of ``out`` [n, 32], high halves to the last 16."""
    out[:, :16] = packed & 0x0F
    out[:, 16:] = packed >> 4


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """The 32 bits from byte ``start``, one an element, each worth 16: float32 [n, 32]."""
    bits = (blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (bits << 4).view(-1, 32).to(torch.float32)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _k_scales(blocks: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Scales and minima of a K block's eight sub-blocks, float32 [n, 8, 1] each, from 12 bytes of packed 6-bit numbers.

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low six bits; the last four take their low four bits from
    the nibbles of bytes 8-11 and their high two bits from the top of bytes 0-3 and 4-7.
    """
    first, second, third = (blocks[:, start + 4 * i : start + 4 * i + 4] for i in range(3))
    scales = torch.cat([first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 0x3F, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.to(torch.float32).unsqueeze(-1), minima.to(torch.float32).unsqueeze(-1)


def _scale_sub_blocks(blocks: Tensor, sub_blocks: Tensor) -> None:
    """``sub_blocks`` [n, 8, 32] of whole numbers become weights in place: ``d·scale·q − dmin·minimum``."""
    scales, minima = _k_scales(blocks, 4)
    sub_blocks.mul_(scales.mul_(_half(blocks, 0).unsqueeze(-1))).sub_(minima.mul_(_half(blocks, 2).unsqueeze(-1)))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    sub_blocks, packed = out.view(-1, 8, 32), blocks[:, 16:].reshape(-1, 4, 32)
    sub_blocks[:, 0::2] = packed & 0x0F
    sub_blocks[:, 1::2] = packed >> 4
    _scale_sub_blocks(blocks, sub_blocks)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    sub_blocks, packed = out.view(-1, 8, 32), blocks[:, 48:].reshape(-1, 4, 32)
    high = (blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1) << 4  # [n, 8, 32]
    sub_blocks[:, 0::2] = packed & 0x0F | high[:, 0::2]
    sub_blocks[:, 1::2] = packed >> 4 | high[:, 1::2]
    _scale_sub_blocks(blocks, sub_blocks)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 0x0F, low >> 4], dim=2).view(-1, 2, 4, 32)  # four runs of 32 in each half block
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3
    out.copy_((low | high << 4).view(-1, 256))
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32) * _half(blocks, 208)
    out.sub_(32).view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_BLOCKS: Mapping[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
"""Format → a function from blocks [n, bytes] uint8 to weights [n, elements] float32, written to its second argument."""
