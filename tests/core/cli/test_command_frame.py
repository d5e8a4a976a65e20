"""``octavo`` itself: help, errors, exit codes, signals, plugins' commands."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from octavo.core.api.errors import OutOfMemory, Refused, UsageError, WorkerDied
from octavo.core.cli import main as cli
from octavo.core.cli.engine_options import config_from, engine_options
from octavo.core.config import EngineConfig


@pytest.fixture(autouse=True)
def _without_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli._State, "debug", False)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Put a command named ``doctor`` in the place of ours."""

    def put(body: Callable[[], Any]) -> None:
        from octavo.core.cli import doctor

        monkeypatch.setattr(doctor, "command", click.command("doctor")(body))

    return put


def raising(error: BaseException) -> Callable[[], Any]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("wrong", hint="do this"), 2, "octavo: error: wrong; do this"),
        (Refused("can't"), 3, "octavo: error: can't"),
        (OutOfMemory("too\n little"), 4, "octavo: error: too little"),
        (WorkerDied("gone"), 1, "octavo: error: gone"),
        (MemoryError(), 4, "octavo: error: the host has too little memory"),
        (KeyboardInterrupt(), 130, "octavo: interrupted"),
        (
            ZeroDivisionError("division\nby zero"),
            1,
            "octavo: internal error: ZeroDivisionError: division by zero; --debug shows",
        ),
    ],
)
def test_each_error_is_one_line_and_an_exit_code(
    command: Any, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    command(raising(error))
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_traceback_before_the_line(
    command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    command(raising(Refused("can't")))
    assert cli.main(arguments) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "octavo: error: can't"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bakends"], "there is no command 'bakends'; did you mean 'backends'"),
        (["backends", "--jsn"], "No such option '--jsn'"),
        (["backends", "more"], "unexpected extra argument"),
        (["explain"], "Missing argument 'MODEL'"),
        (["explain", "m", "--block-size", "x"], "'x' is not a valid integer"),
        (["--log-level", "loud", "backends"], "'loud' is not one of"),
        (["explain", "m", "--kv-cache-memory-bytes", "lots"], "must be a number of bytes, not 'lots'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith("octavo: error: ")
    assert err.count("\n") == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    import octavo

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize("group", [[], ["models"], ["bench"], ["plugin"]])
def test_a_group_alone_shows_its_help_as_help(capsys: pytest.CaptureFixture[str], group: list[str]) -> None:
    assert cli.main(group) in (0, 2)  # as the click at hand does
    text = "".join(capsys.readouterr())
    assert text.startswith(f"Usage: {' '.join(['octavo', *group])} ")
    assert "error:" not in text
    assert text.count("\n") > 5


def test_help_and_backends_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\nfrom octavo.core.cli.main import main\n"
        "for line in ('--help', 'backends', 'backends --json', 'backends --verbose', 'explain --help'):\n"
        "    assert main(line.split()) == 0\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'jinja2') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_unknown_variables_are_warned_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_LOGLEVEL", "info")
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "chatty")
    assert cli.main(["--version"]) == 0
    err = capsys.readouterr().err
    assert (
        "octavo: warning: environment variable OCTAVO_LOGLEVEL is unknown and ignored; did you mean 'OCTAVO_LOG_LEVEL'" in err
    )
    assert "octavo: warning: OCTAVO_LOG_LEVEL=chatty is ignored" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_command_cleanly(plugin_box: Any, number: signal.Signals) -> None:
    body = """
    import click, sys, time
    @click.command()
    def wait():
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("cleaned up", flush=True)
    """
    plugin_box.add(
        "acme-wait",
        manifest='[plugin]\nname = "w"\napi = "1.0"\n[command.wait]\n',
        files={"it.py": body},
        entry_points={"octavo.commands": {"wait": "acme_wait.it:wait"}},
    )
    env = {**os.environ, "PYTHONPATH": str(plugin_box.site)}
    command = [sys.executable, "-m", "octavo", "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "cleaned up\n", "octavo: interrupted\n")


def test_a_closed_pipe_is_no_error_message() -> None:
    code = "import sys; from octavo.core.cli.main import main; sys.exit(main(['backends', '--json']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 1


@pytest.mark.parametrize(
    ("redirection", "says"), [(">&-", "standard output is closed"), (">/dev/full", "can't write: No space left on device")]
)
def test_output_that_cannot_be_written_is_one_line_and_1(redirection: str, says: str) -> None:
    code = "import sys; from octavo.core.cli.main import main; sys.exit(main(['backends', '--json']))"
    shell = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"octavo: error: {says}")
    assert done.stderr.count("\n") == 1


class TestPluginCommands:
    MANIFEST = '[plugin]\nname = "acme-tools"\napi = "1.0"\n[command.tool]\nhelp = "does acme things"\n'

    def add(self, box: Any, body: str) -> None:
        points = {"octavo.commands": {"tool": "acme_tools.it:tool"}}
        box.add("acme-tools", manifest=self.MANIFEST, files={"it.py": body}, entry_points=points)

    def test_they_are_listed_without_being_imported(self, local_plugins: Any, capsys: pytest.CaptureFixture[str]) -> None:
        self.add(local_plugins, "raise RuntimeError('imported')")
        assert cli.main(["--help"]) == 0
        assert "does acme things" in capsys.readouterr().out

    def test_they_run_like_core_s_own(self, local_plugins: Any, capsys: pytest.CaptureFixture[str]) -> None:
        body = "import click\n@click.command()\n@click.argument('name')\ndef tool(name):\n    click.echo(name.upper())\n"
        self.add(local_plugins, body)
        assert cli.main(["tool", "x", "--log-level", "info"]) == 0
        assert capsys.readouterr().out == "X\n"

    @pytest.mark.parametrize(
        ("body", "says"),
        [("import acme_kernels", "ModuleNotFoundError: No module named 'acme_kernels'"), ("tool = 1", "isn't a click")],
    )
    def test_a_broken_one_is_refused(
        self, local_plugins: Any, capsys: pytest.CaptureFixture[str], body: str, says: str
    ) -> None:
        self.add(local_plugins, body)
        assert cli.main(["tool"]) == 3
        err = capsys.readouterr().err
        assert says in err
        assert "command 'tool' (acme-tools 1.0)" in err

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ("def tool(): {}['x']", "KeyError: 'x'"),
            ("def tool(): raise FileNotFoundError(2, 'no such file', 'acme.db')", "FileNotFoundError: [Errno 2] no such file"),
            ("def tool(): raise ValueError('two\\nlines')", "ValueError: two lines"),
            (
                "class Mute(Exception):\n    def __str__(self): raise OSError\ndef tool(): raise Mute",
                "Mute (its text can't be shown)",
            ),
            ("@click.option('--x', default='1', type=lambda _: {}['y'])\ndef tool(x): pass", "KeyError: 'y'"),
        ],
    )
    @pytest.mark.parametrize("debug", [(), ("--debug",)])
    def test_one_that_raises_is_named_with_its_distribution(
        self, local_plugins: Any, capsys: pytest.CaptureFixture[str], body: str, says: str, debug: tuple[str, ...]
    ) -> None:
        head, _, last = body.rpartition("def tool")
        options = "\n".join(line for line in head.splitlines() if line.startswith("@"))
        rest = "\n".join(line for line in head.splitlines() if not line.startswith("@"))
        self.add(local_plugins, f"import click\n{rest}\n@click.command()\n{options}\ndef tool{last}\n")
        assert cli.main([*debug, "tool"]) == 3
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines()[-1].startswith(f"octavo: error: command 'tool' (acme-tools 1.0) failed: {says}")
        assert ("Traceback" in err) is bool(debug)
        assert debug or err.count("\n") == 1

    @pytest.mark.parametrize(
        ("raised", "code", "line"),
        [
            ("click.UsageError('not so')", 2, "octavo: error: not so (see octavo tool --help)"),
            ("Refused('can not')", 3, "octavo: error: can not"),
            ("OSError(28, 'No space left on device')", 1, "octavo: error: can't write: No space left on device"),
            ("MemoryError", 4, "octavo: error: the host has too little memory"),
            ("KeyboardInterrupt", 130, "octavo: interrupted"),
            ("click.Abort", 130, "octavo: interrupted"),
            ("click.exceptions.Exit(7)", 7, ""),
        ],
    )
    def test_what_it_raises_on_purpose_ends_it_as_core_s_own(
        self, local_plugins: Any, capsys: pytest.CaptureFixture[str], raised: str, code: int, line: str
    ) -> None:
        body = f"import click\nfrom octavo.api.errors import Refused\n@click.command()\ndef tool(): raise {raised}\n"
        self.add(local_plugins, body)
        assert cli.main(["tool"]) == code
        assert capsys.readouterr().err.rstrip("\n") == line


