"""``octavo plugin new``: names, folders, and what is written; that it works is scenario 16's test."""

from __future__ import annotations

import ast
import fnmatch
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.core.api import API_VERSION
from octavo.core.api.errors import UsageError
from octavo.core.cli import scaffold
from octavo.core.cli.main import main
from octavo.core.cli.scaffold import write_plugin
from octavo.core.discovery.manifest import read_manifest

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "core" / "cli" / "templates"


def new(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plugin", "new", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize(("name", "package", "cls"), [("acme", "acme", "Acme"), ("acme-npu-2", "acme_npu_2", "AcmeNpu2")])
def test_every_file_is_there_and_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, package: str, cls: str
) -> None:
    code, out, err = new(capsys, name, "--dir", str(tmp_path))
    assert (code, err) == (0, "")
    folder = tmp_path / name
    assert str(folder) in out
    written = {str(path.relative_to(folder)): path.read_text() for path in files(folder)}
    expected = {"pyproject.toml", "README.md", ".gitignore", ".github/workflows/conformance.yml", "tests/test_conformance.py"}
    modules = {f"{package}/{module}.py" for module in ("__init__", "probe", "platform", "attention", "kernels")}
    assert set(written) == expected | modules | {f"{package}/octavo-plugin.toml", f"{package}/py.typed"}
    for path, text in written.items():
        assert not re.search(r"@(name|package|Class|api)@", text), path
    assert f"class {cls}Platform(Platform)" in written[f"{package}/platform.py"]
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing else is left in the folder"


def test_manifest_entry_points_and_classes_agree(tmp_path: Path) -> None:
    folder = write_plugin("acme-npu", tmp_path)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    manifest = read_manifest(folder / "acme_npu" / "octavo-plugin.toml")
    assert manifest.api == API_VERSION
    assert manifest.platforms["acme-npu"].auto is False, "a new plugin doesn't take over the machine"
    assert manifest.platforms["acme-npu"].attention == ("acme-npu-attention",)
    points = {**project["entry-points"]["octavo.platforms"], **project["entry-points"]["octavo.attention_backends"]}
    assert set(points) == {*manifest.platforms, *manifest.attention}
    probe = manifest.platforms["acme-npu"].probe
    assert probe is not None
    for target in (*points.values(), probe):
        module, _, name = target.partition(":")
        tree = ast.parse((folder / f"{module.replace('.', '/')}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def test_it_imports_only_the_api_and_the_conformance_suite(tmp_path: Path) -> None:
    for path in write_plugin("acme-npu", tmp_path).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("octavo"):
                allowed = ("octavo.api.", "octavo.conformance.") if path.parent.name == "tests" else ("octavo.api.",)
                assert str(node.module).startswith(allowed), f"{path}: {node.module}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Acme", "lowercase letters"),
        ("acme_npu", "lowercase letters"),
        ("1acme", "lowercase letters"),
        ("acme-", "lowercase letters"),
        ("acme--npu", "lowercase letters"),
        ("../acme", "lowercase letters"),
        ("acme\n", "lowercase letters"),
        ("é", "lowercase letters"),
        ("", "lowercase letters"),
        ("a" * 41, "at most 40 characters"),
        ("class", "Python's own"),
        ("json", "Python's own"),
        ("torch", "installed already"),
        ("octavo", "installed already"),
        ("cpu", "a plugin 'cpu' already"),
        ("fcfs", "a plugin 'fcfs' already"),
    ],
)
def test_a_name_that_wont_do_is_refused_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    code, out, err = new(capsys, name, "--dir", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "mine").write_text("kept")
    code, _, err = new(capsys, "acme", "--dir", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert "exists already" in err
    assert [path.name for path in files(tmp_path)] == ["mine"]


def test_a_missing_parent_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = new(capsys, "acme", "--dir", str(tmp_path / "nowhere"))
    assert (code, err.count("\n")) == (2, 1)
    assert "nowhere" in err


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write_text = Path.write_text

    def fails_at_the_fourth(path: Path, *arguments: object, **keywords: object) -> int:
        written.append(path)
        if len(written) == 4:
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", fails_at_the_fourth)
    with pytest.raises(UsageError, match="No space left on device"):
        write_plugin("acme", tmp_path)
    assert len(written) == 4
    assert list(tmp_path.iterdir()) == []


def test_the_templates_travel_with_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["octavo.core.cli"]
    paths = [str(path.relative_to(TEMPLATES.parent)) for path in files(TEMPLATES)]
    assert len(paths) == 12
    for path in paths:
        assert any(fnmatch.fnmatch(path, pattern) for pattern in patterns), path
        assert not any(part.startswith(".") for part in path.split("/")), "patterns don't match dot files"
        assert path.endswith(scaffold._SUFFIX)
