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


@cache
def words() -> Wrapped:
    """Whole words, with no decoder: the library puts a space between any two tokens."""
    raw = RawTokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "<a>": 3, "<b>": 4}, unk_token="one"))
    raw.add_special_tokens(["<a>", "<b>"])
    return Wrapped(raw, frozenset({3, 4}))


def deltas(tokenizer: Any, ids: list[int], *, skip: bool = True, at_start: bool = True, spaces: bool = True) -> list[str]:
    detokenizer = Detokenizer(
        TokenBytes(tokenizer), skip_special_tokens=skip, spaces_between_special_tokens=spaces, at_start=at_start
    )
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


def test_a_completion_shows_the_space_before_its_first_word() -> None:
    prompt, completion = [263], [262, 263]  # "▁hello", "▁a▁hello"
    tokenizer = byte_fallback(True)
    shown = deltas(tokenizer, completion, at_start=False)
    assert shown == [" a", " hello", ""]
    assert tokenizer.raw.decode(prompt) + "".join(shown) == tokenizer.raw.decode(prompt + completion) == "hello a hello"


@pytest.mark.parametrize("strip", [True, False])
@given(prompt=st.lists(st.integers(259, 266), min_size=1), completion=st.lists(st.integers(259, 266)))
def test_byte_fallback_prompt_and_completion_join_to_the_full_decode(
    strip: bool, prompt: list[int], completion: list[int]
) -> None:
    tokenizer = byte_fallback(strip)
    joined = tokenizer.raw.decode(prompt) + "".join(deltas(tokenizer, completion, at_start=False))
    assert joined == tokenizer.raw.decode(prompt + completion)


@given(prompt=st.text(min_size=1, max_size=20), completion=st.text(max_size=20))
def test_byte_level_prompt_and_completion_join_to_the_full_decode(prompt: str, completion: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.raw.encode(completion).ids
    shown = "".join(deltas(tokenizer, ids, at_start=False))
    assert prompt + shown == tokenizer.raw.decode(tokenizer.raw.encode(prompt).ids + ids) == prompt + completion


def test_after_a_chat_template_the_first_token_has_its_own_form() -> None:
    template, answer = [1, 262, 2], [263]  # "<s>▁a</s>", "▁hello"
    tokenizer = byte_fallback(True)
    before = tokenizer.raw.decode(template, skip_special_tokens=False)
    shown = "".join(deltas(tokenizer, answer, at_start=False))
    assert shown == " hello"
    assert before + shown == tokenizer.raw.decode(template + answer, skip_special_tokens=False)
    assert deltas(tokenizer, [260], at_start=False) == ["a", ""], "a token without a space gets none"


def test_a_vocabulary_of_words_is_joined_with_spaces() -> None:
    assert deltas(words(), [0, 1, 2]) == ["one", " two", " three", ""]
    assert deltas(words(), [1, 2], at_start=False) == [" two", " three", ""]
    assert words().raw.decode([0, 1, 2]) == "one two three"


def test_special_tokens_are_joined_without_spaces_when_asked_for() -> None:
    ids = [0, 3, 4, 1, 3]
    assert (
        "".join(deltas(words(), ids, skip=False)) == words().raw.decode(ids, skip_special_tokens=False) == "one <a> <b> two <a>"
    )
    assert "".join(deltas(words(), ids, skip=False, spaces=False)) == "one <a><b> two <a>"
    assert "".join(deltas(words(), ids, spaces=False)) == "one two"
