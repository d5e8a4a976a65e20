"""A tiny model with a chat template, and the command line called in this process."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.core.cli import main as cli

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] == 'user' and 'w1' or 'w2' }} {{ message['content'] }} {% endfor %}w3"
)


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on standard output, which must be the only thing there."""
        return json.loads(self.out)


@pytest.fixture(scope="session")
def chat_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a chat template: ``w1`` before the user's messages, ``w2`` before others, ``w3`` at the end."""
    folder = tmp_path_factory.mktemp("chat") / "chat_llama"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def octavo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ended]]:
    """``octavo`` with these arguments."""
    logger = logging.getLogger("octavo")
    before = (logger.handlers[:], logger.level, logger.propagate, signal.getsignal(signal.SIGTERM))
    monkeypatch.setattr(cli._State, "debug", False)

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return Ended(code, *capsys.readouterr())

    yield run
    logger.handlers[:], logger.level, logger.propagate = before[:3]
    signal.signal(signal.SIGTERM, before[3])
