"""``octavo chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from octavo.core.api.errors import UsageError
from octavo.core.cli.engine_options import config_from, engine_options
from octavo.core.cli.sampling_options import model_defaults, sampling_options, take_sampling, with_sampling

if TYPE_CHECKING:
    from octavo.core.api.sampling import SamplingParams
    from octavo.core.engine.llm import LLM

HELP = "/exit ends the program, /reset forgets the conversation, /help says this; Ctrl-C stops an answer, Ctrl-D ends"


@click.command(short_help="Talk with a model.")
@click.option("--system", help="a system message")
@sampling_options
@engine_options
def command(system: str | None, **options: Any) -> None:
    """Talk with a model that has a chat template. Ctrl-C stops an answer, not the program; /exit or Ctrl-D ends it."""
    sampling = {"max_tokens": None, **take_sampling(options)}
    config = config_from(options)
    from octavo.core.engine.llm import LLM

    with LLM.from_config(config) as llm:
        if llm.front.source.chat_template is None:
            raise UsageError(f"{config.model.model} has no chat template", hint="use `octavo generate --raw`")
        click.echo(HELP, err=True)
        Conversation(llm, with_sampling(model_defaults(llm), sampling), system).run()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._start)

    def run(self) -> None:
        """Until /exit or the end of input."""
        _enable_line_editing()
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                click.echo(err=True)
                return
            except KeyboardInterrupt:
                click.echo("\n" + HELP, err=True)
                continue
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self.messages = list(self._start)
            elif line.startswith("/"):
                click.echo(HELP, err=True)
            elif line:
                self._answer(line)

    def _answer(self, text: str) -> None:
        """Stream the answer; what was said stays in the conversation, also when it was stopped."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for output in self._llm.stream(self._llm.front.chat_prompt(messages), self._params):
                sys.stdout.write(output.outputs[0].text[len(answer) :])
                sys.stdout.flush()
                answer = output.outputs[0].text
        except KeyboardInterrupt:
            click.echo(" … stopped", err=True)
        except UsageError as error:  # the conversation has outgrown the context
            click.echo(f"{error} (/reset starts again)", err=True)
            return
        click.echo()
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def _enable_line_editing() -> None:
    """History and cursor keys for ``input``, where Python has readline."""
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401 - importing it is what turns it on
        except ImportError:
            return
