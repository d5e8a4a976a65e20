"""A model in a folder: config.json, safetensors and tokenizer.json, as Hugging Face lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from octavo.core.api.errors import BrokenModel, UnsupportedModel
from octavo.core.api.manifest import ModelManifest
from octavo.core.api.models import WeightSource
from octavo.core.loading.files import is_there, read_small_file
from octavo.core.loading.generation import GenerationDefaults, generation_defaults
from octavo.core.loading.hf_config import claim_architecture, model_spec, read_json
from octavo.core.loading.library_errors import refused_by_library
from octavo.core.loading.safetensors_weights import SafetensorsWeights, open_tensors
from octavo.core.loading.shapes import check_shapes
from octavo.core.loading.source import ModelSource
from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["FolderModel"]

_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_TEMPLATE_BYTES = 4 << 20


class FolderModel(ModelSource):
    """Opened and checked. Raises `UnsupportedModel`, `BrokenModel`, or `UsageError` when a file can't be read."""

    format = "safetensors"

    def __init__(self, path: Path, models: Mapping[str, ModelManifest]) -> None:
        self.path = path
        config = _config(path)
        named = config.get("architectures")
        architectures = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
        architecture, manifest = claim_architecture(architectures, models, where=f"{path.name}/config.json")
        self.spec = model_spec(config, where=f"{path.name}/config.json", architecture=architecture, plugin=manifest.name)
        self._tensors = open_tensors(path)
        check_shapes(self.spec, {name: tensor.shape for name, (_, tensor) in self._tensors.items()}, where=path.name)
        _check_tokenizer(path)
        self._tokenizer_config = _optional_json(path / "tokenizer_config.json")
        self.chat_template = _chat_template(path, self._tokenizer_config)
        self._generation = generation_defaults(
            _optional_json(path / "generation_config.json"),
            fallback_eos=self.spec.raw.get("eos_token_id"),
            where=f"{path.name}/generation_config.json",
        )

    @property
    def generation(self) -> GenerationDefaults:
        return self._generation

    def weights(self) -> WeightSource:
        return SafetensorsWeights(self._tensors, self.spec)

    def _build_tokenizer(self) -> Tokenizer:
        data = read_small_file(self.path / "tokenizer.json", most_bytes=_MAX_TOKENIZER_BYTES)
        with refused_by_library(f"{self.path.name}/tokenizer.json makes no tokenizer"):
            raw = tokenizers.Tokenizer.from_buffer(data)
        # A training run's padding and truncation may have been saved along.
        raw.no_padding()
        raw.no_truncation()
        named = {key: text for key, value in self._tokenizer_config.items() if (text := _token_text(key, value))}
        added = raw.get_added_tokens_decoder()
        eos = [*self._generation.eos_token_ids, self._token_id(raw, named, "eos_token")]
        return Tokenizer(
            raw,
            bos_token_id=self._token_id(raw, named, "bos_token"),
            eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos if token_id is not None)),
            special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            chat_template=self.chat_template,
            variables=named,
        )

    def _token_id(self, raw: tokenizers.Tokenizer, named: Mapping[str, str], key: str) -> int | None:
        """The id of ``bos_token`` or ``eos_token``: by its text in tokenizer_config.json, else from config.json."""
        if key in named:
            token_id: int | None = raw.token_to_id(named[key])
            return token_id
        listed = self.spec.raw.get(f"{key}_id")
        return listed if isinstance(listed, int) and raw.id_to_token(listed) is not None else None


def _config(folder: Path) -> dict[str, Any]:
    if is_there(folder / "config.json"):
        return read_json(folder / "config.json")
    ggufs = sorted(folder.glob("*.gguf"))
    hint = f"for the GGUF in it, give its path: {ggufs[0]}" if ggufs else "give a folder with config.json and *.safetensors"
    raise BrokenModel(f"{folder} has no config.json", hint=hint)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}


def _check_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    if is_there(path):
        return
    if is_there(folder / "tokenizer.model"):
        raise UnsupportedModel(
            f"{folder} has tokenizer.model but no tokenizer.json",
            hint='convert it: python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"",
        )
    raise BrokenModel(f"{folder} has no tokenizer.json", hint="fetch the folder again, with its tokenizer")


def _token_text(key: str, value: Any) -> str | None:
    """A special token of tokenizer_config.json, which is a string or an object with its content."""
    if not key.endswith("_token"):
        return None
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if is_there(path):
        try:
            return read_small_file(path, most_bytes=_MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError:
            raise BrokenModel(f"{path.name} is not UTF-8", hint="fetch it again") from None
    template = tokenizer_config.get("chat_template") or _optional_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise BrokenModel(f"{folder.name}: 'chat_template' must be a string", hint="fetch tokenizer_config.json again")
    return template
