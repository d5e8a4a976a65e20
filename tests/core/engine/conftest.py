"""A small byte-level tokenizer, and step outputs made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@dataclass
class ByteTokenizer:
    """One token a byte, ids 0 … 255 in the order of the stand-in alphabet; 256 is ``<end>``, the end-of-text token."""

    raw: RawTokenizer
    special_ids: frozenset[int] = frozenset({256})
    eos_token_ids: tuple[int, ...] = (256,)
    bos_token_id: int | None = None
    vocab_size: int = 257

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return str(self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens))


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    raw = RawTokenizer(models.BPE({char: index for index, char in enumerate(ALPHABET)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    return ByteTokenizer(raw)
