"""`open_model`: from a name or path to a checked model whose weights haven't been read yet."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path

from octavo.core.api.errors import UsageError
from octavo.core.api.manifest import ModelManifest
from octavo.core.api.models import WeightSource
from octavo.core.config.model_spec import ModelSpec
from octavo.core.config.suggest import nearest
from octavo.core.loading import catalogue
from octavo.core.loading.generation import GenerationDefaults
from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["ModelSource", "find_model", "open_model"]


class ModelSource(ABC):
    """A model on disk: architecture, headers and tokenizer have been checked, no weight has been read."""

    path: Path
    format: str  # "gguf" or "safetensors"
    spec: ModelSpec
    chat_template: str | None

    @property
    @abstractmethod
    def generation(self) -> GenerationDefaults:
        """Sampling defaults and EOS ids."""

    @abstractmethod
    def weights(self) -> WeightSource:
        """The tensors, mapped into memory and read as they are asked for."""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._build_tokenizer()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on the first call. Raises `BrokenModel` where the files make none."""
        return self._tokenizer

    @abstractmethod
    def _build_tokenizer(self) -> Tokenizer: ...


def open_model(name_or_path: str | PathLike[str], *, models: Mapping[str, ModelManifest] | None = None) -> ModelSource:
    """Open a catalogue name (a bare word), a folder (safetensors + tokenizer.json) or a ``.gguf`` file.

    Checks, in this order, the architecture (against ``models``, by default those of the installed plugins), the headers, the
    tokenizer. Nothing is downloaded and no weight is read. Raises `UsageError` when there is no such model, saying which
    command fetches it, `UnsupportedModel` and `BrokenModel` when it can't be run.
    """
    path = find_model(fspath(name_or_path))
    if models is None:
        from octavo.core.discovery import installed

        models = installed().models()
    if path.is_dir():
        from octavo.core.loading.folder import FolderModel

        return FolderModel(path, models)
    from octavo.core.loading.gguf import GGUFModel

    return GGUFModel(path, models)


def find_model(name: str) -> Path:
    """The file or folder that ``name`` means. Raises `UsageError` when there is none."""
    if not name:
        raise UsageError("no model was given", hint=f"name one of {', '.join(catalogue.CATALOGUE)}, a folder or a .gguf file")
    shown = repr(name if len(name) <= 200 else name[:200] + "…")
    path = Path(os.path.expanduser(name))
    # os.path, unlike Path, answers no for names that no file can have.
    is_folder, exists = os.path.isdir(path), os.path.exists(path)
    if name in catalogue.CATALOGUE:
        entry = catalogue.CATALOGUE[name]
        if not entry.path.exists():
            raise UsageError(
                f"model {name!r} is not on this machine", hint=f"fetch it with: octavo models pull {entry.pull_arguments}"
            )
        return entry.path
    if is_folder or (exists and path.suffix == ".gguf"):
        return path
    if exists:
        raise UsageError(f"{shown} is neither a folder nor a .gguf file", hint=_hint_for(path))
    if path.name != name or path.suffix == ".gguf":
        raise UsageError(f"no such model folder or file: {shown}")
    raise UsageError(
        f"unknown model {shown}{nearest(name, catalogue.CATALOGUE)}",
        hint=f"known names: {', '.join(catalogue.CATALOGUE)}; or give a folder or a .gguf file",
    )


def _hint_for(path: Path) -> str:
    if path.suffix == ".safetensors":
        return f"give its folder, {path.parent}, which must also hold config.json and tokenizer.json"
    return "give a folder with config.json, *.safetensors and tokenizer.json, or a .gguf file"
