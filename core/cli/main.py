"""``octavo``: finds the command, imports it, and turns errors into one line and an exit code.

Exit codes: 0 done; 2 the command or an argument is wrong; 3 refused; 4 not enough memory; 130 interrupted; 1 anything else.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

from octavo.core.api.errors import OctavoError, PluginError
from octavo.core.config import environment
from octavo.core.config.suggest import nearest

COMMANDS: Mapping[str, str] = {
    "generate": "Complete a prompt, or a file of prompts.",
    "chat": "Talk with a model.",
    "models": "List and pull models of the catalogue.",
    "bench": "Measure what parts of Octavo cost.",
    "backends": "List the installed plugins and their states.",
    "explain": "Say what would run a model, and why.",
    "doctor": "Check the environment and every plugin.",
    "plugin": "Start a plugin of your own.",
}
"""Core's own commands, each ``command`` in the module of its name; help texts are here so that ``--help`` imports none."""

LEVELS = ("debug", "info", "warning", "error")
INTERRUPTED = 130
_NAME = "octavo.command"
"""Key of the context's ``meta``: the command that is being run."""


class _Commands(click.Group):
    """Core's commands, then those of plugins; a command is imported when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(entry.name for entry in _plugin_commands())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module = import_module(f"octavo.core.cli.{cmd_name}")
            command: Any = module.command
        elif (entry := _plugin_command(cmd_name)) is not None:
            from octavo.core.discovery import installed

            command = installed().load("command", cmd_name)
            if not isinstance(command, click.Command):
                raise PluginError(
                    f"{entry.who} isn't a click command but {type(command).__name__}",
                    hint="report this to its vendor",
                )
        else:
            return None
        return _with_common_options(command)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises `PluginError` for what a plugin's raises without meaning to."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            entry = _plugin_command(ctx.meta.get(_NAME))
            if entry is None or _is_meant(error):
                raise
            from octavo.core.discovery.wording import error_text

            raise PluginError(f"{entry.who} failed: {error_text(error)}", hint="--debug shows the traceback") from error

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        ctx.meta[_NAME] = args[0] if args else None
        if args and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no command {args[0]!r}{nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items(), *((entry.name, entry.table.help) for entry in _plugin_commands())])


def _plugin_commands() -> Sequence[Any]:
    from octavo.core.discovery import installed

    return [entry for entry in installed().of_kind("command") if entry.table is not None and entry.name not in COMMANDS]


def _plugin_command(name: str | None) -> Any:
    """The plugin's entry of that name; None where there is none."""
    return next((entry for entry in _plugin_commands() if entry.name == name), None)


def _is_meant(error: Exception) -> bool:
    """Whether `main` has a line for it, whoever raises it."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return full or isinstance(
        error, (click.ClickException, click.exceptions.Exit, click.Abort, OctavoError, BrokenPipeError, MemoryError)
    )


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        import octavo

        click.echo(f"octavo {octavo.__version__}")
        ctx.exit()


def _set_level(_: click.Context, __: click.Parameter, level: str | None) -> None:
    if level is not None:
        logging.getLogger("octavo").setLevel(level.upper())


def _set_debug(_: click.Context, __: click.Parameter, wanted: bool) -> None:
    if wanted:
        _State.debug = True


class _State:
    """What flags say before a command runs."""

    debug = False


def _common_options() -> list[click.Option]:
    """Options that stand before a command or after it."""
    return [
        click.Option(
            ["--log-level"], type=click.Choice(LEVELS), callback=_set_level, expose_value=False, help="what is logged on stderr"
        ),
        click.Option(["--debug"], is_flag=True, callback=_set_debug, expose_value=False, help="show tracebacks"),
    ]


def _with_common_options(command: click.Command) -> click.Command:
    """Add them once, to the command and to the commands below it; a command's own option of that name stays."""
    taken = {name for parameter in command.params for name in parameter.opts}
    command.params.extend(option for option in _common_options() if option.opts[0] not in taken)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _with_common_options(inner)
    return command


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, params=_common_options())
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="print the version and end"
)
def octavo() -> None:
    """Run large language models on any accelerator."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``octavo`` with ``argv`` (default: the process's); the exit code. Never raises but for what ends the process."""
    try:
        _prepare()
        with octavo.make_context("octavo", list(sys.argv[1:] if argv is None else argv)) as context:
            result = octavo.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _end("interrupted", INTERRUPTED)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # of newer click alone: its message is the help, in many lines
            click.echo(error.format_message(), err=True)
            return 2
        return _end(f"error: {error.format_message()}{_where_help(error)}", 2)
    except OctavoError as error:
        return _end(f"error: {error}", error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what read our output is gone: nothing more to say
        return 1
    except MemoryError:
        return _end("error: the host has too little memory", 4)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return _internal(error)
        return _end(f"error: can't write: {error.strerror}{f' ({error.filename})' if error.filename else ''}", 1)
    except Exception as error:  # noqa: BLE001 - the last resort: one line, and the traceback with --debug
        return _internal(error)


def run() -> NoReturn:
    """The ``octavo`` command: `main`, and the end of the process with its exit code."""
    code = main()
    if code == INTERRUPTED:
        # Once a KeyboardInterrupt has passed through an exec() of text (dataclasses make their methods so), CPython ends the
        # process by SIGINT instead of its exit code, although the exception was caught.
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where whoever started us closed it
            with contextlib.suppress(OSError):  # what read our output may be gone
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


def _internal(error: Exception) -> int:
    return _end(f"internal error: {type(error).__name__}: {error}; --debug shows the traceback", 1)


def _prepare() -> None:
    if sys.stdout is None:  # closed by whoever started us; the next file opened would take its place
        raise OctavoError("standard output is closed", hint="redirect it to a file or to /dev/null")
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logger = logging.getLogger("octavo")
    logger.handlers[:] = [handler]
    logger.propagate = False
    level = environment.log_level()
    logger.setLevel(level.upper() if level in LEVELS else "WARNING")
    _State.debug = environment.debug()
    for line in environment.unknown():
        logger.warning(line)
    if level not in LEVELS:
        logger.warning("OCTAVO_LOG_LEVEL=%s is ignored: it isn't one of %s", level, ", ".join(LEVELS))
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End as on Ctrl-C: whoever defers the one defers the other."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:
        raise KeyboardInterrupt


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"octavo: {record.levelname.lower()}: {super().format(record)}"


def _where_help(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context is not None else ""


def _end(line: str, code: int) -> int:
    """Say it on one line of stderr, after the traceback with ``--debug``."""
    if _State.debug:
        traceback.print_exc()
    click.echo(f"octavo: {' '.join(line.split())}", err=True)
    return code
