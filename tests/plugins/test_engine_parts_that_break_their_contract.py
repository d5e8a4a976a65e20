"""Policies, proposers, executors, hooks and models that answer wrongly: the engine says whose fault it is, and never hangs."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.api.errors import EngineError, OctavoError, PluginError, PluginUnavailable
from octavo.core.discovery.registry import forget_installed

POLICY = "import sys\nfrom octavo.api.scheduling import SchedulingPolicy\nclass It(SchedulingPolicy):\n    name = 'it'\n"
PROPOSER = "import sys\nfrom octavo.api.scheduling import Proposer\nclass It(Proposer):\n    name = 'it'\n"
EXECUTOR = """
import sys
from concurrent.futures import Future
from octavo.core.executor.inline import InlineExecutor

def done(result):
    future = Future()
    future.set_result(result)
    return future

class It(InlineExecutor):
"""
HOOK = "import sys\nfrom octavo.api.hooks import hookimpl\nclass It:\n"


def install(box: Any, kind: str, head: str, body: str, more: str = "", *, plugin: str = "") -> None:
    group = {"scheduling_policy": "scheduling_policies"}.get(kind, f"{kind}s")
    box.add(
        "acme-it",
        manifest=f'[plugin]\nname = "acme-it"\napi = "1.0"\n{plugin}\n[{kind}.it]\n{more}\n',
        files={"it.py": head + textwrap.indent(body, "    ") + "\n"},
        entry_points={f"octavo.{group}": {"it": "acme_it.it:It"}},
    )


def run(model: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(model), platform="cpu", num_blocks=64, **options) as llm:
        answers = llm.generate(["w1 w2 w3", "w1"], params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def key(self, request): raise OSError('x')", r"failed in key\(\): OSError: x"),
        ("def key(self, request): sys.exit(1)", r"failed in key\(\): SystemExit: 1"),
        ("def key(self, request): return None", r"answers key\(\) with None, not a tuple of numbers"),
        ("def key(self, request): return (float('nan'),)", r"answers key\(\) with \(nan,\), not a tuple of numbers"),
        ("def key(self, request): return 'abc'", r"answers key\(\) with 'abc', not a tuple of numbers"),
        ("def __init__(self): raise OSError('x')\ndef key(self, request): return (1,)", r"failed in __init__\(\): OSError: x"),
    ],
)
def test_a_policy(local_plugins: Any, model: Path, body: str, says: str) -> None:
    install(local_plugins, "scheduling_policy", POLICY, body)
    with pytest.raises(PluginError, match=rf"scheduling policy 'it' \(acme-it 1.0\) {says}"):
        run(model, scheduling_policy="it")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return [[10**6] * k for _ in tokens]", r"with \[1000000, 1000000\], not a list of token ids below 64"),
        ("return [[-1] * k for _ in tokens]", r"with \[-1, -1\], not a list of token ids below 64"),
        ("return [[2**40] * k for _ in tokens]", "not a list of token ids below 64"),
        ("return [[1.5] * k for _ in tokens]", r"with \[1.5, 1.5\], not a list of token ids"),
        ("return [['a'] * k for _ in tokens]", r"with \['a', 'a'\], not a list of token ids"),
        ("return [[[1]] for _ in tokens]", r"with \[\[1\]\], not a list of token ids"),
        ("return None", "TypeError: 'NoneType' object is not iterable"),
        ("return []", "with 0 guesses for 2 sequences"),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_proposer(local_plugins: Any, model: Path, body: str, says: str) -> None:
    install(local_plugins, "proposer", PROPOSER, f"def propose(self, tokens, k):\n    {body}")
    with pytest.raises(PluginError, match=rf"proposer 'it' \(acme-it 1.0\) .*propose\(\).*{says}"):
        run(model, speculative="it", num_speculative_tokens=2)


def test_a_proposer_that_guesses_more_than_it_was_asked_for_changes_nothing(local_plugins: Any, model: Path) -> None:
    install(local_plugins, "proposer", PROPOSER, "def propose(self, tokens, k): return [[1] * (k + 50) for _ in tokens]")
    assert run(model, speculative="it", num_speculative_tokens=2) == run(model)


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        ("def __init__(self): raise OSError('x')", PluginError, r"failed in __init__\(\): OSError: x"),
        ("def start(self, config): raise OSError('x')", PluginError, r"failed in start\(\): OSError: x"),
        ("def start(self, config): sys.exit(1)", PluginError, r"failed in start\(\): SystemExit: 1"),
        ("def start(self, config): super().start(config)", PluginError, r"answers start\(\) with None, not an ExecutorInfo"),
        ("def execute(self, step): return None", PluginError, r"answers execute\(\) with None, not a Future"),
        ("def execute(self, step): return done(None)", PluginError, "completes a step with None, not a StepResult"),
        (
            "def execute(self, step):\n    result = super().execute(step).result()\n"
            "    result.sampled = result.sampled * 1.5\n    return done(result)",
            PluginError,
            "not a StepResult of token ids",
        ),
        (
            "def execute(self, step):\n    future = Future()\n    future.cancel()\n    return future",
            EngineError,
            "a step failed: CancelledError",
        ),
        ("def execute(self, step): sys.exit(3)", EngineError, "a step failed: SystemExit: 3"),
        (
            "def execute(self, step): raise OSError('first')\ndef shutdown(self): super().shutdown(); raise OSError('second')",
            EngineError,
            "a step failed: OSError: first",
        ),
    ],
)
@pytest.mark.timeout(60)
def test_an_executor(local_plugins: Any, model: Path, body: str, error: type[OctavoError], says: str) -> None:
    install(local_plugins, "executor", EXECUTOR, body)
    with pytest.raises(error, match=says) as caught:
        run(model, executor="it")
    assert error is EngineError or "executor 'it'" in str(caught.value)


@pytest.mark.parametrize("raised", ["SystemExit(3)", "GeneratorExit", "OSError('x')"])
def test_a_hook_that_ends_the_process_does_not(local_plugins: Any, model: Path, raised: str) -> None:
    install(local_plugins, "hook", HOOK, f"@hookimpl\ndef octavo_step_finished(self, stats, step_s): raise {raised}")
    assert run(model, plugin=("acme-it",)) == run(model)


def test_a_hook_that_can_not_be_made_is_named(local_plugins: Any, model: Path) -> None:
    install(local_plugins, "hook", HOOK, "def __init__(self): sys.exit(4)\n@hookimpl\ndef octavo_engine_stopped(self): pass")
    with pytest.raises(PluginUnavailable, match=r"hook 'it' \(acme-it 1.0\) failed in __init__\(\): SystemExit: 4"):
        run(model, plugin=("acme-it",))


def test_a_hook_that_can_not_be_made_and_that_nobody_asked_for_stops_nothing(
    local_plugins: Any, model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    expected = run(model)
    body = "def __init__(self): raise OSError('x')\n@hookimpl\ndef octavo_engine_stopped(self): pass"
    install(local_plugins, "hook", HOOK, body, plugin="autoload = true")
    forget_installed()
    assert run(model) == expected
    says = "hook 'it' (acme-it 1.0) failed in __init__(): OSError: x; going on without it"
    assert [record.getMessage() for record in caplog.records].count(says) == 1


def test_two_models_for_one_architecture_are_both_named(local_plugins: Any, model: Path) -> None:
    head = "from octavo.core.models.llama import LlamaForCausalLM\nclass It(LlamaForCausalLM):\n"
    install(local_plugins, "model", head, "pass", 'architectures = ["LlamaForCausalLM"]')
    says = r"'LlamaForCausalLM' is claimed by the model plugins 'it' \(acme-it 1.0\) and 'llama' \(octavo .*\); uninstall"
    with pytest.raises(PluginError, match=says):
        run(model)
