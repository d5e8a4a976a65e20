"""Plugins written against a released minor of octavo.api, installed by pip, run on the core of today and on a later one."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FROZEN = Path(__file__).parents[1] / "frozen"
PLUGIN = FROZEN / "plugin_1_0"
LATER_CORE = FROZEN / "api_1_1.py"

LOAD_EVERYTHING = """
from octavo.core.discovery import installed

registry = installed()
mine = [entry for entry in registry.entries if entry.distribution == "octavo-frozen-1-0"]
for entry in mine:
    registry.load(entry.kind, entry.name)
    assert not entry.warning, entry.warning
print(*sorted(entry.name for entry in mine))
"""

HOLD_TO_THE_ORACLE = """
import json
from octavo.conformance.declared import declared_cases
from octavo.conformance.driver import compare, run_backend
from octavo.core.discovery import installed

registry = installed()
backend = registry.load("attention", "frozen-attention")
platform = registry.load("platform", "frozen-host")()
platform.bind(0)
cases = [
    case for case in declared_cases(backend.manifest, seed=7) if backend.supports(case.spec, block_size=case.block_size)
]
wrong = {
    case.name: [str(deviation) for deviation in compare(run_backend(backend, platform, case, lse=True), case) if not deviation]
    for case in cases
}
print(json.dumps(wrong))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin as pip installs it."""
    folder = tmp_path_factory.mktemp("frozen")
    shutil.copytree(PLUGIN, folder / "source")  # a build writes beside its sources
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    command = [*pip, "--target", str(folder / "site"), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def box(plugin_box: Any, site: Path) -> Any:
    shutil.copytree(site, plugin_box.site, dirs_exist_ok=True)
    return plugin_box


def generate(
    box: Any, model: Path, *arguments: str, later: bool = False, asked: bool = False
) -> subprocess.CompletedProcess[str]:
    command = ["generate", "--model", str(model), "--prompt", "w1 w2 w3", "--max-tokens", "8", "--json", *arguments]
    start = [str(LATER_CORE), *(["--asked"] if asked else [])] if later else ["-m", "octavo"]
    done: subprocess.CompletedProcess[str] = box.python(*start, *command)
    return done


def test_it_imports_nothing_of_octavo_but_the_api() -> None:
    ours = [
        node.module
        for path in PLUGIN.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "octavo"
    ]
    assert len(ours) > 5
    assert all(module.startswith("octavo.api.") for module in ours), ours


def test_everything_in_it_still_loads_without_a_complaint(box: Any) -> None:
    done = box.python("-W", "error::DeprecationWarning", "-c", LOAD_EVERYTHING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["frozen-attention", "frozen-hook", "frozen-host", "frozen-ops", "frozen-policy"]


def test_its_attention_is_still_right(box: Any) -> None:
    done = box.python("-c", HOLD_TO_THE_ORACLE)
    assert done.returncode == 0, done.stderr
    wrong: dict[str, list[str]] = json.loads(done.stdout)
    assert len(wrong) > 40
    assert {name: problems for name, problems in wrong.items() if problems} == {}


def test_it_runs_a_model_to_the_same_tokens_as_our_own_backend(box: Any, model: Path) -> None:
    ours = generate(box, model, "--platform", "cpu", "--attention-backend", "reference")
    assert ours.returncode == 0, ours.stderr
    theirs = generate(
        box, model, "--platform", "frozen-host", "--plugin", "frozen-hook", "--scheduling-policy", "frozen-policy"
    )
    assert theirs.returncode == 0, theirs.stderr
    answer, expected = json.loads(theirs.stdout), json.loads(ours.stdout)
    assert answer["token_ids"] == expected["token_ids"]
    assert len(answer["token_ids"]) == 8
    assert answer["platform"] == "frozen-host"
    assert "frozen-attention" in json.dumps(answer["attention_backend"])
    explained = box.python("-m", "octavo", "explain", str(model), "--platform", "frozen-host", "--ops", "--json")
    assert "frozen-ops" in explained.stdout, explained.stderr


def test_on_a_later_minor_it_works_where_nothing_new_is_asked_of_it(box: Any, model: Path) -> None:
    now = generate(box, model, "--platform", "frozen-host")
    later = generate(box, model, "--platform", "frozen-host", later=True)
    assert later.returncode == 0, later.stderr
    assert json.loads(later.stdout)["token_ids"] == json.loads(now.stdout)["token_ids"]


def test_on_a_later_minor_it_refuses_what_it_does_not_know(box: Any, model: Path) -> None:
    done = generate(box, model, "--platform", "frozen-host", later=True, asked=True)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "frozen-attention" in done.stderr
    assert "tree_mask: wanted True, since octavo.api 1.1, supports octavo.api 1.0" in done.stderr
