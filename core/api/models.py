"""`CausalLM`: a model architecture. A plugin of kind ``model``; its manifest says which files it answers for.

A model is written on `octavo.core.layers` and the composite ops, for any device: it names none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.core.api.attention import AttentionSpec, LayerParams
from octavo.core.api.ops import LinearWeight, ParallelContext
from octavo.core.api.platform import Array, Platform
from octavo.core.config.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.core.layers.context import StepContext
    from octavo.core.layers.ops import Ops

__all__ = [
    "BuildContext",
    "CausalLM",
    "WeightSource",
]


class WeightSource(Protocol):
    """A model's tensors under Hugging Face's names (``model.layers.0.self_attn.q_proj.weight``), read lazily."""

    def __contains__(self, name: str) -> bool: ...

    def linear(self, name: str) -> LinearWeight:
        """A matrix in the file's own format. Raises `BrokenModel` when it is missing."""

    def tensor(self, name: str) -> Tensor:
        """A tensor dequantised to float32, or in the file's float dtype, on the host. Raises `BrokenModel`."""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What a model needs to become real: resolved ops, the platform, the activation dtype word."""

    ops: Ops
    platform: Platform
    dtype: str
    parallel: ParallelContext
    max_model_len: int


class CausalLM(ABC):
    """A decoder-only language model."""

    @classmethod
    @abstractmethod
    def attention(cls, spec: ModelSpec, dtype: str, kv_dtype: str) -> Sequence[AttentionSpec]:
        """What each layer asks of its backend, by layer index; known before any weight is read."""

    @abstractmethod
    def __init__(self, spec: ModelSpec, weights: WeightSource, build: BuildContext) -> None:
        """Read the weights it needs from ``weights`` and prepare them on the platform."""

    def layer_params(self) -> Sequence[LayerParams]:
        """Per-layer parameters, by layer index. Default: nothing special."""
        return [LayerParams(index=index) for index in range(self.spec.num_layers)]

    spec: ModelSpec

    @abstractmethod
    def forward(self, token_ids: Array, step: StepContext) -> tuple[Array, Array]:
        """``token_ids`` [num_tokens] → ``(x, residual)``, each [num_tokens, hidden_size]."""

    @abstractmethod
    def logits(self, x: Array, residual: Array, rows: Array, step: StepContext) -> Array:
        """Logits [len(rows), vocab_size] float32 of the rows given (token indices within the step)."""
