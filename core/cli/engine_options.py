"""Engine fields as command-line flags: every option of `EngineConfig`, and ``--config FILE``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field
from typing import Any

import click

from octavo.core.config import EngineConfig

_AS_TEXT = ("kv_cache_memory_bytes", "attention_backend")  # `validate` reads 512M and kind=NAME,…


def engine_options(command: Callable[..., Any] | None = None, *, without: Sequence[str] = ()) -> Callable[..., Any]:
    """Decorate a command with a flag for each engine option; pass its keywords to `config_from`.

    ``without`` names options that the command brings as something else (an argument, say).
    """
    if command is None:
        return lambda function: engine_options(function, without=without)
    options = [option for _, option in EngineConfig.options() if option.name not in without and not option.metadata["internal"]]
    for option in reversed(options):
        command = _flag(option)(command)
    return click.option("--config", "config_file", metavar="FILE", help="options from a TOML file; flags win over it")(command)


def config_from(options: dict[str, Any], **more: Any) -> EngineConfig:
    """The configuration: the file that ``--config`` names, then the flags that were given, then ``more``.

    Takes the engine's keywords out of ``options``, leaving a command's own. Raises `UsageError`.
    """
    path = options.pop("config_file", None)
    given: dict[str, Any] = {}
    if path is not None:
        from octavo.core.config.file import read_config_file

        given = read_config_file(path)
    for _, option in EngineConfig.options():
        value = options.pop(option.name, None)
        if value is not None and value != ():
            given[option.name] = value
    return EngineConfig.from_flat(**{**given, **more})


def _flag(option: Field[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The flag of one option; None (or an empty tuple) where it isn't given, so that defaults stay the config's own."""
    flag, text = option.name.replace("_", "-"), option.metadata["help"]
    kind = str(option.type)
    default = "" if option.default in (None, "", ()) or not isinstance(option.default, (int, float, str)) else option.default
    text = f"{text} [{default}]" if default != "" and not isinstance(default, bool) else text
    if kind.startswith("bool"):
        on = f"{text} [{'on' if option.default else 'off'}]" if isinstance(option.default, bool) else text
        return click.option(f"--{flag}/--no-{flag}", option.name, default=None, help=on)
    repeatable = kind.startswith("tuple") or option.name == "op"
    types: dict[str, Any] = {"int": int, "float": float}
    number = None if option.name in _AS_TEXT else types.get(kind.partition(" ")[0])
    metavar = "N" if number else "OP=NAME" if option.name == "op" else "TEXT"
    return click.option(
        f"--{flag}", option.name, type=number or str, default=None, multiple=repeatable, metavar=metavar, help=text
    )
