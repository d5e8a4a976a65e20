"""The code that runs inside the helper processes, run here."""

from __future__ import annotations

import json
import os
from io import StringIO
from typing import Any

import pytest

from octavo.core.discovery import load_runner, probe_runner

GOOD = "from octavo.api.manifest import ProbeResult\ndef probe(): return ProbeResult(reason='none')\n"
CHAIN = "def probe():\n  try: 1 / 0\n  except ZeroDivisionError as error: raise OSError('driver') from error\n"
UNSAYABLE = "from octavo.api.manifest import ProbeResult\ndef probe(): return ProbeResult(devices=[object()])\n"


def answer(target: str) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []
    probe_runner._run("k", target, answers.append, probe_runner._TorchWatch())
    assert answers[0] == {"key": "k", "started": True}
    return answers[1]


def test_a_probe_s_answer_is_data(local_plugins: Any) -> None:
    local_plugins.add("acme", manifest=None, files={"good.py": GOOD, "chain.py": CHAIN, "unsayable.py": UNSAYABLE})
    good = answer("acme.good:probe")
    assert good["result"] == {"devices": (), "reason": "none", "hint": ""}
    assert good["torch"] is False
    assert answer("acme.chain:probe")["error"] == "ZeroDivisionError: division by zero"
    assert "TypeError" in answer("acme.unsayable:probe")["error"]
    assert "ModuleNotFoundError" in answer("acme.nothing:probe")["error"]


def test_the_helper_answers_on_its_descriptor_and_ends_at_once(local_plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local_plugins.add("acme", manifest=None, files={"good.py": GOOD})
    read, write = os.pipe()
    import sys

    job = {"path": sys.path[:], "result_fd": write, "probes": {"a": "acme.good:probe", "b": "acme.gone:probe"}}
    monkeypatch.setattr(sys, "stdin", StringIO(json.dumps(job)))
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    probe_runner.main()
    os.close(write)
    with os.fdopen(read) as answers:
        lines = [json.loads(line) for line in answers]
    assert codes == [0]
    assert {line["key"] for line in lines if "result" in line} == {"a"}
    assert {line["key"] for line in lines if "error" in line} == {"b"}


def test_the_loader_answers_for_each_plugin(local_plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    manifest = '[plugin]\nname = "acme"\napi = "1.0"\n[hook.good]\n[hook.bad]\n'
    points = {"octavo.hooks": {"good": "acme.good:probe", "bad": "acme.gone:Hook"}}
    local_plugins.add("acme", manifest=manifest, files={"good.py": GOOD}, entry_points=points)
    monkeypatch.setattr(sys, "stdin", StringIO(json.dumps([["hook", "good"], ["hook", "bad"]])))
    read, write = os.pipe()
    monkeypatch.setattr(os, "dup", lambda _: write)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    load_runner.main()
    os.close(write)
    with os.fdopen(read) as answers:
        lines = [json.loads(line) for line in answers]
    verdicts = {line["name"]: line for line in lines if "ok" in line}
    assert verdicts["good"]["ok"]
    assert (verdicts["bad"]["ok"], "No module named 'acme.gone'" in verdicts["bad"]["error"]) == (False, True)
    assert [line["name"] for line in lines if "ok" not in line] == ["good", "bad"]
