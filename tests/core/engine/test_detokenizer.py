"""Incremental detokenisation: what is given out is never taken back, and adds up to the text of all ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from octavo.core.engine.detokenizer import Detokenizer, TokenBytes

TEXT = [
    "Grüße aus Köln! 😀🎉 naïve café",
    "日本語のテキスト",
    "the quick brown fox",
    "  two  spaces\n\n1. list",
    "👩‍👩‍👧 family",
]


@dataclass
class Wrapped:
    """The part of `octavo.core.loading.tokenizer.Tokenizer` that detokenisation uses."""

    raw: RawTokenizer
    special_ids: frozenset[int]


@cache
def byte_level() -> Wrapped:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(TEXT * 4, trainer)
    raw.add_tokens([AddedToken("<tool call>"), AddedToken("émoji")])
    return Wrapped(raw, frozenset({raw.token_to_id("<|end|>")}))


@cache
def byte_fallback(strip: bool) -> Wrapped:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁hello",
        "é",
        "本",
        "▁▁",
    ]
    raw = RawTokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    raw.add_special_tokens(["<s>", "</s>"])
    return Wrapped(raw, frozenset({1, 2}))


def deltas(tokenizer: Any, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer), skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 401), max_size=40), skip=st.booleans())
def test_byte_level_deltas_add_up_to_the_full_decode_of_any_ids(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    ids = [token_id % tokenizer.raw.get_vocab_size() for token_id in ids]
    assert "".join(deltas(tokenizer, ids, skip=skip)) == tokenizer.raw.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 401), min_size=1, max_size=40), data=st.data())
def test_byte_level_text_given_out_is_never_taken_back(ids: list[int], data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = [token_id % tokenizer.raw.get_vocab_size() for token_id in ids]
    cut = data.draw(st.integers(0, len(ids)))
    assert tokenizer.raw.decode(ids).startswith("".join(deltas(tokenizer, ids)[:cut]))


@given(text=st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.raw.encode(text).ids
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    assert parts[-1] == ""


@pytest.mark.parametrize("strip", [True, False])
@given(ids=st.lists(st.one_of(st.integers(259, 266), st.integers(0, 266)), max_size=20))
def test_byte_fallback_deltas_add_up_to_the_full_decode(strip: bool, ids: list[int]) -> None:
    tokenizer = byte_fallback(strip)
    full = tokenizer.raw.decode(ids)
    parts = "".join(deltas(tokenizer, ids))
    # Where bytes aren't UTF-8 the library blanks the whole run of byte tokens, valid characters in it included; we don't.
    assert parts == full or "\ufffd" in full


@pytest.mark.parametrize("strip", [True, False])
@given(text=st.text(alphabet="ab é本😀🎉ß\n", max_size=12))
def test_byte_fallback_characters_come_whole(strip: bool, text: str) -> None:
    tokenizer = byte_fallback(strip)
    ids = [3 + byte for byte in text.encode()]
    if strip and text.startswith(" "):
        return
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.raw.decode(ids) == text
    assert len([part for part in parts if part]) == len(text)


def test_a_newline_spelled_as_a_byte_token_is_shown_at_once() -> None:
    assert deltas(byte_fallback(True), [263, 3 + 10, 262]) == [" hello"[1:], "\n", " a", ""]


def test_an_unfinished_character_becomes_one_replacement_character_at_the_end() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.raw.token_to_id(stand_in) for stand_in in ("ð", "Ł")]  # the first two of four bytes of an emoji
    assert deltas(tokenizer, ids) == ["", "", "\ufffd"]


def test_an_id_beyond_the_tokenizer_has_no_text() -> None:
    assert deltas(byte_level(), [10_000]) == ["", ""]


def test_special_tokens_are_shown_when_asked_for() -> None:
    tokenizer = byte_level()
    end = tokenizer.raw.token_to_id("<|end|>")
    assert deltas(tokenizer, [end], skip=False) == ["<|end|>", ""]
    assert deltas(tokenizer, [end], skip=True) == ["", ""]


def test_the_space_that_joins_words_is_dropped_at_the_start_only() -> None:
    assert "".join(deltas(byte_fallback(True), [263, 263])) == "hello hello"
    assert "".join(deltas(byte_fallback(False), [263, 263])) == " hello hello"


def test_a_vocabulary_of_words_is_joined_with_spaces() -> None:
    raw = RawTokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one"))
    tokenizer = Wrapped(raw, frozenset())
    assert deltas(tokenizer, [0, 1, 2]) == ["one", " two", " three", ""]
    assert raw.decode([0, 1, 2]) == "one two three"
