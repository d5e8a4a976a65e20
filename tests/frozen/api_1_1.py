"""``python api_1_1.py [--asked] ARGUMENTS``: runs ``octavo ARGUMENTS`` on a core that pretends to have octavo.api 1.1.

Its `AttentionSpec` has a field more, ``tree_mask``; with ``--asked`` every attention layer sets it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import octavo.core.api

octavo.core.api.API_VERSION = (1, 1)  # before any module takes it by value

import octavo.core.api.attention  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(octavo.core.api.attention.AttentionSpec):
    """1.1's."""

    tree_mask: bool = field(default=False, metadata={"since": (1, 1)})


octavo.core.api.attention.AttentionSpec = AttentionSpec  # type: ignore[misc]


def ask_for_it() -> None:
    """Make every decoder model's layers set the new field."""
    from octavo.core.layers.decoder import DecoderModel

    original = DecoderModel.attention.__func__  # type: ignore[attr-defined]

    def attention(cls: type[DecoderModel], *arguments: Any, **more: Any) -> Sequence[AttentionSpec]:
        return [replace(spec, tree_mask=True) for spec in original(cls, *arguments, **more)]

    DecoderModel.attention = classmethod(attention)  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    from octavo.core.cli.main import main

    arguments = sys.argv[1:]
    if arguments[:1] == ["--asked"]:
        ask_for_it()
        arguments = arguments[1:]
    sys.exit(main(arguments))
