"""`open_model`: what a name or path means, and what is said when it means nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from octavo.core.api.errors import UsageError
from octavo.core.api.manifest import ModelManifest
from octavo.core.loading import open_model
from octavo.core.loading.source import find_model


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(cache))
    return cache


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", "'smollm2' is not on this machine; fetch it with: octavo models pull smollm2$"),
        ("gemma3-270m", "octavo models pull gemma3-270m --accept-license$"),
        ("smolm2", "unknown model 'smolm2'; did you mean 'smollm2'"),
        ("zzz", "unknown model 'zzz'; known names: smollm2, gemma3-270m; or give a folder or a .gguf file"),
        ("", "no model was given"),
        ("no/such/folder", "no such model folder or file: 'no/such/folder'"),
        ("./absent.gguf", "no such model folder or file: './absent.gguf'"),
        ("~/no-such-model", "no such model folder or file"),
        ("bad\0name", "no such model|unknown model"),
        ("x" * 5000, "unknown model|no such model"),
    ],
)
def test_what_is_not_there_is_a_usage_error_that_says_what_to_do(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        open_model(name, models={})
    assert "\n" not in str(caught.value)


def test_a_catalogue_name_opens_the_file_in_the_cache(
    empty_cache: Path, make_gguf: Callable[..., Path], models: Mapping[str, ModelManifest]
) -> None:
    empty_cache.mkdir()
    make_gguf(empty_cache / "SmolLM2-135M-Instruct.Q4_1.gguf")
    source = open_model("smollm2", models=models)
    assert source.path == empty_cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert source.format == "gguf"


def test_a_path_may_be_a_string_or_a_path(
    tmp_path: Path, make_folder: Callable[..., Path], models: Mapping[str, ModelManifest]
) -> None:
    folder = make_folder(tmp_path / "model")
    assert open_model(folder, models=models).format == open_model(str(folder), models=models).format == "safetensors"


def test_a_folder_with_a_bare_name_in_the_current_folder_is_found(
    tmp_path: Path, make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert find_model("mine") == Path("mine")


def test_a_file_of_another_kind_is_refused_with_what_to_give(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(UsageError, match=r"neither a folder nor a .gguf file; give its folder"):
        open_model(weights, models={})
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(UsageError, match=r"neither a folder nor a .gguf file; give a folder with config.json"):
        open_model(other, models={})


def test_the_installed_architectures_are_the_default(tmp_path: Path, make_gguf: Callable[..., Path]) -> None:
    assert open_model(make_gguf(tmp_path / "m.gguf")).spec.model_plugin == "llama"
