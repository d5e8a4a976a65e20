from __future__ import annotations

from dataclasses import dataclass

from octavo.core.config._field import option


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held."""

    model: str = option("", help="catalogue name, folder (safetensors + tokenizer.json) or .gguf file")
    dtype: str = option("auto", help="weights and activations: auto, float32, float16 or bfloat16")
    max_model_len: int | None = option(None, help="longest prompt plus output, in tokens (default: the model's own)")
    seed: int = option(0, help="seed of the sampler for requests that bring none")
