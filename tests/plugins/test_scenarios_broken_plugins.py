"""Plugins that are broken, in conflict or absent, as installed distributions, seen by real ``octavo`` processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Add = Callable[..., Path]
RAISES = "raise OSError('libacme.so.2: cannot open shared object file')"


def generate(box: Any, model: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = box.run(
        "generate", "--model", str(model), "--prompt", "w1 w2 w3", "--max-tokens", "3", *arguments, **environ
    )
    return done


def test_scenario_01_a_module_that_raises_is_listed_and_costs_nobody_else_anything(
    plugin_box: Any, model: Path, add_accelerator: Add
) -> None:
    add_accelerator(plugin_box, files={"__init__.py": RAISES})
    add_accelerator(plugin_box, "quiet", probe=None, platform="auto = false", files={"platform.py": RAISES})
    states = plugin_box.states()
    assert states["acme"]["state"] == "probe-broken"
    assert "OSError: libacme.so.2" in states["acme"]["reason"]
    assert "OSError: libacme.so.2" in states["acme"]["traceback"]
    assert (states["quiet"]["state"], states["quiet"]["reason"]) == ("found", "")

    done = generate(plugin_box, model)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1, warnings
    assert "plugin 'acme' (acme-octavo 1.0) is left out: its probe raised OSError: libacme.so.2" in warnings[0]
    assert "platform cpu" in done.stderr

    document = plugin_box.json("doctor")
    found = {plugin["name"]: plugin for plugin in document["plugins"]}
    assert found["quiet"]["state"] == "failed-to-load"
    assert "OSError: libacme.so.2" in found["quiet"]["reason"]
    assert any("quiet" in finding["subject"] and finding["remedy"] for finding in document["findings"])


@pytest.mark.parametrize("name", ["acme", "quiet"])
def test_scenario_01_one_that_is_named_is_fatal_with_the_root_cause(
    plugin_box: Any, model: Path, add_accelerator: Add, name: str
) -> None:
    add_accelerator(plugin_box, files={"__init__.py": RAISES})
    add_accelerator(
        plugin_box, "quiet", probe=None, files={"platform.py": f"try:\n  {RAISES}\nexcept OSError:\n  import nothing_there"}
    )
    done = generate(plugin_box, model, "--platform", name)
    assert (done.returncode, done.stdout) == (3, "")
    assert "OSError: libacme.so.2: cannot open shared object file" in done.stderr
    assert done.stderr.count("\n") <= 2, "one line, after at most one warning"


def test_scenario_01_one_that_is_chosen_automatically_is_never_replaced(
    plugin_box: Any, model: Path, add_accelerator: Add
) -> None:
    add_accelerator(plugin_box, files={"platform.py": RAISES})
    done = generate(plugin_box, model)
    assert (done.returncode, done.stdout) == (3, "")
    assert "OSError: libacme.so.2" in done.stderr
    assert "choose another with --platform cpu" in done.stderr


def test_scenario_02_octavo_may_be_imported_from_inside_a_plugin_s_own_import(
    plugin_box: Any, model: Path, add_accelerator: Add
) -> None:
    init = """
    import octavo
    import octavo.api.platform, octavo.api.attention
    from octavo import SamplingParams
    from octavo.core.discovery import installed
    names = [entry.name for entry in installed().entries]
    assert "acme" in names
    """
    platform = "from octavo.core.discovery import installed\ninstalled().probe().models()\n"
    platform += "from octavo.backends.cpu.platform import CpuPlatform\nclass Platform(CpuPlatform): pass\n"
    add_accelerator(plugin_box, files={"__init__.py": init, "platform.py": platform})
    done = generate(plugin_box, model, "--platform", "acme")
    assert done.returncode == 0, done.stderr
    first = plugin_box.python("-c", "import acme_octavo.platform, octavo; print(octavo.SamplingParams().n)")
    assert (first.returncode, first.stdout) == (0, "1\n"), first.stderr


def test_scenario_03_a_conflict_over_torch_is_said_before_any_import(
    plugin_box: Any, model: Path, add_accelerator: Add
) -> None:
    add_accelerator(plugin_box, files={"__init__.py": RAISES}, requires=["torch==2.1.0", "octavo"])
    plugin = plugin_box.states()["acme"]
    assert plugin["state"] == "incompatible"
    assert plugin["reason"].startswith("needs torch==2.1.0, but torch 2.")
    done = generate(plugin_box, model, "--platform", "acme")
    assert done.returncode == 3
    assert "needs torch==2.1.0, but torch" in done.stderr
    assert "libacme" not in done.stderr, "nothing of it was imported"


def test_scenario_03_a_package_that_breaks_import_torch_is_named_and_does_not_stop_the_host(
    plugin_box: Any, model: Path, add_accelerator: Add
) -> None:
    points = {"torch.backends": {"torch_acme": "torch_acme:_autoload"}}
    plugin_box.add("torch-acme", manifest=None, files={"__init__.py": RAISES}, entry_points=points, version="2.13")
    add_accelerator(plugin_box, platform="auto = false")
    done = generate(plugin_box, model, "--platform", "cpu")
    assert done.returncode == 0, done.stderr

    done = generate(plugin_box, model, "--platform", "acme")
    assert (done.returncode, done.stdout) == (3, "")
    assert "torch_acme (torch-acme 2.13): OSError: libacme.so.2" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
    assert generate(plugin_box, model, "--platform", "acme", TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0

    findings = plugin_box.json("doctor")["findings"]
    (found,) = [finding for finding in findings if "torch_acme (torch-acme 2.13)" in finding["subject"]]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["remedy"]


def test_scenario_04_two_accelerators_and_no_flag_is_an_error_that_names_both(
    plugin_box: Any, model: Path, add_accelerator: Add
) -> None:
    add_accelerator(plugin_box, "one")
    add_accelerator(plugin_box, "two")
    done = generate(plugin_box, model)
    assert done.returncode == 3
    assert "several accelerators are available: one (one-octavo 1.0), two (two-octavo 1.0)" in done.stderr
    assert "--platform NAME" in done.stderr
    chosen = generate(plugin_box, model, "--platform", "two")
    assert (chosen.returncode, "platform two" in chosen.stderr) == (0, True), chosen.stderr


@pytest.mark.parametrize("flags", [(), ("--platform", "acme")])
def test_scenario_04_two_distributions_with_one_name_are_both_named(
    plugin_box: Any, model: Path, add_accelerator: Add, flags: tuple[str, ...]
) -> None:
    add_accelerator(plugin_box, distribution="acme-fork", package="acme_fork", plugin="fork")
    add_accelerator(plugin_box, distribution="acme-octavo", package="acme_octavo")
    done = plugin_box.run("explain", str(model), *flags)
    assert done.returncode == 3
    assert "'acme' is claimed by acme-fork 1.0 and acme-octavo 1.0; uninstall all but one" in done.stderr


def test_scenario_04_a_plugin_named_like_a_built_in_names_both(plugin_box: Any, model: Path, add_accelerator: Add) -> None:
    add_accelerator(plugin_box, "cpu", plugin="evil", distribution="evil")
    done = plugin_box.run("explain", str(model), "--platform", "cpu")
    assert done.returncode == 3
    assert "the platform 'cpu' is claimed by evil 1.0 and octavo " in done.stderr


def test_scenario_05_without_an_accelerator_the_host_is_chosen_and_the_report_says_why(
    plugin_box: Any, model: Path, add_accelerator: Add
) -> None:
    absent = (
        "from octavo.api.manifest import ProbeResult\ndef probe(): return ProbeResult(reason='no driver', hint='install it')"
    )
    add_accelerator(plugin_box, "absent", probe=absent)
    add_accelerator(plugin_box, "broken", probe="def probe(): raise PermissionError('/dev/broken0')")
    add_accelerator(plugin_box, "old", requires=["torch<1"])
    add_accelerator(plugin_box, "shy", platform="auto = false")
    document = plugin_box.json("explain", str(model))
    assert document["chosen"]["platform"] == "cpu"
    assert set(document) == {"chosen", "candidates"}
    assert set(document["chosen"]) == {"platform", "attention", "block_size"}
    platforms = {candidate["name"]: candidate for candidate in document["candidates"] if candidate["kind"] == "platform"}
    assert all(set(candidate) == {"name", "kind", "ok", "reasons"} for candidate in document["candidates"])
    assert platforms["cpu"] == {"name": "cpu", "kind": "platform", "ok": True, "reasons": []}
    expected = {
        "absent": ("state", "probe-absent: no driver", "install it"),
        "broken": ("state", "probe-broken: its probe raised PermissionError: /dev/broken0", ""),
        "shy": ("auto", "used only when named", "--platform shy"),
    }
    for name, (field, supported, hint) in expected.items():
        (reason,) = platforms[name]["reasons"]
        assert (reason["field"], reason["supported"], reason["hint"]) == (field, supported, hint)
    assert "needs torch<1, but torch" in platforms["old"]["reasons"][0]["supported"]


def test_scenario_06_whatever_a_probe_does_is_contained(plugin_box: Any, add_accelerator: Add) -> None:
    head = "from octavo.api.manifest import ProbedDevice, ProbeResult\n"
    good = "ProbeResult(devices=[ProbedDevice(index=0, name='x')])"
    bodies = {
        "denied": "def probe(): raise PermissionError(13, 'Permission denied', '/dev/acme0')",
        "hangs": "import time\ndef probe(): time.sleep(60)",
        "prints": f"import os\ndef probe():\n  print('noise'); os.system('echo noise')\n  return {good}",
        "heavy": f"def probe():\n  import torch\n  return {good}",
        "exits": "import os\ndef probe(): os._exit(3)",
        "killed": "import os, signal, time\ndef probe(): os.kill(os.getpid(), signal.SIGKILL); time.sleep(9)",
        "good": f"def probe(): return {good}",
    }
    for name, body in bodies.items():
        add_accelerator(plugin_box, name, probe=head + body)
    plugin_box.add("a-torch", manifest=None, package="torch")  # before the real one on the path, and imported at once
    done = plugin_box.run("backends")
    assert done.returncode == 0
    assert "noise" not in done.stdout + done.stderr
    states = plugin_box.states()
    assert {name: states[name]["state"] for name in bodies} == {
        "denied": "probe-broken", "hangs": "probe-broken", "prints": "available", "heavy": "available",
        "exits": "probe-broken", "killed": "probe-broken", "good": "available",
    }  # fmt: skip
    assert "PermissionError: [Errno 13] Permission denied: '/dev/acme0'" in states["denied"]["reason"]
    assert "gave no answer within 2 s" in states["hangs"]["reason"]
    assert "its probe imports torch" in states["heavy"]["reason"]
    assert "ended the process with exit code 3" in states["exits"]["reason"]
    assert "was killed by SIGKILL" in states["killed"]["reason"]


def test_scenario_07_unknown_names_are_errors_and_never_quietly_absent(plugin_box: Any, add_accelerator: Add) -> None:
    from octavo.api.platform import PlatformCapabilities
    from octavo.backends.cpu.platform import CpuPlatform

    platform = CpuPlatform()
    assert not hasattr(platform, "no_such_thing")
    assert not hasattr(platform.capabilities, "no_such_thing")
    with pytest.raises(TypeError, match="graph_captur"):
        PlatformCapabilities(graph_captur=True)  # type: ignore[call-arg]
    add_accelerator(plugin_box, features='["causal", "chunked_context"]')
    plugin = plugin_box.states()["acme-attention"]
    assert plugin["state"] == "incompatible"
    assert "attention.acme-attention.features[1]: 'chunked_context' isn't one of" in plugin["reason"]
    assert "did you mean 'chunk_context'" in plugin["reason"]


def test_scenario_12_other_api_versions(plugin_box: Any, model: Path, add_accelerator: Add) -> None:
    add_accelerator(plugin_box, "newer", api="1.7", platform="auto = false")
    add_accelerator(plugin_box, "major", api="2.0", platform="auto = false")
    states = plugin_box.states()
    assert states["newer"]["reason"] == "needs octavo.api 1.7; this Octavo has 1.0: upgrade octavo"
    assert states["major"]["reason"] == "needs octavo.api 2.0; this Octavo has 1.0, another major version"
    done = plugin_box.run("explain", str(model), "--platform", "newer")
    assert (done.returncode, "upgrade octavo" in done.stderr) == (3, True)


def test_scenario_12_forgotten_and_removed_methods(
    local_plugins: Any, add_accelerator: Add, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    from octavo.core.api.errors import PluginUnavailable
    from octavo.core.discovery import installed, lint

    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    monkeypatch.setattr(lint, "REMOVED", {"Platform": {"warm_up": "use bind()"}})
    forgot = "from octavo.api.platform import Platform as Base\nclass Platform(Base):\n  def bind(self, index): pass\n"
    old = "from octavo.backends.cpu.platform import CpuPlatform\nclass Platform(CpuPlatform):\n  def warm_up(self): pass\n"
    wrong = "from octavo.backends.cpu.platform import CpuPlatform\nclass Platform(CpuPlatform):\n  def bind(self): pass\n"
    for name, body in (("forgot", forgot), ("old", old), ("wrong", wrong)):
        add_accelerator(local_plugins, name, files={"platform.py": body}, platform="auto = false")
    with pytest.raises(PluginUnavailable, match="lacks required methods of Platform: devices, empty_cache"):
        installed().load("platform", "forgot")
    with pytest.raises(PluginUnavailable, match=r"Platform.bind\(self\) doesn't take what octavo.api passes"):
        installed().load("platform", "wrong")
    installed().load("platform", "old")
    assert "Platform.warm_up is never called: Platform no longer has it; use bind()" in caplog.text


def test_scenario_15_fifty_plugins_are_listed_without_importing_one(plugin_box: Any, add_accelerator: Add) -> None:
    import resource

    for number in range(50):
        add_accelerator(
            plugin_box, f"acme{number}", files={"__init__.py": "import sys; sys.modules['plugin_was_imported'] = sys"}
        )

    def run() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert plugin_box.run("backends").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(run() for _ in range(3)) < 1.2, "both processes together; the command itself takes 0.8 s of wall time at most"
    code = (
        "import sys\nfrom octavo.core.cli.main import main\nassert main(['backends']) == 0\n"
        "assert not [name for name in sys.modules if name.startswith('acme') or name in ('torch', 'plugin_was_imported')]\n"
    )
    done = plugin_box.python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" available ") >= 50
