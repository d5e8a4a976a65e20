"""A model in one GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from octavo.core.api.errors import BrokenModel
from octavo.core.api.manifest import ModelManifest
from octavo.core.api.models import WeightSource
from octavo.core.config.model_spec import ModelSpec
from octavo.core.loading.fields import Fields
from octavo.core.loading.generation import GenerationDefaults
from octavo.core.loading.gguf_config import gguf_architecture, hf_config_of
from octavo.core.loading.gguf_header import GGUFReader, GGUFTensor
from octavo.core.loading.gguf_tokenizer import build_tokenizer, check_tokenizer
from octavo.core.loading.gguf_weights import GGUFWeights, hf_names
from octavo.core.loading.hf_config import claim_architecture, model_spec
from octavo.core.loading.shapes import check_shapes
from octavo.core.loading.source import ModelSource
from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["GGUFModel"]


class GGUFModel(ModelSource):
    """Opened and checked. Raises `UnsupportedModel`, `BrokenModel`, or `UsageError` when the file can't be read."""

    format = "gguf"

    def __init__(self, path: Path, models: Mapping[str, ModelManifest]) -> None:
        self.path = path
        self._where = path.name
        self._reader = GGUFReader(path)
        metadata = self._reader.metadata
        self._arch, manifest = claim_architecture(
            [gguf_architecture(metadata, self._where)], models, where=self._where, attribute="gguf"
        )
        self._tensors = self._reader.read_tensors()
        self.spec = self._make_spec(manifest)
        shapes = {ours: self._tensors[theirs].shape for ours, theirs in hf_names(self._tensors, self._arch).items()}
        check_shapes(self.spec, shapes, where=self._where)
        check_tokenizer(metadata, vocab_size=self.spec.vocab_size, where=self._where)
        fields = Fields(metadata, self._where)
        self.chat_template = fields.text("tokenizer.chat_template") if fields.has("tokenizer.chat_template") else None

    @cached_property
    def generation(self) -> GenerationDefaults:
        return GenerationDefaults(eos_token_ids=self.tokenizer().eos_token_ids)

    def weights(self) -> WeightSource:
        return GGUFWeights(self._reader, self._tensors, self.spec, self._arch)

    def _build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(
            self._reader.metadata, vocab_size=self.spec.vocab_size, where=self._where, chat_template=self.chat_template
        )

    def _make_spec(self, manifest: ModelManifest) -> ModelSpec:
        config = hf_config_of(self._reader.metadata, self._tensors, manifest, self._where)
        spec = model_spec(config, where=self._where, architecture=config["architectures"][0], plugin=manifest.name)
        factors = self._tensors.get("rope_freqs.weight")
        if factors is None:
            return spec
        return replace(spec, rope=replace(spec.rope, factors=self._rope_factors(factors, spec.rope.rotary_dim // 2)))

    def _rope_factors(self, tensor: GGUFTensor, count: int) -> tuple[float, ...]:
        """Divisors of the inverse frequencies, [rotary_dim / 2]."""
        if tensor.type.name != "F32" or tensor.shape != (count,):
            raise BrokenModel(f"{self._where}: 'rope_freqs.weight' must hold {count} F32 numbers, not {list(tensor.shape)}")
        factors = np.frombuffer(self._reader.buffer, np.dtype("<f4"), count=count, offset=tensor.offset)
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise BrokenModel(f"{self._where}: 'rope_freqs.weight' holds a number that is not positive")
        return tuple(factors.tolist())
