"""Fixtures for every test: installed plugin distributions, made on the fly."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).with_name("support")))  # modules for tests of any folder

RUN_LIMIT_S = 120

# No example is drawn by chance: a run that passes passes again. `make prove` draws more, from the commit's seed.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")


def pytest_configure() -> None:
    """Take SIGINT even where the tests were started in the background, with it ignored: some send it to themselves."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class PluginBox:
    """A folder of installed distributions: packages beside their ``.dist-info``, as pip leaves them.

    `run` starts a real ``octavo`` process that sees them; `registry` reads them in this process.
    """

    site: Path
    environ: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        *,
        manifest: str | None,
        files: Mapping[str, str] | None = None,
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        requires: Sequence[str] = (),
        version: str = "1.0",
        package: str | None = None,
    ) -> Path:
        """Install distribution ``name``; ``files`` are relative to its package. Returns the package's folder."""
        folder = self.site / (package or name.replace("-", "_"))
        folder.mkdir(parents=True, exist_ok=True)
        written = dict({"__init__.py": ""}, **(files or {}))
        if manifest is not None:
            written["octavo-plugin.toml"] = manifest
        for relative, text in written.items():
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(textwrap.dedent(text))
        self._dist_info(name, version, entry_points or {}, requires)
        importlib.invalidate_caches()
        return folder

    def _dist_info(
        self, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]], requires: Sequence[str]
    ) -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        metadata += [f"Requires-Dist: {text}" for text in requires]
        (info / "METADATA").write_text("\n".join(metadata) + "\n")
        (info / "RECORD").write_text("")
        lines = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    def run(self, *arguments: str, limit_s: float = RUN_LIMIT_S, **environ: str) -> subprocess.CompletedProcess[str]:
        """``octavo`` with these arguments, in a process of its own that sees the distributions."""
        return self.python("-m", "octavo", *arguments, limit_s=limit_s, **environ)

    def python(self, *arguments: str, limit_s: float = RUN_LIMIT_S, **environ: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **self.environ, **environ, "PYTHONPATH": path}
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env, cwd=self.site.parent)

    def json(self, *arguments: str, **environ: str) -> Any:
        """What ``octavo … --json`` prints."""
        done = self.run(*arguments, "--json", **environ)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def states(self, **environ: str) -> dict[str, dict[str, Any]]:
        """Plugins by name, as ``octavo backends --json`` lists them."""
        return {plugin["name"]: plugin for plugin in self.json("backends", **environ)["plugins"]}

    def registry(self) -> Any:
        """The registry as this process would read it now."""
        from octavo.core.discovery import requirements
        from octavo.core.discovery.registry import Registry

        requirements.installed_version.cache_clear()
        requirements._unmet.cache_clear()
        importlib.invalidate_caches()
        return Registry.read()


@pytest.fixture(autouse=True)
def _what_the_command_line_sets_is_undone() -> Iterator[None]:
    """`octavo.core.cli.main.main` takes over Octavo's logger and SIGTERM: each test begins and ends without that."""
    logger = logging.getLogger("octavo")
    on_terminate = signal.getsignal(signal.SIGTERM)
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    signal.signal(signal.SIGTERM, on_terminate)


@pytest.fixture
def plugin_box(tmp_path: Path) -> PluginBox:
    """Distributions for processes of their own."""
    site = tmp_path / "site"
    site.mkdir()
    return PluginBox(site)


@pytest.fixture
def local_plugins(plugin_box: PluginBox, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginBox]:
    """Distributions that this process sees too; what was imported from them is forgotten afterwards."""
    from octavo.core.discovery.registry import forget_installed

    monkeypatch.syspath_prepend(str(plugin_box.site))
    before = set(sys.modules)
    forget_installed()
    yield plugin_box
    forget_installed()
    for name in set(sys.modules) - before:
        origin = str(getattr(sys.modules[name], "__file__", "") or "")
        if origin.startswith(str(plugin_box.site)):
            del sys.modules[name]
