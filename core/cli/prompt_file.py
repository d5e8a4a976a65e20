"""``octavo generate --prompt-file``: JSON lines in, JSON lines out; the output appears whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from octavo.core.api.errors import UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.cli.sampling_options import model_defaults, with_sampling
from octavo.core.config.suggest import nearest

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig
    from octavo.core.engine.llm import LLM
    from octavo.core.engine.outputs import RequestOutput
    from octavo.core.engine.requests import Prompt

_CONTENT = ("prompt", "prompt_token_ids", "messages")
_KEYS = (*_CONTENT, "id", "cache_salt", "priority", "sampling_params")


@dataclass(frozen=True)
class Line:
    """One checked line: exactly one of ``prompt``, ``prompt_token_ids`` and ``messages``, and what goes with it."""

    number: int
    content: Mapping[str, Any]
    sampling: Mapping[str, Any]

    @property
    def priority(self) -> Any:
        return self.content.get("priority", 0)


def answer_file(
    config: EngineConfig,
    prompt_file: Path,
    output: Path,
    *,
    sampling: Mapping[str, Any],
    raw: bool,
    as_json: bool,
    started_s: float,
) -> None:
    """Answer every line of ``prompt_file`` into ``output``. Raises `UsageError` before the model is loaded."""
    lines = read_lines(prompt_file)
    if os.path.exists(output) and os.path.samefile(output, prompt_file):
        raise UsageError(f"--output {output} is the prompt file itself", hint="name another file, or the prompts would be lost")
    with replacing(output) as file:
        from octavo.core.engine.llm import LLM

        with LLM.from_config(config) as llm:
            startup_s = time.perf_counter() - started_s
            defaults = with_sampling(model_defaults(llm), sampling)
            params = [_params(defaults, line) for line in lines]
            prompts = [_prompt(llm, line, one, raw=raw) for line, one in zip(lines, params, strict=True)]
            begun_s = time.perf_counter()
            results = llm.generate(prompts, params, priority=[line.priority for line in lines])
            run_s = time.perf_counter() - begun_s
            for line, result in zip(lines, results, strict=True):
                file.write(json.dumps(_answer(line, result), ensure_ascii=False) + "\n")
            _report(llm, results, output, run_s=run_s, startup_s=startup_s, as_json=as_json)


def read_lines(path: Path) -> list[Line]:
    """The file's lines, checked; empty ones are skipped. Raises `UsageError` that names the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    lines = [_line(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{path} holds no prompts")
    return lines


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A file that takes ``path``'s place when the block ends well, and vanishes when it doesn't. Raises `UsageError`.

    A link stays one: the file that it leads to is replaced. Devices and pipes can't be replaced and are refused.
    """
    try:
        path = path.resolve()
        mode = path.stat().st_mode if path.exists() else stat.S_IFREG
        if not stat.S_ISREG(mode):
            raise UsageError(f"can't write {path}: it is {'a folder' if stat.S_ISDIR(mode) else 'not an ordinary file'}")
        partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
        file = partial.open("w", encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise UsageError(f"can't write {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        with file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _line(path: Path, number: int, text: str) -> Line:
    where = f"{path}, line {number}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"{where}: not JSON that can be read ({error})") from error
    except RecursionError as error:
        raise UsageError(f"{where}: nested too deeply") from error
    content = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(content, dict):
        raise UsageError(f"{where}: expected an object or a string, not {type(value).__name__}")
    for key in content:
        if key not in _KEYS:
            raise UsageError(f"{where}: unknown key {key!r}" + nearest(key, _KEYS))
    if len([key for key in _CONTENT if key in content]) != 1:
        raise UsageError(f"{where}: needs exactly one of " + ", ".join(_CONTENT))
    if "prompt" in content and not isinstance(content["prompt"], str):
        raise UsageError(f'{where}: "prompt" must be a string')
    messages = content.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f'{where}: "messages" must be a list of objects with role and content')
    _check_id(where, content.get("id"))
    return Line(number, content, _sampling(where, content.get("sampling_params", {})))


def _check_id(where: str, value: Any) -> None:
    """The answer repeats it, so it must be what JSON in UTF-8 can say: Python reads NaN and half a surrogate pair, too."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise UsageError(f'{where}: "id" can\'t be written back: {error}') from error


def _token_id(key: str) -> int | str:
    """JSON's keys are always strings. What is no number stays one, for `SamplingParams` to refuse."""
    return int(key) if key.isdecimal() and len(key) < 20 else key


def _sampling(where: str, sampling: Any) -> Mapping[str, Any]:
    if not isinstance(sampling, dict):
        raise UsageError(f'{where}: "sampling_params" must be an object')
    for key in sampling:
        if key not in SamplingParams.__struct_fields__:
            raise UsageError(f"{where}: unknown sampling parameter {key!r}" + nearest(key, SamplingParams.__struct_fields__))
    if isinstance(bias := sampling.get("logit_bias"), dict):
        sampling = {**sampling, "logit_bias": {_token_id(key): value for key, value in bias.items()}}
    try:
        SamplingParams(**{"max_tokens": None, **sampling})
    except (UsageError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from error
    checked: Mapping[str, Any] = sampling
    return checked


def _params(defaults: SamplingParams, line: Line) -> SamplingParams:
    try:
        return with_sampling(defaults, line.sampling)
    except UsageError as error:
        raise UsageError(f"line {line.number}: {error}") from error


def _prompt(llm: LLM, line: Line, params: SamplingParams, *, raw: bool) -> Prompt:
    from octavo.core.cli.generate import prompt_for

    content = line.content
    salt = {"cache_salt": content["cache_salt"]} if "cache_salt" in content else {}
    try:
        if "messages" in content:
            made: Any = llm.front.chat_prompt(content["messages"])
        elif "prompt" in content:
            made = prompt_for(llm, content["prompt"], raw=raw)
        else:
            made = {"prompt_token_ids": content["prompt_token_ids"]}
        prompt: Prompt = {**(made if isinstance(made, Mapping) else {"prompt": made}), **salt}
        llm.front.maker.make(prompt, params, "check", priority=line.priority)
    except UsageError as error:
        raise UsageError(f"line {line.number}: {error}") from error
    return prompt


def _answer(line: Line, result: RequestOutput) -> dict[str, Any]:
    completions = [
        {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for completion in result.outputs
    ]
    answer = {"id": line.content.get("id", line.number), **completions[0]}
    if len(completions) > 1:
        answer["outputs"] = completions
    answer["num_prompt_tokens"] = len(result.prompt_token_ids)
    answer["num_cached_tokens"] = result.num_cached_tokens
    return answer


def _report(llm: LLM, results: Sequence[RequestOutput], output: Path, *, run_s: float, startup_s: float, as_json: bool) -> None:
    from octavo.core.cli.generate import attention_name

    platform, attention = llm.config.plugins.platform, attention_name(llm)
    num_tokens = sum(len(completion.token_ids) for result in results for completion in result.outputs)
    rate = num_tokens / run_s
    if as_json:
        document = {
            "output": str(output),
            "num_requests": len(results),
            "platform": platform,
            "attention_backend": attention,
            "metrics": {"startup_s": round(startup_s, 4), "run_s": round(run_s, 4), "output_tokens_per_s": round(rate, 4)},
            "engine": llm.metrics(),
        }
        click.echo(json.dumps(document, ensure_ascii=False))
        return
    parts = (f"platform {platform}", f"attention {attention}", f"{len(results)} prompts", f"{num_tokens} tokens")
    click.echo(" · ".join((*parts, f"{rate:.1f} tokens/s", str(output))), err=True)
