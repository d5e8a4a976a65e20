"""Dequantised weights equal the `gguf` package's own, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.core.api.errors import UnsupportedModel
from octavo.core.api.ops import LinearWeight, WeightPart
from octavo.core.loading.dequantise import dequantise, dequantise_weight
from octavo.core.loading.gguf_types import READABLE, TENSOR_TYPES

BLOCK_TYPES = [name for name, kind in READABLE.items() if kind.block_elements > 1]
QUANTISABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # what the package's quantiser can make


def part_of(raw: np.ndarray, name: str, columns: int) -> WeightPart:
    return WeightPart(format=name, data=torch.from_numpy(raw), shape=(raw.shape[0], columns))


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes: every pattern of bits occurs, infinite and NaN scales too."""
    kind = READABLE[name]
    return np.random.default_rng(5).integers(0, 256, (rows, blocks * kind.block_bytes), dtype=np.uint8)


def test_types_are_numbered_and_sized_as_in_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.block_elements, kind.block_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_equal_the_reference_bit_for_bit(name: str) -> None:
    raw = random_blocks(name, rows=70, blocks=13)  # more than one chunk, and no round number of them
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    got = dequantise(part_of(raw, name, expected.shape[1]), torch.float32)
    # NaNs of different payloads are the same NaN; everything else, signs of zeros included, must be the same bits.
    same = (got.numpy().view(np.int32) == expected.view(np.int32)) | (np.isnan(got.numpy()) & np.isnan(expected))
    assert same.all()


@pytest.mark.parametrize("name", QUANTISABLE)
def test_quantised_numbers_come_back_within_half_a_step(name: str) -> None:
    weights = np.random.default_rng(6).uniform(-1, 1, (16, 256)).astype(np.float32)
    raw = gguf.quantize(weights, gguf.GGMLQuantizationType[name])
    got = dequantise(part_of(raw, name, 256), torch.float32).numpy()
    step = 2 / {"Q4_0": 16, "Q4_1": 15, "Q5_0": 32, "Q5_1": 31, "Q8_0": 254}[name]
    # Half a step, and the scale's own rounding to half precision; symmetric types of few bits clip one side by a step.
    assert np.abs(got - weights).max() <= step * (1.0 if name in ("Q4_0", "Q5_0") else 0.5) + 2**-10


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_the_float32_result_rounded_once(name: str, dtype: torch.dtype) -> None:
    part = part_of(random_blocks(name, rows=9, blocks=3), name, 3 * READABLE[name].block_elements)
    torch.testing.assert_close(
        dequantise(part, dtype), dequantise(part, torch.float32).to(dtype), rtol=0, atol=0, equal_nan=True
    )


def test_a_slice_of_rows_dequantises_like_the_whole() -> None:
    part = part_of(random_blocks("Q6_K", rows=20, blocks=2), "Q6_K", 512)
    rows = WeightPart(format="Q6_K", data=part.data[7:12], shape=(5, 512))
    assert torch.equal(dequantise(rows, torch.float32).nan_to_num(), dequantise(part, torch.float32)[7:12].nan_to_num())


def test_a_dense_part_of_the_right_dtype_is_not_copied() -> None:
    data = torch.arange(12.0).view(3, 4)
    part = WeightPart(format="dense", data=data, shape=(3, 4))
    assert dequantise(part, torch.float32).data_ptr() == data.data_ptr()
    assert dequantise(part, torch.bfloat16).dtype == torch.bfloat16


def test_float_types_may_come_as_bytes() -> None:
    data = torch.arange(12.0).view(3, 4).to(torch.bfloat16)
    part = WeightPart(format="BF16", data=data.view(torch.uint8), shape=(3, 4))
    assert torch.equal(dequantise(part, torch.float32), data.float())


def test_stacked_parts_of_different_formats_stack_their_rows() -> None:
    dense = WeightPart(format="dense", data=torch.randn(4, 256), shape=(4, 256))
    quantised = part_of(random_blocks("Q4_K", rows=3, blocks=1), "Q4_K", 256)
    whole = dequantise_weight(LinearWeight(parts=(dense, quantised)), torch.float32)
    assert torch.equal(whole[:4], dense.data)
    assert torch.equal(whole[4:].nan_to_num(), dequantise(quantised, torch.float32).nan_to_num())


def test_an_unknown_format_is_refused_by_name() -> None:
    part = WeightPart(format="IQ2_XS", data=torch.zeros(1, 74, dtype=torch.uint8), shape=(1, 256))
    with pytest.raises(UnsupportedModel, match=r"IQ2_XS.*Q4_K"):
        dequantise(part, torch.float32)
