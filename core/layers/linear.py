"""Linear layers: how they are held (`Linear`), the default way to apply them (`DenseLinear`), and how ranks share them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from octavo.core.api.errors import Unsupported
from octavo.core.api.ops import LinearImpl, LinearWeight, ParallelContext, Prepared, WeightPart
from octavo.core.api.platform import Array, Platform
from octavo.core.layers.dtypes import torch_dtype

__all__ = ["DenseLinear", "Linear", "shard_columns", "shard_rows"]


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer: its implementation, what that made of the weight, and the bias [out]."""

    impl: LinearImpl
    prepared: Prepared
    bias: Array | None = None

    def __call__(self, x: Array) -> Array:
        """``x`` [n, in] → [n, out]."""
        return self.impl.apply(x, self.prepared, self.bias)


class DenseLinear(LinearImpl):
    """The default: one matrix [out, in] in the activations' dtype, dequantised at load."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def prepare(self, weight: LinearWeight, parallel: ParallelContext, *, dtype: str) -> Tensor:
        """The matrix on the device. A lone dense part that has the dtype already is moved as it is, never copied here."""
        from octavo.core.loading.dequantise import dequantise_weight

        matrix: Tensor = self.platform.from_host(dequantise_weight(weight, torch_dtype(dtype)))
        return matrix

    def apply(self, x: Tensor, prepared: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, prepared, bias)


def shard_rows(weight: LinearWeight, parallel: ParallelContext) -> LinearWeight:
    """This rank's share of a column-parallel layer: an equal slice of each part's output rows (q, k and v apart)."""
    if parallel.size == 1:
        return weight
    return replace(weight, parts=tuple(_row_share(part, parallel, weight.name) for part in weight.parts))


def shard_columns(weight: LinearWeight, parallel: ParallelContext) -> LinearWeight:
    """This rank's share of a row-parallel layer: an equal slice of the inputs. The ranks' outputs add up to the layer's.

    A quantised row is cut between its blocks.
    """
    if parallel.size == 1:
        return weight
    return replace(weight, parts=tuple(_column_share(part, parallel, weight.name) for part in weight.parts))


def _row_share(part: WeightPart, parallel: ParallelContext, name: str) -> WeightPart:
    rows = _share(part.shape[0], parallel, f"output rows of {name}")
    start = rows * parallel.rank
    return replace(part, data=part.data[start : start + rows], shape=(rows, part.shape[1]))


def _column_share(part: WeightPart, parallel: ParallelContext, name: str) -> WeightPart:
    columns = _share(part.shape[1], parallel, f"inputs of {name}")
    width = part.data.shape[1]
    if part.format != "dense":
        from octavo.core.loading.gguf_types import READABLE

        kind = READABLE[part.format]
        blocks = _share(width // kind.block_bytes, parallel, f"blocks of {kind.block_elements} weights in a row of {name}")
        width = blocks * kind.block_bytes
    else:
        width = columns
    start = width * parallel.rank
    return replace(part, data=part.data[:, start : start + width], shape=(part.shape[0], columns))


def _share(total: int, parallel: ParallelContext, what: str) -> int:
    if total % parallel.size:
        raise Unsupported(
            f"{total} {what} can't be shared by {parallel.size} ranks", hint="use a number of ranks that divides it"
        )
    return total // parallel.size
