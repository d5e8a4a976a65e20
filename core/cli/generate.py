"""``octavo generate``: one prompt to the terminal or as JSON, or a file of prompts to a file of answers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.core.api.errors import UsageError
from octavo.core.cli.engine_options import config_from, engine_options
from octavo.core.cli.sampling_options import model_defaults, sampling_options, take_sampling, with_sampling

if TYPE_CHECKING:
    from octavo.core.engine.llm import LLM
    from octavo.core.engine.outputs import RequestOutput
    from octavo.core.engine.requests import Prompt

DEFAULT_MAX_TOKENS = 256


@click.command(short_help="Complete a prompt, or a file of prompts.")
@click.option("--prompt", "-p", help="the prompt; without it, standard input is read")
@click.option("--system", help="a system message before the prompt, for models with a chat template")
@click.option("--raw", is_flag=True, help="the prompt as it is: no chat template")
@click.option(
    "--prompt-file", type=click.Path(path_type=Path), help="JSON lines, each with prompt, prompt_token_ids or messages"
)
@click.option("--output", type=click.Path(path_type=Path), help="where the answers to --prompt-file go, as JSON lines")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on standard output, all else on standard error")
@sampling_options
@engine_options
def command(
    prompt: str | None,
    system: str | None,
    raw: bool,
    prompt_file: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Complete a prompt through the model's chat template where it has one.

    The text is streamed to standard output; one summary line follows on standard error.
    """
    started_s = time.perf_counter()
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **take_sampling(options)}
    config = config_from(options)
    _check_modes(prompt, system, raw, prompt_file, output)
    if prompt_file is not None and output is not None:
        from octavo.core.cli.prompt_file import answer_file

        answer_file(config, prompt_file, output, sampling=sampling, raw=raw, as_json=as_json, started_s=started_s)
        return
    text = _prompt_text(prompt)
    from octavo.core.engine.llm import LLM

    with LLM.from_config(config) as llm:
        startup_s = time.perf_counter() - started_s
        made = prompt_for(llm, text, system=system, raw=raw)
        params = with_sampling(model_defaults(llm), sampling)
        result = None
        shown = 0
        for result in llm.stream(made, params):
            if not as_json:
                shown = _show(result.outputs[0].text, shown)
        assert result is not None
        _end(llm, result, startup_s, as_json=as_json)


def prompt_for(llm: LLM, text: str, *, system: str | None = None, raw: bool = False) -> Prompt:
    """The prompt through the model's chat template, where it has one and ``raw`` isn't asked for."""
    if raw or llm.front.source.chat_template is None:
        if system is not None:
            raise UsageError("--system needs a model with a chat template")
        return text
    messages = [{"role": "user", "content": text}]
    return llm.front.chat_prompt(messages if system is None else [{"role": "system", "content": system}, *messages])


def attention_name(llm: LLM) -> str:
    """The backend that runs attention, or ``group=NAME,group=NAME`` where there are several."""
    chosen = llm.front.core.info.attention
    names = set(chosen.values())
    return names.pop() if len(names) == 1 else ",".join(f"{group}={name}" for group, name in sorted(chosen.items()))


def figures(result: RequestOutput, startup_s: float) -> dict[str, float | int | None]:
    """``output_tokens_per_s`` counts from the arrival, the first token's wait included."""
    latency_s = result.metrics.latency_s
    num_tokens = sum(len(completion.token_ids) for completion in result.outputs)
    return {
        "ttft_s": _rounded(result.metrics.ttft_s),
        "startup_s": _rounded(startup_s),
        "output_tokens_per_s": _rounded(num_tokens / latency_s) if latency_s else None,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
    }


def _check_modes(prompt: str | None, system: str | None, raw: bool, prompt_file: Path | None, output: Path | None) -> None:
    if system is not None and raw:
        raise UsageError("--system and --raw exclude each other: a system message needs the chat template")
    if prompt_file is None:
        if output is not None:
            raise UsageError("--output goes with --prompt-file; redirect standard output for a single prompt")
        return
    if prompt is not None or system is not None:
        raise UsageError("--prompt-file excludes --prompt and --system; put them into the file's lines")
    if output is None:
        raise UsageError("--prompt-file needs --output, the file that the answers go to")


def _prompt_text(prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt", hint="give --prompt TEXT, --prompt-file FILE or standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input isn't UTF-8 text: {error.reason} at byte {error.start}") from error


def _show(text: str, shown: int) -> int:
    if len(text) > shown:
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
    return len(text)


def _end(llm: LLM, result: RequestOutput, startup_s: float, *, as_json: bool) -> None:
    platform, attention = str(llm.config.plugins.platform), attention_name(llm)
    completion, metrics = result.outputs[0], figures(result, startup_s)
    if as_json:
        import json

        document = {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "platform": platform,
            "attention_backend": attention,
            "metrics": metrics,
            "engine": llm.metrics(),
        }
        click.echo(json.dumps(document, ensure_ascii=False))
        return
    click.echo()
    rate, ttft_s = metrics["output_tokens_per_s"], metrics["ttft_s"]
    parts = [f"platform {platform}", f"attention {attention}", f"{len(completion.token_ids)} tokens"]
    parts += [f"{rate:.1f} tokens/s" if rate else "", f"first token after {ttft_s:.2f} s" if ttft_s else ""]
    click.echo(" · ".join(part for part in parts if part), err=True)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
