"""`ModelSpec`: what a model file says of the model, in one vocabulary for GGUF and Hugging Face folders. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer.

    ``factors`` are GGUF's ``rope_freqs``: divisors of the inverse frequencies, [rotary_dim / 2].
    """

    theta: float = 10000.0
    rotary_dim: int
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None = the paper's 0.1 ln(factor) + 1
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. What only one architecture needs it reads from ``raw``, in Hugging Face's key names.

    ``raw`` is the config.json, or the same keys made from a GGUF's metadata.
    """

    architecture: str  # "LlamaForCausalLM"; from GGUF, the plugin's first architecture
    model_plugin: str  # name of the `octavo.models` entry point that claims it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    rope_local: RopeSpec | None = None  # of sliding-window layers, where they differ
    layer_kinds: tuple[str, ...]  # one a layer: "full_attention" or "sliding_window"
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"  # "silu" or "gelu_pytorch_tanh"
    dtype: str = "bfloat16"  # what the file calls its own; ``--dtype auto`` takes bf16 where the platform has it
    raw: Mapping[str, Any] = field(default_factory=dict)
