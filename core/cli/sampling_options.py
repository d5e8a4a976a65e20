"""The command line's sampling flags, shared by ``generate`` and ``chat``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from octavo.core.api.sampling import SamplingParams

if TYPE_CHECKING:
    from octavo.core.engine.llm import LLM

__all__ = ["model_defaults", "sampling_options", "take_sampling", "with_sampling"]

_FLAGS: Mapping[str, tuple[Any, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "min_tokens": (int, "fewest tokens to generate before it may stop"),
    "temperature": (float, "0 = greedy [the model's own default, else 0]"),
    "top_p": (float, "keep the likeliest tokens that make up this share"),
    "top_k": (int, "keep this many of the likeliest tokens; 0 = all"),
    "min_p": (float, "keep tokens at least this likely, relative to the likeliest"),
    "repetition_penalty": (float, "above 1 discourages tokens seen before"),
    "presence_penalty": (float, "above 0 discourages tokens generated before"),
    "frequency_penalty": (float, "above 0 discourages tokens by how often they were generated"),
}


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the flags; their values arrive as keywords, None (or empty) where not given."""
    for name, (kind, text) in reversed(list(_FLAGS.items())):
        command = click.option("--" + name.replace("_", "-"), name, type=kind, default=None, help=text)(command)
    command = click.option("--stop", multiple=True, help="end the text here; repeatable")(command)
    command = click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="end at this token; repeatable")(
        command
    )
    return click.option("--ignore-eos", is_flag=True, help="go on after the end-of-text token")(command)


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling flags from a command's keywords; those that were given. Raises `UsageError` on a bad value."""
    names = (*_FLAGS, "stop", "stop_token_ids", "ignore_eos")
    values = {name: options.pop(name) for name in names}
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
    SamplingParams(**{"max_tokens": None, **given})
    return given


def with_sampling(defaults: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """``defaults`` with the values given. Raises `UsageError`."""
    current = {name: getattr(defaults, name) for name in defaults.__struct_fields__}
    return SamplingParams(**{**current, **values})


def model_defaults(llm: LLM) -> SamplingParams:
    """What the model's files recommend; where they are silent on temperature, greedy: the same answer every time."""
    values = {} if llm.front.source.generation.temperature is not None else {"temperature": 0.0}
    return with_sampling(llm.get_default_sampling_params(), values)