class TestEngineOptions:
    def parse(self, *arguments: str) -> EngineConfig:
        found: list[EngineConfig] = []

        @click.command()
        @engine_options
        def run(**options: Any) -> None:
            found.append(config_from(options))
            assert not options

        run.main(list(arguments), standalone_mode=False)
        return found[0]

    def test_every_option_is_a_flag(self) -> None:
        options = [option.name for _, option in EngineConfig.options() if not option.metadata["internal"]]
        text = click.Context(click.command()(engine_options(lambda **_: None))).get_help()
        assert [name for name in options if "--" + name.replace("_", "-") not in text] == []

    def test_only_what_was_given_is_given(self) -> None:
        assert self.parse().given == frozenset()
        config = self.parse("--block-size", "32", "--no-enable-prefix-caching", "--op", "rms_norm=a", "--op", "rotary=b")
        assert config.given == {"block_size", "enable_prefix_caching", "op"}
        assert (config.cache.block_size, config.cache.enable_prefix_caching) == (32, False)
        assert dict(config.plugins.op) == {"rms_norm": "a", "rotary": "b"}

    def test_flags_win_over_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "octavo.toml"
        path.write_text('block_size = 64\nkv_cache_memory_bytes = "1GiB"\n[attention_backend]\ndraft = "x"\n')
        config = self.parse("--config", str(path), "--block-size", "32")
        assert (config.cache.block_size, config.cache.kv_cache_memory_bytes) == (32, 2**30)
        assert dict(config.plugins.attention_backend) == {"draft": "x"}


