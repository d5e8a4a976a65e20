"""Ops: the named operations that models and the sampler call, each with a plain-torch default, each overridable by a platform.

An ops plugin's target is a callable ``(platform) -> Mapping[str, implementation]`` whose keys are exactly what its manifest
``implements``. An implementation has the signature of the op's default; for ``linear`` it is a `LinearImpl`.

*Atoms* take and return arrays. *Composites* are what models call; their defaults are made of atoms, and a platform may fuse
across them. Activations travel as ``(x, residual)``: the block's input is ``x + residual`` (``residual`` None at the start), so
that the addition can be fused into the next norm.

======================  ==============================================================================================
atom                    signature
======================  ==============================================================================================
``embedding``           (token_ids [n], weight [vocab, hidden]) → [n, hidden]
``rms_norm``            (x [n, d], weight [d], eps) → [n, d]
``add_rms_norm``        (x, residual, weight, eps) → (normed, x + residual)
``rotary``              (positions [n], q [n, h, d], k [n, hk, d] or None, cos_sin [max_pos, rotary_dim]) → (q, k)
``silu_and_mul``        (x [n, 2d]) → [n, d]
``gelu_and_mul``        (x [n, 2d]) → [n, d], tanh approximation
``linear``              a `LinearImpl`
``gather_last``         (x [n, hidden], rows [m]) → [m, hidden]
``verify_and_sample``   (logits, SamplingBatch) → Sampled: see `octavo.core.worker.sampler`
======================  ==============================================================================================

======================  ==============================================================================================
composite               signature
======================  ==============================================================================================
``attention_block``     (x, residual, params: AttentionBlock, step: StepContext) → (x, residual)
``mlp_block``           (x, residual, params: MlpBlock, step) → (x, residual)
``decoder_layer``       (x, residual, params: DecoderLayer, step) → (x, residual)
``lm_head``             (x, residual, params: LmHead, rows [m], step) → logits [m, vocab] float32
======================  ==============================================================================================

The parameter classes are in `octavo.core.layers.blocks`, the step context in `octavo.core.layers.context`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.core.api.platform import Array

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ATOMS",
    "COMPOSITES",
    "OPS",
    "LinearImpl",
    "LinearWeight",
    "ParallelContext",
    "Prepared",
    "WeightPart",
]

ATOMS: tuple[str, ...] = (
    "embedding", "rms_norm", "add_rms_norm", "rotary", "silu_and_mul", "gelu_and_mul", "linear", "gather_last",
    "verify_and_sample",
)  # fmt: skip
COMPOSITES: Mapping[str, tuple[str, ...]] = {
    "attention_block": ("rms_norm", "add_rms_norm", "rotary", "linear"),
    "mlp_block": ("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul", "linear"),
    "decoder_layer": ("attention_block", "mlp_block"),
    "lm_head": ("rms_norm", "add_rms_norm", "gather_last", "linear"),
}
"""Each composite with the ops that its default calls: what an outsider's atom may lie inside of."""
OPS: tuple[str, ...] = (*ATOMS, *COMPOSITES)

Prepared: TypeAlias = Any
"""What a `LinearImpl` made of a weight: opaque to core."""


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Rows of a linear weight in one format.

    ``format`` is "dense" (``data`` [out, in] of a float dtype) or a GGUF type name such as "Q4_K" (``data``
    [out, bytes of a row] uint8, blocks as in the file).
    """

    format: str
    data: Tensor
    shape: tuple[int, int]  # (out, in), in elements


@dataclass(frozen=True, kw_only=True)
class LinearWeight:
    """A linear layer's weight on the host: one or more parts, stacked along the output dimension (q, k, v; gate, up)."""

    parts: tuple[WeightPart, ...]
    name: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), in elements."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @staticmethod
    def stack(*weights: LinearWeight) -> LinearWeight:
        """The weights on top of each other; nothing is copied."""
        return LinearWeight(
            parts=tuple(part for weight in weights for part in weight.parts), name="+".join(w.name for w in weights)
        )


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """Where this worker stands among those that share the model's layers. Size 1 costs nothing."""

    rank: int = 0
    size: int = 1


class LinearImpl(ABC):
    """How linear layers hold and apply their weight. Constructed once, for the platform."""

    @abstractmethod
    def prepare(self, weight: LinearWeight, parallel: ParallelContext, *, dtype: str) -> Prepared:
        """Make the weight ready on the device: convert, pack, move. ``dtype`` is the activations'."""

    @abstractmethod
    def apply(self, x: Array, prepared: Prepared, bias: Array | None = None) -> Array:
        """``x`` [n, in] → [n, out]."""
