"""A new vendor's path, as docs/writing-a-backend.md walks it: every command of that page is run, and every kernel applied."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"
LIMIT_S = 150
_FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    text: str


@dataclass(frozen=True)
class Kernel:
    """A function that takes the place of the one of its name in ``file``."""

    file: str
    source: str


def steps() -> list[Command | Kernel]:
    """What the page tells its reader to do, in order."""
    return list(_steps(PAGE.read_text()))


def _steps(page: str) -> Iterator[Command | Kernel]:
    for language, file, body in _FENCE.findall(page):
        if language == "console":
            yield from (Command(line.removeprefix("$ ")) for line in body.splitlines() if line.startswith("$ "))
        elif language == "python":
            yield Kernel(file, body)


class Shell:
    """A new user's environment: Octavo and pytest are there, nothing of ours is on the path."""

    def __init__(self, folder: Path) -> None:
        self.cwd = folder / "work"
        self.cwd.mkdir()
        self._bin = folder / "env" / "bin"
        venv.create(folder / "env", symlinks=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
        # What this environment has installed, editable distributions included, as if it were installed in the new one.
        (site / "installed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        for name, target in (("octavo", "octavo.core.cli.main"), ("pip", "pip"), ("pytest", "pytest")):
            self._script(name, target)

    def _script(self, name: str, module: str) -> None:
        path = self._bin / name
        call = "from pytest import console_main as main" if name == "pytest" else f"from {module} import main"
        path.write_text(f"#!{self._bin / 'python'}\nimport sys\n{call}\nsys.exit(main())\n")
        path.chmod(0o755)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """One line, as it would be typed."""
        first, *rest = shlex.split(command)
        if first == "cd":
            (folder,) = rest
            self.cwd = self.cwd / folder
            return subprocess.CompletedProcess(command, 0 if self.cwd.is_dir() else 1, "", "no such folder")
        env = {**os.environ, "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        env |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # nothing is fetched
        env.pop("PYTHONPATH", None)
        return subprocess.run(
            ["bash", "-c", command], cwd=self.cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    def apply(self, kernel: Kernel) -> None:
        """Replace a function of a file, as the page's reader does in an editor."""
        path = self.cwd / kernel.file
        (new,) = ast.parse(kernel.source).body
        assert isinstance(new, ast.FunctionDef)
        lines = path.read_text().splitlines()
        (old,) = [
            node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.FunctionDef) and node.name == new.name
        ]
        lines[old.lineno - 1 : old.end_lineno] = kernel.source.splitlines()
        path.write_text("\n".join(lines) + "\n")


def test_the_page_needs_ten_commands_at_most() -> None:
    commands = [step.text for step in steps() if isinstance(step, Command)]
    assert 5 <= len(commands) <= 10
    assert commands[0].startswith("octavo plugin new ")
    for wanted in ("pip install", "octavo backends", "octavo generate", "pytest"):
        assert any(command.startswith(wanted) for command in commands), wanted


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="the page's commands are typed into a POSIX shell")
def test_scenario_16_a_new_vendor_gets_to_a_kernel_of_their_own(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    said: dict[str, list[str]] = {}
    for step in steps():
        if isinstance(step, Kernel):
            shell.apply(step)
            continue
        done = shell.run(step.text)
        assert done.returncode == 0, f"$ {step.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        said.setdefault(step.text, []).append(done.stdout + done.stderr)
    (backends,) = said["octavo backends"]
    assert re.search(r"^acme-npu +platform +available +acme-npu 0\.1\.0", backends, re.MULTILINE), backends
    assert re.search(r"^acme-npu-attention +attention backend +found +acme-npu 0\.1\.0", backends, re.MULTILINE), backends
    before, after = (text for command, texts in said.items() if "generate" in command for text in texts)
    for answered in (before, after):
        assert "platform acme-npu · attention acme-npu-attention · " in answered, "the backend that ran"
    assert _text(before) == _text(after), "the new kernel answers as the old one did"
    assert "Paris" in _text(before)
    first, second = (int(match[1]) for text in said["pytest"] if (match := re.search(r"(\d+) passed", text)))
    assert first == second >= 30
    shell.apply(without_the_line_that_matters())
    broken = shell.run("pytest -q -k decode")
    assert broken.returncode == 1, broken.stdout[-3000:]
    assert "nan" in broken.stdout.lower()


def without_the_line_that_matters() -> Kernel:
    """The page's kernel as the page says that it fails."""
    (kernel,) = (step for step in steps() if isinstance(step, Kernel))
    lines = kernel.source.splitlines()
    kept = [line for line in lines if "v = v.masked_fill(" not in line]
    assert len(kept) == len(lines) - 1
    return Kernel(kernel.file, "\n".join(kept))


def _text(said: str) -> str:
    return said.partition("platform acme-npu")[0].strip()
