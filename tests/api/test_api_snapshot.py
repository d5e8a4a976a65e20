"""`octavo.api` is what its snapshot says, or the changelog says how it differs: no break reaches a plugin unannounced."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_surface", Path(__file__).with_name("api_surface.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["api_surface"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = load_tool()

OLD = {
    "demo.Backend": "class(ABC)",
    "demo.Backend.attend": "abstractmethod function -> Array",
    "demo.Backend.attend(q)": "positional 0: Array",
    "demo.Spec": "class() @dataclass(frozen=True, kw_only=True)",
    "demo.Spec.scale": "field: float",
    "demo.FEATURE": "constant of words",
    "demo.FEATURE['causal']": "word",
    "demo.Worker": "class(Protocol)",
    "demo.Worker.load": "function -> None",
    "demo.helper": "function -> int",
    "demo.helper(x)": "positional 0: int",
}


def surface(changes: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> object:
    members = {name: what for name, what in (OLD | (changes or {})).items() if name not in without}
    return tool.Surface(version=(1, 0), provisional=False, members=members)


def differences(changes: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> list[tuple[str, bool]]:
    return [(change.name, change.breaks) for change in tool.compare(surface(), surface(changes, without))]


def test_the_api_is_what_the_snapshot_and_the_changelog_say() -> None:
    old = tool.Surface.parse(tool.SNAPSHOT.read_text())
    new = tool.read_surface(old.provisional)
    changes = tool.compare(old, new)
    missing = tool.unannounced(changes, tool.CHANGELOG.read_text())
    advice = "name each in a '- **api**' line of CHANGELOG.md's newest section; `make api-snapshot` then takes it in"
    assert not missing, "\n".join([advice, *map(str, missing)])
    if old.provisional:
        return
    if any(change.breaks for change in changes):
        assert new.version[0] > old.version[0], "plugins break: restore what they used, or raise API_VERSION's major"
    elif changes:
        assert new.version > old.version, "octavo.api has grown: raise API_VERSION's minor"


def test_the_snapshot_reads_back_as_it_was_written() -> None:
    now = tool.read_surface(provisional=True)
    assert tool.Surface.parse(now.text()) == now
    assert now.members["attention.AttentionBackend.attend(lse_out)"] == "keyword: Array | None = None"
    assert now.members["attention.CacheBackend.plan"].startswith("abstractmethod")
    assert now.members["manifest.Feature['sinks']"] == "word"


def test_nothing_private_is_promised() -> None:
    now = tool.read_surface(provisional=True)
    parts = {part for name in now.members for part in name.partition("(")[0].split(".")}
    assert not {part for part in parts if part.startswith("_") and not part.startswith("__")}


@pytest.mark.parametrize(
    ("gone", "reported"),
    [
        (("demo.helper", "demo.helper(x)"), "demo.helper"),
        (("demo.Spec.scale",), "demo.Spec.scale"),
        (("demo.Backend.attend(q)",), "demo.Backend.attend(q)"),
        (("demo.FEATURE['causal']",), "demo.FEATURE['causal']"),
    ],
)
def test_what_is_gone_breaks(gone: tuple[str, ...], reported: str) -> None:
    assert differences(without=gone) == [(reported, True)]


def test_another_type_or_default_breaks() -> None:
    assert differences({"demo.Spec.scale": "field: float | None"}) == [("demo.Spec.scale", True)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("demo.Spec.bias", "field: bool = False"),
        ("demo.helper(y)", "keyword: int = 0"),
        ("demo.Backend.graphs", "function -> None"),
        ("demo.FEATURE['sinks']", "word"),
        ("demo.Other", "class()"),
    ],
)
def test_an_addition_that_nobody_must_follow_breaks_nothing(name: str, what: str) -> None:
    assert differences({name: what}) == [(name, False)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("demo.Spec.bias", "field: bool"),
        ("demo.helper(y)", "positional 1: int"),
        ("demo.Backend.graphs", "abstractmethod function -> None"),
        ("demo.Worker.sleep", "function -> None"),
        # core will pass it, and an override from before doesn't take it
        ("demo.Backend.attend(lse_out)", "keyword: Array | None = None"),
    ],
)
def test_an_addition_that_plugins_lack_breaks(name: str, what: str) -> None:
    assert differences({name: what}) == [(name, True)]


def test_a_new_class_is_one_change() -> None:
    assert differences({"demo.New": "class()", "demo.New.one": "field: int", "demo.New.go": "function -> int"}) == [
        ("demo.New", False)
    ]


def test_a_method_of_a_subclass_of_an_abstract_class_is_the_plugins_too() -> None:
    derived = {"demo.Narrow": "class(Backend)", "demo.Narrow.write": "function -> None"}
    changes = tool.compare(surface(derived), surface(derived | {"demo.Narrow.write(more)": "keyword: int = 0"}))
    assert [change.breaks for change in changes] == [True]


def test_the_changelog_announces_by_name_in_its_newest_section() -> None:
    new = {"demo.Spec.bias": "field: bool = False", "demo.helper(y)": "keyword: int = 0"}
    changes = tool.compare(surface(), surface(new))
    sections = [
        "# Changelog",
        "## 0.2",
        "- **api** `Spec.bias` (new):\n  a bias\n- `helper`: faster",
        "## 0.1",
        "- **api** `helper`",
    ]
    text = "\n\n".join(sections)
    assert [change.name for change in tool.unannounced(changes, text)] == ["demo.helper(y)"]
    assert tool.unannounced(changes, text.replace("- `helper`: faster", "- **api** `helper` takes y")) == []
