"""A backend whose arrays are JAX's and whose cache is never written in place satisfies the attention protocol."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "contrib" / "jax_reference" / "octavo_jax_reference"
PYTHON = ROOT / ".venv-jax" / "bin" / "python"
FAST_COMPILES = "--xla_backend_optimization_level=0"
needs_jax = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with JAX: `make jax` builds .venv-jax")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILES}
    return subprocess.run([str(PYTHON), *arguments], env=environment, capture_output=True, text=True, timeout=280, check=False)


@needs_jax
def test_the_oracle_finds_nothing_wrong() -> None:
    done = run(str(Path(__file__).with_name("jax_checks.py")))
    assert done.returncode == 0, done.stderr[-3000:]
    problems: dict[str, str] = json.loads(done.stdout)
    assert len(problems) > 30
    assert {name: problem for name, problem in problems.items() if problem} == {}


@needs_jax
def test_a_model_on_it_is_refused_and_the_reason_given() -> None:
    done = run(
        "-c",
        "from octavo.core.discovery import installed\n"
        "platform = installed().load('platform', 'jax-cpu')()\n"
        "print(*platform.reject(None))",
    )
    assert "attention alone (--platform cpu)" in done.stdout, done.stderr


def test_it_imports_only_the_api() -> None:
    imported = set()
    for path in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    ours = {name for name in imported if name.split(".")[0] == "octavo"}
    assert ours
    assert all(name.startswith("octavo.api.") for name in ours), ours
