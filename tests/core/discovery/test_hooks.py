from __future__ import annotations

import logging
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
