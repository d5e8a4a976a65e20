"""``octavo chat``: a conversation on standard input and output."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.core.engine.llm import LLM

SMALL = ("--platform", "cpu", "--attention-backend", "reference", "--dtype", "float32", "--kv-cache-memory-bytes", "4M")


@pytest.fixture
def chat(octavo: Callable[..., Any], chat_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The conversation with these lines of input."""

    def run(*lines: str, arguments: Any = (), model: Path = chat_llama) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return octavo("chat", "--model", model, *SMALL, "--max-tokens", "4", "--ignore-eos", *arguments)

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages of each turn, as the template gets them."""
    from octavo.core.engine.front import Front

    seen: list[Any] = []
    chat_prompt = Front.chat_prompt

    def record(self: Front, messages: Any, **template: Any) -> Any:
        seen.append(list(messages))
        return chat_prompt(self, messages, **template)

    monkeypatch.setattr(Front, "chat_prompt", record)
    return seen


def test_each_turn_sees_what_was_said_before(chat: Any, asked: list[Any]) -> None:
    ended = chat("w7", "", "w8 w9", "/exit", "w10")
    assert ended.code == 0
    first, second = ended.out.splitlines()
    assert len(first.split()) == len(second.split()) == 4
    assert asked == [
        [{"role": "user", "content": "w7"}],
        [{"role": "user", "content": "w7"}, {"role": "assistant", "content": first}, {"role": "user", "content": "w8 w9"}],
    ]


def test_the_end_of_input_ends_it(chat: Any) -> None:
    assert chat("w7").code == 0
    assert chat().code == 0


def test_reset_forgets_all_but_the_system_message(chat: Any, asked: list[Any]) -> None:
    ended = chat("w7", "/reset", "w7", "/nonsense", arguments=("--system", "w20"))
    first, second = ended.out.splitlines()
    assert first == second
    assert asked[0] == asked[1] == [{"role": "system", "content": "w20"}, {"role": "user", "content": "w7"}]
    assert ended.err.count("/reset forgets the conversation") == 2


def test_ctrl_c_stops_the_answer_and_not_the_program(chat: Any, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LLM.stream

    def interrupted(self: LLM, *arguments: Any) -> Any:
        for number, output in enumerate(stream(self, *arguments)):
            yield output
            if len(asked) == 1 and number == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    ended = chat("w7", "w8")
    assert ended.code == 0
    first, second = ended.out.splitlines()
    assert (len(first.split()), len(second.split())) == (2, 4)
    assert "stopped" in ended.err
    assert asked[1][1] == {"role": "assistant", "content": first}


def test_ctrl_c_at_the_prompt_says_how_to_leave(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([KeyboardInterrupt(), "w7", EOFError()])

    def answer(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", answer)
    ended = chat()
    assert ended.code == 0
    assert len(ended.out.split()) == 4
    assert ended.err.count("Ctrl-D ends") == 2


def test_a_conversation_that_outgrows_the_context_goes_on_after_a_reset(chat: Any) -> None:
    ended = chat("w7 " * 130, "w8", arguments=("--max-model-len", "64"))
    assert ended.code == 0
    assert "the prompt has 132 tokens, but the context holds 64" in ended.err
    assert len(ended.out.splitlines()) == 1


def test_a_model_without_a_template_is_refused(chat: Any, tiny_llama: Path) -> None:
    ended = chat("w7", model=tiny_llama)
    assert ended.code == 2
    assert "has no chat template" in ended.err
    assert "--raw" in ended.err
