"""The distributions under ``tests/plugins/dists``, built and installed as pip does it, and processes that see them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DISTS = HERE.parent / "dists"
LIMIT_S = 200


@dataclass(frozen=True)
class Site:
    """A folder of installed distributions."""

    folder: Path

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``python …`` that sees them."""
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if check:
            assert done.returncode == 0, done.stderr[-4000:]
        return done

    def octavo(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "octavo", *arguments, check=check)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Every distribution, installed once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "seams"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site").exists():
            _install(shared)
    return Site(shared / "site")


def _install(shared: Path) -> None:
    wheels = shared / "wheels"
    wheels.mkdir()
    projects = sorted(str(path.parent) for path in DISTS.glob("*/pyproject.toml"))
    for command in (
        [str(HERE / "build_wheels.py"), str(wheels), *projects],
        [
            *("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"),
            *("--target", str(shared / "site"), "--find-links", str(wheels), *(Path(project).name for project in projects)),
        ],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr[-4000:]


@dataclass(frozen=True)
class Models:
    """Folders of random models of 64 words."""

    llama: Path
    tinytest: Path
    chunked: Path  # the same weights; a query sees its own chunk of 16 tokens


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    base = tmp_path_factory.mktemp("seam_models")
    hidden, heads, kv_heads, inner, layers, vocabulary = 32, 4, 2, 48, 2, 64
    torch.manual_seed(11)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * columns**-0.5

    weights = {"model.embed_tokens.weight": torch.randn(vocabulary, hidden), "lm_head.weight": matrix(vocabulary, hidden)}
    weights["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = 1 + 0.1 * torch.randn(hidden)
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden // heads * kv_heads, hidden),
            ("self_attn.v_proj", hidden // heads * kv_heads, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{prefix}.{name}.weight"] = 2 * matrix(rows, columns)
    words = Tokenizer(kinds.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    common = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "eos_token_id": 63,
    }
    kinds_of_model: dict[str, dict[str, Any]] = {
        "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "tinytest": {"architectures": ["TinyTestForCausalLM"], "model_type": "tinytest"},
        "chunked": {"architectures": ["TinyTestForCausalLM"], "model_type": "tinytest", "attention_chunk_size": 16},
    }
    for name, own in kinds_of_model.items():
        folder = base / name
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**common, **own}))
        words.save(str(folder / "tokenizer.json"))
    return Models(*(base / name for name in kinds_of_model))


@pytest.fixture(scope="session")
def results(site: Site, models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `engine_runs.py` printed: one process in which plugins of every kind ran."""
    folders = (models.llama, models.tinytest, models.chunked, tmp_path_factory.mktemp("scratch"))
    done = site.run(str(HERE / "engine_runs.py"), *map(str, folders))
    ran: dict[str, Any] = json.loads(done.stdout)
    return ran
