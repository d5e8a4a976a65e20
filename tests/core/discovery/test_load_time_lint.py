from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest

from octavo.core.api.deprecation import OctavoDeprecationWarning, deprecated, removal_of
from octavo.core.api.errors import PluginUnavailable
from octavo.core.api.manifest import AttentionManifest, IntRange
from octavo.core.discovery import lint


class Base(ABC):
    @abstractmethod
    def copy_blocks(self, kv: Any, pairs: Any) -> Any: ...

    def attend(self, q: Any, kv: Any, *, lse_out: Any = None) -> Any:
        return q

    @classmethod
    def supports(cls, spec: Any, *, arch: str | None = None) -> bool:
        return True


def override(function: Any) -> Any:
    """What typing.override does from Python 3.12 on."""
    function.__override__ = True
    return function


def test_overrides_that_take_what_is_passed_are_fine() -> None:
    class Good(Base):
        def copy_blocks(self, cache: Any, wanted: Any, extra: int = 0) -> Any: ...
        def attend(self, *arguments: Any, **more: Any) -> Any: ...
        @classmethod
        def supports(cls, spec: Any, *, arch: str | None = None, more: int = 1) -> bool:
            return False

        def something_of_its_own(self) -> None: ...

    assert lint.errors(Good, Base) == ()
    assert lint.warnings(Good, Base) == ()


def test_signatures_that_do_not_fit_are_errors() -> None:
    class Bad(Base):
        def copy_blocks(self, kv: Any) -> Any: ...
        def attend(self, q: Any, kv: Any) -> Any: ...
        @classmethod
        def supports(cls, spec: Any, mode: int, *, arch: str | None = None) -> bool:
            return False

    found = "\n".join(lint.errors(Bad, Base))
    assert "Bad.copy_blocks(self, kv: 'Any') -> 'Any' doesn't take what octavo.api passes" in found
    assert "it takes 2 arguments, not 3" in found
    assert "it lacks the keyword lse_out" in found
    assert "it needs mode, which nobody passes" in found


def test_overrides_of_nothing_are_reported() -> None:
    class Old(Base):
        def copy_blocks(self, kv: Any, pairs: Any) -> Any: ...
        def copy_block(self) -> None: ...
        def warm_up(self) -> None: ...
        @override
        def graphs(self) -> None: ...

    found = lint.warnings(Old, Base, removed={"Base": {"warm_up": "use plan()"}})
    assert set(found) == {
        "Old.copy_block is never called; did you mean copy_blocks?",
        "Old.warm_up is never called: Base no longer has it; use plan()",
        "Old.graphs is marked as an override, but Base has no such method",
    }


def test_capabilities_that_nothing_backs_are_reported() -> None:
    table = AttentionManifest(
        name="acme",
        platforms=(),
        dtypes=(),
        kv_dtypes=(),
        head_sizes=IntRange(),
        block_sizes=IntRange(),
        features=("lse", "graph_decode"),
    )

    class Ignores(Base):
        def attend(self, q: Any, kv: Any, *, lse_out: Any = None) -> Any:
            return q

    class Uses(Base):
        def attend(self, q: Any, kv: Any, *, lse_out: Any = None) -> Any:
            if lse_out is not None:
                lse_out.zero_()
            return q

    assert "acme declares lse, but Ignores.attend never uses lse_out" in lint.warnings(Ignores, Base, table)
    (only,) = lint.warnings(Uses, Base, table)
    assert "graph_decode, which nothing backs" in only


EXECUTOR = """
class Executor:
    def start(self, config): ...
    def execute(self, step, more): ...
    def check_health(self): ...
    def shutdown(self): ...
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (EXECUTOR, "lacks required methods of Executor: call"),
        (EXECUTOR + "    def call(self, method, **arguments): ...\n", "Executor.execute(self, step, more) doesn't take what"),
        ("Executor = 3", "must be a class with the methods of octavo.api's Executor"),
    ],
)
def test_an_executor_is_held_to_its_protocol(local_plugins: Any, code: str, says: str) -> None:
    points = {"octavo.executors": {"acme": "acme_executor.it:Executor"}}
    manifest = '[plugin]\nname = "acme"\napi = "1.0"\n[executor.acme]\n'
    local_plugins.add("acme-executor", manifest=manifest, files={"it.py": code}, entry_points=points)
    with pytest.raises(PluginUnavailable) as caught:
        local_plugins.registry().load("executor", "acme")
    assert says in str(caught.value)


def test_ops_must_be_a_function(local_plugins: Any) -> None:
    manifest = '[plugin]\nname = "acme"\napi = "1.0"\n[ops.acme]\nimplements = ["rms_norm"]\nplatforms = ["cpu"]\n'
    points = {"octavo.ops": {"acme": "acme_ops.it:ops"}}
    local_plugins.add("acme-ops", manifest=manifest, files={"it.py": "ops = {}"}, entry_points=points)
    with pytest.raises(PluginUnavailable, match="must be a function of the platform"):
        local_plugins.registry().load("ops", "acme")


def test_our_own_plugins_are_clean() -> None:
    from octavo.core.discovery import installed
    from octavo.core.discovery.contracts import contract

    registry = installed()
    checked = 0
    for entry in registry.entries:
        if entry.distribution == "octavo" and (base := contract(entry)) is not None:
            cls = registry.load(entry.kind, entry.name)
            assert lint.errors(cls, base) == ()
            assert lint.warnings(cls, base, entry.table) == ()
            checked += 1
    assert checked >= 9


class TestDeprecation:
    def test_it_warns_with_the_replacement_and_the_date(self) -> None:
        @deprecated(since=(1, 0), use="new()")
        def old(number: int) -> int:
            return number + 1

        with pytest.warns(
            OctavoDeprecationWarning, match=r"old is deprecated since octavo.api 1.0 and goes in 1.2: use new\(\)"
        ):
            assert old(1) == 2

    def test_an_override_of_what_goes_is_reported_when_it_is_loaded(self) -> None:
        class Parent:
            @deprecated(since=(1, 0), use="read_blocks()")
            def dump(self) -> bytes:
                return b""

        class Child(Parent):
            def dump(self) -> bytes:
                return b"x"

        (line,) = lint.warnings(Child, Parent)
        assert line.startswith("Child.dump overrides what goes: ")
        assert line.endswith("use read_blocks()")

    def test_two_minors_later_it_has_to_be_gone(self) -> None:
        assert removal_of((1, 3)) == (1, 5)
        with pytest.raises(RuntimeError, match=r"it had to be deleted in 0.5"):
            deprecated(since=(0, 3), use="x")
