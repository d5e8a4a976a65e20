from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest

from octavo.api.hooks import hookimpl
from octavo.core.api.errors import PluginUnavailable
from octavo.core.config import EngineConfig
from octavo.core.discovery.hooks import Hooks


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    return caplog


class Counting:
    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def octavo_step_finished(self, step_s: float) -> None:
        self.steps += 1

    @hookimpl
    def octavo_metrics(self) -> Mapping[str, float]:
        return {"steps": self.steps}


class Raising:
    @hookimpl
    def octavo_step_finished(self) -> None:
        raise ValueError("disk full")

    @hookimpl
    def octavo_metrics(self) -> Mapping[str, float]:
        return {"never": 1}


class Slow:
    @hookimpl
    def octavo_step_finished(self) -> None:
        time.sleep(0.02)


def steps(hooks: Hooks, count: int) -> None:
    for _ in range(count):
        hooks.call("octavo_step_finished", stats=None, step_s=0.1)


def test_every_plugin_is_called_and_its_figures_carry_its_name() -> None:
    hooks = Hooks({"one": Counting, "two": Counting()}, budget_ms=1e4)
    assert hooks
    steps(hooks, 3)
    assert hooks.call("octavo_metrics") == [{"one/steps": 3.0, "two/steps": 3.0}]


def test_a_hook_that_raises_is_named_counted_and_disabled(log: pytest.LogCaptureFixture) -> None:
    hooks = Hooks({"bad": Raising(), "good": Counting()}, budget_ms=1e4)
    steps(hooks, 3)
    (record,) = log.records
    assert record.getMessage() == "plugin 'bad' raised in octavo_step_finished and is disabled: ValueError: disk full"
    assert hooks.call("octavo_metrics") == [{"good/steps": 3.0, "hooks/errors/bad": 1.0}]


def test_a_slow_hook_is_reported_once_and_counted_every_time(log: pytest.LogCaptureFixture) -> None:
    hooks = Hooks({"slow": Slow()}, budget_ms=5)
    steps(hooks, 3)
    (record,) = log.records
    assert record.getMessage().startswith("plugin 'slow' took ")
    assert record.getMessage().endswith(" ms in octavo_step_finished, its budget is 5 ms")
    assert hooks.call("octavo_metrics") == [{"hooks/slow/slow": 3.0}]


def test_metrics_that_are_no_numbers_disable_their_plugin(log: pytest.LogCaptureFixture) -> None:
    class Wrong:
        @hookimpl
        def octavo_metrics(self) -> Any:
            return {"name": "text"}

    hooks = Hooks({"wrong": Wrong()}, budget_ms=1e4)
    assert hooks.call("octavo_metrics") == [{"hooks/errors/wrong": 1.0}]
    assert "not a mapping of numbers" in log.records[0].getMessage()


def test_a_hook_that_does_not_exist_is_refused() -> None:
    class Unknown:
        @hookimpl
        def octavo_step_finnished(self) -> None: ...

    class Arguments:
        @hookimpl
        def octavo_step_finished(self, tokens: int) -> None: ...

    for plugin, says in (
        (Unknown, "octavo_step_finnished"),
        (Arguments, "tokens"),
        (object(), "has no hook: mark its methods"),
    ):
        with pytest.raises(PluginUnavailable, match=says):
            Hooks({"it": plugin})


def test_without_plugins_nothing_is_called() -> None:
    hooks = Hooks(budget_ms=1)
    assert not hooks
    assert hooks.call("octavo_step_finished", stats=None, step_s=0.0) == []


MANIFEST = """
[plugin]
name = "acme-metrics"
api = "1.0"
autoload = {autoload}
[hook.counter]
help = "counts steps"
"""
CODE = """
from octavo.api.hooks import hookimpl
class Counter:
    @hookimpl
    def octavo_metrics(self):
        return {"one": 1}
"""


@pytest.mark.parametrize(
    ("autoload", "enabled", "on"),
    [("false", (), False), ("false", ("counter",), True), ("false", ("acme-metrics",), True), ("true", (), True)],
)
def test_hooks_act_when_named_or_when_they_autoload(
    local_plugins: Any, autoload: str, enabled: tuple[str, ...], on: bool
) -> None:
    points = {"octavo.hooks": {"counter": "acme_metrics.code:Counter"}}
    local_plugins.add("acme-metrics", manifest=MANIFEST.format(autoload=autoload), files={"code.py": CODE}, entry_points=points)
    hooks = Hooks.load(local_plugins.registry(), EngineConfig.from_flat(plugin=enabled))
    assert bool(hooks) is on


