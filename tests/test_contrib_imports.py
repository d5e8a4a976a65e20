"""What import-linter can't see: the distributions in contrib/ and the plugins in tests/ stand outside the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDERS = sorted(
    path
    for folder in ("contrib", "tests/plugins/dists", "tests/frozen")
    for path in (ROOT / folder).rglob("*.py")
    if "octavo" in path.read_text(encoding="utf-8") and not path.name.startswith(("test_", "api_"))
)


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def foreign(source: str) -> list[str]:
    """What a plugin has no business importing: parts of Octavo but its api, and second copies of its folders."""
    return [
        name
        for name in imported(source)
        if name.split(".")[0] in ("core", "backends", "plugins", "conformance")
        or (name.startswith("octavo.") and not name.startswith(("octavo.api", "octavo.conformance")) and name.count(".") > 1)
    ]


def test_there_are_outsiders_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in OUTSIDERS} == {"contrib", "tests"}


@pytest.mark.parametrize("path", OUTSIDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_outside_import_only_the_api_and_the_front(path: Path) -> None:
    assert foreign(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line", ["from octavo.core.engine import llm", "import octavo.core.worker", "import core", "from core import api"]
)
def test_the_check_sees_what_it_forbids(line: str) -> None:
    assert foreign(line)


@pytest.mark.parametrize(
    "line", ["from octavo import LLM", "from octavo.api.platform import Platform", "import octavo.api", "import torch"]
)
def test_the_check_allows_what_plugins_need(line: str) -> None:
    assert not foreign(line)
