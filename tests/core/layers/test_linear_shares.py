"""Tensor parallelism's arithmetic: ranks' shares of a layer put together give the layer."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.backends.cpu.platform import CpuPlatform
from octavo.core.api.errors import Unsupported
from octavo.core.api.ops import LinearWeight, ParallelContext, WeightPart
from octavo.core.layers.linear import DenseLinear, shard_columns, shard_rows

IMPL = DenseLinear(CpuPlatform())
WHOLE = ParallelContext()


def dense(outputs: int, inputs: int, seed: int = 0) -> LinearWeight:
    data = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    return LinearWeight(parts=(WeightPart(format="dense", data=data, shape=(outputs, inputs)),), name=f"w{seed}")


def quantised(outputs: int, inputs: int) -> LinearWeight:
    values = np.random.default_rng(5).standard_normal((outputs, inputs)).astype(np.float32)
    data = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0))
    return LinearWeight(parts=(WeightPart(format="Q8_0", data=data, shape=(outputs, inputs)),), name="q8")


def apply(weight: LinearWeight, x: Tensor) -> Tensor:
    return IMPL.apply(x, IMPL.prepare(weight, WHOLE, dtype="float32"))


def ranks(size: int) -> list[ParallelContext]:
    return [ParallelContext(rank=rank, size=size) for rank in range(size)]


def test_one_rank_keeps_the_weight_itself() -> None:
    weight = dense(6, 4)
    assert shard_rows(weight, WHOLE) is weight
    assert shard_columns(weight, WHOLE) is weight


@pytest.mark.parametrize("make", [dense, quantised])
def test_row_shares_concatenate_to_the_output(make) -> None:
    weight, x = make(6, 64), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    shares = [apply(shard_rows(weight, rank), x) for rank in ranks(3)]
    torch.testing.assert_close(torch.cat(shares, dim=1), apply(weight, x))


def test_each_part_of_a_stack_is_shared() -> None:
    """q, k and v: a rank holds its heads of each, not a slice of the stack."""
    q, k = dense(8, 4, seed=1), dense(4, 4, seed=2)
    share = shard_rows(LinearWeight.stack(q, k), ParallelContext(rank=1, size=2))
    assert share.shape == (6, 4)
    got = IMPL.prepare(share, WHOLE, dtype="float32")
    assert torch.equal(got, torch.cat([q.parts[0].data[4:], k.parts[0].data[2:]]))


@pytest.mark.parametrize("make", [dense, quantised])
def test_column_shares_add_up_to_the_output(make) -> None:
    weight, x = make(5, 64), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    parts = [apply(shard_columns(weight, rank), part) for rank, part in zip(ranks(2), x.chunk(2, dim=1), strict=True)]
    torch.testing.assert_close(sum(parts), apply(weight, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("share", "weight", "message"),
    [
        (shard_rows, dense(6, 4), "6 output rows of w0 can't be shared by 4 ranks"),
        (shard_columns, dense(4, 6), "6 inputs of w0 can't be shared by 4 ranks"),
        (shard_columns, quantised(4, 64), "2 blocks of 32 weights in a row of q8 can't be shared by 4 ranks"),
    ],
)
def test_an_uneven_share_is_refused(share, weight: LinearWeight, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        share(weight, ParallelContext(rank=0, size=4))


def test_a_dense_weight_of_the_right_dtype_is_not_copied() -> None:
    weight = dense(6, 4)
    assert IMPL.prepare(weight, WHOLE, dtype="float32").data_ptr() == weight.parts[0].data.data_ptr()
    assert IMPL.prepare(weight, WHOLE, dtype="bfloat16").dtype is torch.bfloat16