def test_a_hook_plugin_that_fails_is_fatal_when_named_and_left_out_when_it_autoloads(
    local_plugins: Any, log: pytest.LogCaptureFixture
) -> None:
    points = {"octavo.hooks": {"counter": "acme_metrics.code:Counter"}}
    files = {"code.py": "raise OSError('no socket')"}
    local_plugins.add("acme-metrics", manifest=MANIFEST.format(autoload="false"), files=files, entry_points=points)
    manifest = MANIFEST.format(autoload="true").replace("counter", "other").replace("acme-metrics", "other")
    points = {"octavo.hooks": {"other": "acme_other.code:Counter"}}
    local_plugins.add("acme-other", manifest=manifest, files=files, entry_points=points)
    assert not Hooks.load(local_plugins.registry(), EngineConfig())
    assert "'other' (acme-other 1.0) is failed-to-load: OSError: no socket; going on without it" in log.text
    with pytest.raises(PluginUnavailable, match=r"hook 'counter' \(acme-metrics 1.0\) is failed-to-load: OSError: no socket"):
        Hooks.load(local_plugins.registry(), EngineConfig.from_flat(plugin="counter"))


BROKEN = {
    "its __init__ raises": (
        "def __init__(self): raise OSError('no socket')\n    @hookimpl\n    def octavo_metrics(self): return {}",
        r"failed in __init__\(\): OSError: no socket",
    ),
    "its __init__ ends the process": (
        "def __init__(self): raise SystemExit(3)\n    @hookimpl\n    def octavo_metrics(self): return {}",
        r"failed in __init__\(\): SystemExit: 3",
    ),
    "a hook that doesn't exist": (
        "@hookimpl\n    def octavo_metrix(self): return {}",
        "doesn't fit octavo.api's hooks: .*metrix",
    ),
    "a wrong argument": (
        "@hookimpl\n    def octavo_engine_stopped(self): pass\n    @hookimpl\n    def octavo_metrics(self, tokens): return {}",
        "doesn't fit octavo.api's hooks: .*tokens",
    ),
    "no hook": ("def octavo_metrics(self): return {}", "has no hook: mark its methods"),
}


def add_hook(box: Any, name: str, body: str, *, autoload: str) -> None:
    box.add(
        f"acme-{name}",
        manifest=MANIFEST.format(autoload=autoload).replace("counter", name).replace("acme-metrics", f"acme-{name}"),
        files={"code.py": f"from octavo.api.hooks import hookimpl\nclass Counter:\n    {body}\n"},
        entry_points={"octavo.hooks": {name: f"acme_{name}.code:Counter"}},
    )


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_can_not_be_made_is_left_out_when_nobody_asked_for_it(
    local_plugins: Any, log: pytest.LogCaptureFixture, fault: str, first: bool
) -> None:
    body, says = BROKEN[fault]
    good = "@hookimpl\n    def octavo_metrics(self): return {'one': 1}"
    for name, code in sorted({"bad" if first else "wrong": body, "good": good}.items()):
        add_hook(local_plugins, name, code, autoload="true")
    hooks = Hooks.load(local_plugins.registry(), EngineConfig())
    assert hooks.call("octavo_metrics") == [{"good/one": 1.0}]
    assert hooks.call("octavo_engine_stopped") == []
    (record,) = log.records
    name = "bad" if first else "wrong"
    assert re.fullmatch(rf"hook '{name}' \(acme-{name} 1.0\) {says}.*; going on without it", record.getMessage())


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("enabled", ["bad", "acme-bad"])
@pytest.mark.parametrize("autoload", ["true", "false"])
def test_a_hook_that_can_not_be_made_is_fatal_when_it_was_asked_for(
    local_plugins: Any, fault: str, enabled: str, autoload: str
) -> None:
    body, says = BROKEN[fault]
    add_hook(local_plugins, "bad", body, autoload=autoload)
    with pytest.raises(PluginUnavailable, match=rf"hook 'bad' \(acme-bad 1.0\) {says}"):
        Hooks.load(local_plugins.registry(), EngineConfig.from_flat(plugin=enabled))