class TestBackends:
    def test_the_document_has_exactly_these_keys(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["backends", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert set(document) == {"api", "plugins"}
        keys = {"name", "kind", "distribution", "version", "state", "reason", "traceback"}
        assert all(set(plugin) == keys for plugin in document["plugins"])
        assert ("cpu", "available") in {(plugin["name"], plugin["state"]) for plugin in document["plugins"]}

    def test_verbose_says_what_is_declared(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["backends", "--verbose"]) == 0
        text = capsys.readouterr().out
        assert "head sizes  multiples of 1" in text
        assert "features  causal, non_causal" in text

    def test_it_takes_less_than_four_tenths_of_a_second_of_processor_time(self) -> None:
        def run() -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "octavo", "backends"], stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        assert min(run() for _ in range(5)) < 0.4


def test_an_interrupt_that_passed_through_executed_text_still_ends_with_130(plugin_box: Any) -> None:
    code = (
        "from octavo.core.cli import main as frame\n"
        "def interrupted(argv=None):\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        print('cleaned', flush=False)\n"
        "        return frame.INTERRUPTED\n"
        "frame.main = interrupted\n"
        "frame.run()\n"
    )
    done = plugin_box.python("-c", code)
    assert (done.returncode, done.stdout) == (130, "cleaned\n")
