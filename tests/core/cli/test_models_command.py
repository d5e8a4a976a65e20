"""``octavo models``: what the catalogue has, and fetching it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.core.loading import catalogue

Octavo = Callable[..., Any]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_the_catalogue_says_what_is_here_and_how_to_get_the_rest(octavo: Octavo, cache: Path) -> None:
    (cache / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    ended = octavo("models", "list")
    assert ended.code == 0
    here, absent = ended.out.splitlines()
    assert here.startswith("smollm2")
    assert str(cache / "SmolLM2-135M-Instruct.Q4_1.gguf") in here
    assert absent.startswith("gemma3-270m")
    assert "octavo models pull gemma3-270m --accept-license" in absent


def test_the_catalogue_as_json(octavo: Octavo, cache: Path) -> None:
    models = octavo("models", "list", "--json").document["models"]
    assert [model["name"] for model in models] == ["smollm2", "gemma3-270m"]
    assert not any(model["present"] for model in models)
    assert models[0]["size_bytes"] == 98362432
    assert models[0]["license"] == "Apache-2.0"


def test_an_unknown_name_is_refused_with_near_matches(octavo: Octavo, cache: Path) -> None:
    ended = octavo("models", "pull", "smollm")
    assert ended.code == 2
    assert "did you mean 'smollm2'" in ended.err
    assert not list(cache.iterdir())


def test_terms_must_be_accepted_first(octavo: Octavo, cache: Path) -> None:
    ended = octavo("models", "pull", "gemma3-270m")
    assert ended.code == 2
    assert "--accept-license" in ended.err
    assert not list(cache.iterdir())


def test_pulling_says_where_the_model_is(octavo: Octavo, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def pull(name: str, **options: Any) -> Path:
        calls.append((name, options))
        return cache / "here.gguf"

    monkeypatch.setattr(catalogue, "pull", pull)
    ended = octavo("models", "pull", "gemma3-270m", "--accept-license")
    assert (ended.code, ended.out) == (0, f"{cache / 'here.gguf'}\n")
    assert calls == [("gemma3-270m", {"accept_license": True, "progress": None})]


@pytest.mark.model
def test_a_model_that_is_here_is_not_fetched_again(octavo: Octavo) -> None:
    path = catalogue.find("smollm2").path
    ended = octavo("models", "pull", "smollm2")
    assert (ended.code, ended.out) == (0, f"{path}\n")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == catalogue.find("smollm2").sha256
