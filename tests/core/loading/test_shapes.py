"""Which tensors a file must have: what core's own architectures share, and nothing that another one does otherwise."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octavo.core.models
from octavo.core.api.errors import BrokenModel
from octavo.core.api.manifest import ModelManifest
from octavo.core.loading import open_model
from octavo.core.loading.shapes import CHECKED

Arrays = dict[str, np.ndarray[Any, Any]]

OUTSIDE = {"other": ModelManifest(name="other", architectures=("OtherForCausalLM",), gguf=("other",))}


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def other_tensors(tensors: Arrays) -> Arrays:
    """The Llama's tensors as another family keeps them: q, k and v fused, wider q norms, a layer more than the model has."""
    kept = {name: value for name, value in tensors.items() if "self_attn" not in name and name != "model.norm.weight"}
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        kept |= {
            f"{attention}.qkv_proj.weight": ones(64, 32),
            f"{attention}.q_norm.weight": ones(32),
            f"{attention}.dense.weight": ones(32, 32),
        }
    return kept | {"model.layers.2.eh_proj.weight": ones(32, 64), "model.final_layernorm.weight": ones(32)}


def test_an_architecture_from_outside_may_name_and_shape_its_tensors_as_it_likes(
    tmp_path: Path,
    make_folder: Callable[..., Path],
    make_config: Callable[..., dict[str, Any]],
    folder_tensors: Callable[[], Arrays],
) -> None:
    config = make_config(architectures=["OtherForCausalLM"], model_type="other", tie_word_embeddings=False)
    tensors = other_tensors(folder_tensors())
    folder = make_folder(tmp_path / "model", config=config, tensors=tensors)
    weights = open_model(folder, models=OUTSIDE).weights()
    assert all(name in weights for name in tensors)
    with pytest.raises(BrokenModel, match=r"q_proj\.weight' is missing"):  # said to the plugin that asks for it
        weights.linear("model.layers.0.self_attn.q_proj.weight")


def test_a_gguf_of_an_architecture_from_outside_may_too(tmp_path: Path, make_gguf: Callable[..., Path]) -> None:
    parts = [f"blk.{layer}.attn_{part}.weight" for layer in range(2) for part in "qkv"]
    fused = {f"blk.{layer}.attn_qkv.weight": ones(64, 32) for layer in range(2)}
    path = make_gguf(tmp_path / "other.gguf", arch="other", tensors=fused, without=parts)
    assert "blk.1.attn_qkv.weight" in open_model(path, models=OUTSIDE).weights()


def test_the_same_file_is_broken_for_an_architecture_of_core(
    tmp_path: Path, make_folder: Callable[..., Path], folder_tensors: Callable[[], Arrays], models: Mapping[str, ModelManifest]
) -> None:
    folder = make_folder(tmp_path / "model", tensors=other_tensors(folder_tensors()))
    with pytest.raises(BrokenModel, match=r"'model\.norm\.weight' is missing"):
        open_model(folder, models=models)


def test_every_architecture_that_core_ships_is_checked() -> None:
    manifest = Path(octavo.core.models.__file__).with_name("octavo-plugin.toml")
    shipped = tomllib.loads(manifest.read_text())["model"].values()
    assert {name for model in shipped for name in model["architectures"]} == CHECKED
