"""Plugins that pip installs and removes, and hooks that misbehave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "1.0"
[project.entry-points."octavo.platforms"]
{platform} = "{module}.platform:Platform"
[tool.setuptools.packages.find]
where = ["src"]
[tool.setuptools.package-data]
"*" = ["octavo-plugin.toml"]
"""
PROBE = """
from octavo.api.manifest import ProbedDevice, ProbeResult

def probe():
    return ProbeResult(devices=[ProbedDevice(index=0, name="x")])
"""
PLATFORM = """
from octavo.backends.cpu.platform import CpuPlatform

class Platform(CpuPlatform):
    pass
"""
LOAD = """
from octavo.core.discovery import installed
print([installed().platform(name).name for name in ("acmewheel", "acmeedit", "acmens")])
"""


def project(folder: Path, name: str, platform: str, module: str) -> Path:
    """The source of a distribution with one platform; ``module`` may lie in a namespace package."""
    package = folder / "src" / Path(*module.split("."))
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, platform=platform, module=module))
    (package / "__init__.py").write_text("")
    (package / "platform.py").write_text(PLATFORM)
    (package / "probe.py").write_text(PROBE)
    (package / "octavo-plugin.toml").write_text(
        f'[plugin]\nname = "{platform}"\napi = "1.0"\n'
        f'[platform.{platform}]\ndevice_type = "cpu"\nauto = false\nprobe = "{module}.probe:probe"\n'
    )
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Any:
    """A virtual environment that sees this one's packages: pip installs into it and removes from it."""
    import venv

    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (base,) = [Path(entry) for entry in sys.path if entry.endswith("site-packages") and Path(entry, "click").is_dir()]
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    python = str(folder / "bin" / "python")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
        )

    return run


def pip(run: Any, *arguments: str) -> None:
    done = run("pip", *arguments, "--quiet", "--disable-pip-version-check")
    assert done.returncode == 0, done.stderr


def test_scenario_13_wheel_editable_and_namespace_installs_work_alike_and_a_removed_one_says_so(
    environment: Any, tmp_path: Path
) -> None:
    wheel = project(tmp_path / "w", "acme-wheel", "acmewheel", "acme_wheel")
    editable = project(tmp_path / "e", "acme-editable", "acmeedit", "acme_editable")
    namespace = project(tmp_path / "n", "acme-namespace", "acmens", "acme.octavo")
    install = ("install", "--no-deps", "--no-build-isolation")
    pip(environment, *install, str(wheel), str(namespace))
    pip(environment, *install, "--editable", str(editable))
    listed = environment("octavo", "backends").stdout
    for name, origin in (("acmewheel", "acme-wheel"), ("acmeedit", "acme-editable"), ("acmens", "acme-namespace")):
        assert [line.split()[:5] for line in listed.splitlines() if line.startswith(name)] == [
            [name, "platform", "available", origin, "1.0"]
        ]
    (tmp_path / "load.py").write_text(LOAD)
    loaded = environment("load")
    assert loaded.stdout == "['acmewheel', 'acmeedit', 'acmens']\n", loaded.stderr

    pip(environment, "uninstall", "--yes", "acme-wheel")
    done = environment("octavo", "generate", "--model", "smollm2", "--prompt", "x", "--platform", "acmewheel")
    assert done.returncode == 3
    assert done.stderr.startswith("octavo: error: no platform named 'acmewheel'; did you mean 'acmeedit'")
    assert "installed: acmeedit (available), acmens (available), cpu (available)" in done.stderr


def test_scenario_13_files_that_are_gone_while_the_metadata_stays_are_named(plugin_box: Any) -> None:
    points = {"octavo.platforms": {"acme": "acme_octavo.platform:Platform"}}
    folder = plugin_box.add("acme-octavo", manifest=None, entry_points=points)
    (folder / "__init__.py").unlink()
    folder.rmdir()
    plugin = plugin_box.states()["acme"]
    assert (plugin["state"], plugin["reason"]) == ("incompatible", "package 'acme_octavo' isn't there; reinstall acme-octavo")


HOOKS = """
import time
from octavo.api.hooks import hookimpl

class Raises:
    @hookimpl
    def octavo_step_finished(self, stats, step_s):
        raise ConnectionError("metrics server is gone")

class Sleeps:
    @hookimpl
    def octavo_engine_started(self, config, info):
        time.sleep(1)
"""


def test_scenario_14_a_hook_that_raises_or_sleeps_is_named_and_the_request_completes(plugin_box: Any, model: Path) -> None:
    plugin_box.add(
        "acme-hooks",
        manifest='[plugin]\nname = "acme-hooks"\napi = "1.0"\n[hook.raises]\n[hook.sleeps]\n',
        files={"it.py": HOOKS},
        entry_points={"octavo.hooks": {"raises": "acme_hooks.it:Raises", "sleeps": "acme_hooks.it:Sleeps"}},
    )
    arguments = ("generate", "--model", str(model), "--prompt", "w1 w2", "--max-tokens", "4", "--ignore-eos")
    done = plugin_box.run(*arguments, "--plugin", "acme-hooks", "--json")
    assert done.returncode == 0, done.stderr
    assert '"finish_reason": "length"' in done.stdout
    lines = done.stderr.splitlines()
    raised = [line for line in lines if "'raises'" in line]
    assert raised == [
        "octavo: error: plugin 'raises' raised in octavo_step_finished and is disabled: ConnectionError: metrics server is gone"
    ]
    (slow,) = [line for line in lines if "'sleeps'" in line]
    assert "in octavo_engine_started, its budget is 5 ms" in slow
    off = plugin_box.run(*arguments)
    assert (off.returncode, "acme" in off.stderr or "raises" in off.stderr) == (0, False)
