"""No distribution under ``tests/plugins/dists`` patches anything of Octavo's: by its source, and by what was watched."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = sorted((HERE.parent / "dists").glob("*/*/*.py"))
_PATCHING = ("setattr", "delattr", "patch", "monkeypatch")


def problems(source: str) -> list[str]:
    """What a plugin's source may not do: import more than ``octavo.api``, or change what it imported from it."""
    return [f"line {node.lineno}: {what}" for node, what in _problems(ast.parse(source))]


def _problems(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for module, name in _imported(node):
                if module.partition(".")[0] == "octavo":
                    ours.add(name)
                    if not (module + ".").startswith("octavo.api."):
                        yield node, f"imports {module}"
    for node in ast.walk(tree):
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else getattr(node, "targets", [])
        for target in targets if isinstance(targets, list) else []:
            if isinstance(target, (ast.Attribute, ast.Subscript)) and _root(target) in ours:
                yield node, f"changes {ast.unparse(target)}"
        if isinstance(node, (ast.Name, ast.Attribute)) and _last(node) in _PATCHING:
            yield node, f"uses {ast.unparse(node)}"
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
            yield node, "uses sys.modules"


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """(module, name it is bound to here) of an import."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield f"{node.module}.{alias.name}", alias.asname or alias.name
        else:
            yield alias.name, alias.asname or alias.name.partition(".")[0]


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_source_imports_only_the_api_and_changes_nothing_of_it(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import octavo.core.scheduling.scheduler",
        "from octavo.core.layers import ops",
        "from octavo import core",
        "import octavo\n",
        "from octavo.api import platform\nplatform.Platform.zeros = None",
        "from octavo.api.ops import OPS as names\nnames.x[0] += 1",
        "from octavo.api.ops import OPS\nsetattr(OPS, 'x', 1)",
        "from unittest import mock\nmock.patch('octavo.api.ops.OPS')",
        "import sys\nsys.modules['octavo.core'] = None",
        "from octavo.api import layers\ndel layers.Ops",
    ],
)
def test_a_source_that_patches_is_found_out(source: str) -> None:
    assert problems(source)


def test_nothing_of_octavo_was_replaced_while_they_ran(results: dict[str, Any]) -> None:
    assert results["changed"] == []
    assert results["watched"] > 1000, "functions, classes and methods of Octavo"
    expected = {"seam_device", "seam_attention", "seam_ops", "seam_model", "seam_executor", "seam_policy", "seam_chunks"}
    assert expected | {"seam_hook", "seam_worker"} <= {name.partition(".")[0] for name in results["changed_by_plugin"]}
    assert {name: changed for name, changed in results["changed_by_plugin"].items() if changed} == {}


def test_the_watch_sees_a_patch_and_who_made_it(results: dict[str, Any]) -> None:
    """A function of a module, a method of a class, and a class."""
    changed = results["caught"]
    assert "octavo.core.config.suggest.nearest" in changed
    assert "octavo.core.scheduling.scheduler.Scheduler.schedule" in changed
    assert "octavo.core.layers.ops.Ops" in changed
