"""Tokenizers made from a GGUF's metadata equal pipelines built independently here, or SentencePiece's own algorithm."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.core.api.errors import BrokenModel, UsageError
from octavo.core.api.manifest import ModelManifest
from octavo.core.loading import open_model
from octavo.core.loading.gguf_header import GGUFReader
from octavo.core.loading.gguf_tokenizer import build_tokenizer
from octavo.core.loading.tokenizer import Tokenizer as OctavoTokenizer

FRAGMENTS = [
    "Hello", "world", "the", "The quick brown fox", " ", "  ", "   ", " " * 17, "\t", "\n", "\n\n", "\n\n\n1.",
    "\r\n", "\u00a0", "\u200b", "é", "e\u0301", "ü", "ß", "Ångström", "ﬁ", "naïve café", "🎉", "👩‍👩‍👧", "🇫🇷",
    "日本語のテキスト", "中文分词", "한국어", "Привет, мир", "مرحبا", "שלום", "हिन्दी", "ไทย", "Ω≈ç√∫", "1", "12",
    "123", "1234567", "3.14159", "0x1F", "２０２４", "Ⅷ", "½", "don't", "I'LL", "we've", "it’s", "'s", "''",
    "\"quoted\"", "foo_bar", "CamelCaseWord", "snake_case_1", "x=y+1;", "if (a<b) {", "}", "#!/bin/sh",
    "https://example.org/a?b=c&d=%20", "a@b.co", "$100,000.00", "50%", "...", "!!!", "—", "–", "…", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<bos>", "<end_of_turn>", "<|im", "im_end|>", "</div>", "<b>",
    "aaaaaaaaaaaaaaaaaaaaaaaa", "----------", "=====", "\x00", "\x07", "\x1b[0m", "\ufeff", "\ufffd", "𝔘𝔫𝔦",
    "\U000e0001", "ǅ", "İ", "ı", "ʼn", " a", "a ", " .", "\n ", " \n",
]  # fmt: skip


def odd_strings(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    made = ["", *FRAGMENTS]
    while len(made) < count:
        made.append(rng.choice(["", " "]).join(rng.choice(FRAGMENTS) for _ in range(rng.randint(2, 9))))
    return made[:count]


def vocabulary(reader: GGUFReader) -> tuple[list[str], list[int]]:
    metadata: Mapping[str, Any] = reader.metadata
    return metadata["tokenizer.ggml.tokens"].strings(), metadata["tokenizer.ggml.token_type"].tolist()


@pytest.fixture(scope="module")
def smollm2(catalogue_model: Callable[[str], Path]) -> Path:
    return catalogue_model("smollm2")


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path, models: Mapping[str, ModelManifest]) -> OctavoTokenizer:
    return open_model(smollm2, models=models).tokenizer()


@pytest.mark.model
def test_smollm2_tokenises_500_odd_strings_like_the_pipeline_that_it_names(
    smollm2: Path, smollm2_tokenizer: OctavoTokenizer
) -> None:
    reader = GGUFReader(smollm2)
    tokens, types = vocabulary(reader)
    merges: Any = reader.metadata["tokenizer.ggml.merges"]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges.strings())]
    expected = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    expected.decoder = decoders.ByteLevel()
    expected.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == 3])
    for text in odd_strings(500, seed=1):
        ids = smollm2_tokenizer.encode(text)
        assert ids == expected.encode(text).ids, text
        assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False), text


@pytest.mark.model
def test_text_survives_smollm2_unchanged(smollm2_tokenizer: OctavoTokenizer) -> None:
    for text in odd_strings(300, seed=2):
        assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.model
def test_smollm2_knows_its_special_tokens(smollm2_tokenizer: OctavoTokenizer) -> None:
    ids = smollm2_tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert (smollm2_tokenizer.bos_token_id, smollm2_tokenizer.eos_token_ids) == (1, (2,))
    assert smollm2_tokenizer.decode(ids) == "user\nhi"
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.token(2) == "<|im_end|>"


@pytest.mark.model
def test_smollm2_chat_template_makes_its_prompt(smollm2_tokenizer: OctavoTokenizer) -> None:
    prompt = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


class ByScore:
    """SentencePiece's BPE, written from its description: join the neighbours whose union scores best, leftmost first."""

    def __init__(self, pieces: Mapping[str, tuple[int, float]], whole: list[str], ids: Mapping[str, int]) -> None:
        self.pieces = pieces
        self.whole = sorted(whole, key=len, reverse=True)
        self.ids = ids

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", "▁")
        ids: list[int] = []
        start = position = 0
        while position < len(text):
            found = next((token for token in self.whole if text.startswith(token, position)), None)
            if found is None:
                position += 1
                continue
            ids += [*self._run(text[start:position]), self.ids[found]]
            start = position = position + len(found)
        return ids + self._run(text[start:])

    def _run(self, text: str) -> list[int]:
        symbols: list[str | None] = list(text)
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, str, str]] = []

        def offer(left: int) -> None:
            if left < 0 or after[left] >= len(symbols):
                return
            first, second = symbols[left], symbols[after[left]]
            assert first is not None
            assert second is not None
            if first + second in self.pieces:
                heapq.heappush(queue, (-self.pieces[first + second][1], left, first, second))

        for index in range(len(symbols)):
            offer(index)
        while queue:
            _, left, first, second = heapq.heappop(queue)
            right = after[left]
            if symbols[left] != first or right >= len(symbols) or symbols[right] != second:
                continue  # one of the two has been joined to something else
            symbols[left], symbols[right] = first + second, None
            after[left] = after[right]
            if after[left] < len(symbols):
                before[after[left]] = left
            offer(before[left])
            offer(left)
        return [token_id for symbol in symbols if symbol is not None for token_id in self._ids(symbol)]

    def _ids(self, symbol: str) -> list[int]:
        if symbol in self.pieces:
            return [self.pieces[symbol][0]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]


@pytest.mark.model
def test_gemma3_tokenises_500_odd_strings_like_sentencepiece(
    catalogue_model: Callable[[str], Path], models: Mapping[str, ModelManifest]
) -> None:
    path = catalogue_model("gemma3-270m")
    reader = GGUFReader(path)
    tokens, types = vocabulary(reader)
    scores: Any = reader.metadata["tokenizer.ggml.scores"]
    entries = list(zip(tokens, types, scores.tolist(), range(len(tokens)), strict=True))
    pieces = {token: (index, score) for token, kind, score, index in entries if kind == 1}
    ids = {token.replace(" ", "▁") if kind == 4 else token: index for token, kind, _, index in entries}
    whole = [token.replace(" ", "▁") for token, kind, _, _ in entries if kind in (3, 4) and not token.startswith("<unused")]
    expected = ByScore(pieces, whole, ids)
    tokenizer = open_model(path, models=models).tokenizer()
    for text in [*odd_strings(500, seed=3), "▁▁a", " " * 70 + "x", "\n" * 40]:
        got = tokenizer.encode(text)
        assert got == [2, *expected.encode(text)], text
        if "▁" not in text:
            assert tokenizer.decode(got[1:], skip_special_tokens=False) == text


# Small vocabularies, made here.

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def build(make_gguf: Callable[..., Path], path: Path, metadata: Mapping[str, Any]) -> OctavoTokenizer:
    """The tokenizer of a GGUF with this metadata; the rest of the file doesn't matter."""
    reader = GGUFReader(make_gguf(path, metadata=metadata))
    tokens = len(metadata["tokenizer.ggml.tokens"])
    return build_tokenizer(reader.metadata, vocab_size=tokens, where=path.name, chat_template=None)


def spm_metadata(pieces: list[str], **flags: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{key}": value for key, value in flags.items()},
    }


PIECES = ["▁h", "el", "lo", "hel", "▁hel", "▁hello", "▁", "h", "e", "l", "o", "w"]


def test_sentencepiece_kind_puts_a_space_in_front_and_bos_by_default(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    tokenizer = build(make_gguf, tmp_path / "m.gguf", spm_metadata(PIECES))
    ids = tokenizer.encode("hello hello")
    # "▁h" is joined first, then "el", which "▁h" takes in as "▁hel", then "lo", then the whole.
    assert [tokenizer.token(token_id) for token_id in ids] == ["<s>", "▁hello", "▁hello"]
    assert tokenizer.decode(ids) == "hello hello"
    assert tokenizer.encode("hello", add_special_tokens=False) == ids[1:2]


def test_sentencepiece_flags_are_honoured(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    tokenizer = build(make_gguf, tmp_path / "m.gguf", spm_metadata(PIECES, **flags))
    ids = tokenizer.encode("hello")
    assert [tokenizer.token(token_id) for token_id in ids] == ["hel", "lo", "</s>"]
    assert tokenizer.decode(ids) == "hello"


def test_characters_outside_the_vocabulary_fall_back_to_bytes(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    tokenizer = build(make_gguf, tmp_path / "m.gguf", spm_metadata(PIECES))
    ids = tokenizer.encode("wé🎉", add_special_tokens=False)
    assert [tokenizer.token(token_id) for token_id in ids][2:] == [f"<0x{byte:02X}>" for byte in "é🎉".encode()]
    assert tokenizer.decode(ids) == "wé🎉"
    assert tokenizer.decode(ids[:-1]) == "wé\ufffd"  # only the cut character is replaced
    assert tokenizer.decode([ids[-1], *ids]) == "\ufffd wé🎉"


def test_scores_that_are_no_numbers_are_broken(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    metadata = spm_metadata(PIECES)
    metadata["tokenizer.ggml.scores"][-1] = float("nan")
    with pytest.raises(BrokenModel, match="a token's score is not a number"):
        build(make_gguf, tmp_path / "m.gguf", metadata)


def test_user_defined_tokens_match_whole_however_spaces_are_spelled(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    for spelling in ("  ", "▁▁"):
        for prefix in (True, False):
            metadata = spm_metadata([*PIECES, spelling, "<tag>"], add_space_prefix=prefix, add_bos_token=False)
            metadata["tokenizer.ggml.token_type"][-2:] = [4, 4]
            tokenizer = build(make_gguf, tmp_path / "m.gguf", metadata)
            ids = tokenizer.encode("hel  lo<tag>")
            assert ids.count(len(metadata["tokenizer.ggml.tokens"]) - 2) == 1
            assert ids[-1] == len(metadata["tokenizer.ggml.tokens"]) - 1
            assert tokenizer.decode(ids).replace(" ", "") == "hello<tag>"


def test_control_and_byte_tokens_take_no_part_in_merges(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """The pieces "<" and "s>" must not make the control token "<s>" of a text that is cut between them."""
    metadata = spm_metadata(["<", "s>", "s", ">", "0x41>", "<0x", "0", "x", "4", "1", "<0"], add_space_prefix=False)
    tokenizer = build(make_gguf, tmp_path / "m.gguf", metadata)
    assert tokenizer.raw.encode("<0x41>", add_special_tokens=False).ids[0] != BYTES.index("<0x41>") + 3


def bpe_metadata(pre: str, **flags: Any) -> dict[str, Any]:
    alphabet = byte_alphabet()
    words = ["he", "12", "123", "Ġhe", "ĊĊ", "'s", "'S"]
    merges = ["h e", "1 2", "12 3", "Ġ he", "Ċ Ċ", "' s", "' S"]
    tokens = ["<|end|>", *alphabet, *words]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in flags.items()},
    }


def published(pre: str) -> tuple[Any, Any]:
    """(normalizer, pre-tokenizer) as the families' tokenizer.json files have them, spelled out here once more."""
    contractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    patterns = {
        "llama-bpe": contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2": contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "tekken": (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    }
    split = pre_tokenizers.Split(Regex(patterns[pre]), "isolated")
    whole = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return normalizers.NFC() if pre == "qwen2" else None, whole


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
def test_byte_level_pipelines_cut_text_as_their_family_does(make_gguf: Callable[..., Path], tmp_path: Path, pre: str) -> None:
    metadata = bpe_metadata(pre)
    tokenizer = build(make_gguf, tmp_path / "m.gguf", metadata)
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    expected = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in ("llama-bpe", "tekken")))
    normalizer, expected.pre_tokenizer = published(pre)
    if normalizer is not None:
        expected.normalizer = normalizer
    expected.add_special_tokens(["<|end|>"])
    for text in odd_strings(250, seed=4):
        assert tokenizer.encode(text) == expected.encode(text).ids, text


def test_a_missing_pre_tokenizer_name_means_gpt2(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    metadata = bpe_metadata("gpt-2")
    named = build(make_gguf, tmp_path / "a.gguf", metadata)
    reader = GGUFReader(make_gguf(tmp_path / "b.gguf", metadata=metadata, without=("tokenizer.ggml.pre",)))
    tokens = len(metadata["tokenizer.ggml.tokens"])
    unnamed = build_tokenizer(reader.metadata, vocab_size=tokens, where="b.gguf", chat_template=None)
    assert unnamed.encode("he123's\n\nHE'S") == named.encode("he123's\n\nHE'S")


def test_byte_level_bos_is_added_only_where_the_file_says_so(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    assert build(make_gguf, tmp_path / "a.gguf", bpe_metadata("gpt-2")).encode("he")[0] != 0
    assert build(make_gguf, tmp_path / "b.gguf", bpe_metadata("gpt-2", add_bos_token=True)).encode("he")[0] == 0


def test_every_token_that_ends_a_turn_is_an_end(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    metadata = bpe_metadata("llama-bpe", eot_token_id=3)
    metadata["tokenizer.ggml.tokens"][5] = "<|eot_id|>"
    metadata["tokenizer.ggml.token_type"][5] = 3
    tokenizer = build(make_gguf, tmp_path / "m.gguf", metadata)
    assert tokenizer.eos_token_ids == (0, 3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.merges": ["h zzz"]}, "merges don't fit its tokens"),
        ({"tokenizer.ggml.merges": ["he"]}, "isn't two tokens"),
        ({"tokenizer.ggml.tokens": ["same"] * 264}, "has a token twice"),
    ],
)
def test_a_vocabulary_that_makes_no_tokenizer_is_broken(
    make_gguf: Callable[..., Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BrokenModel, match=message):
        build(make_gguf, tmp_path / "m.gguf", {**bpe_metadata("gpt-2"), **change})


def test_ids_outside_the_vocabulary_and_lone_surrogates_are_usage_errors(
    make_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizer = build(make_gguf, tmp_path / "m.gguf", bpe_metadata("gpt-2"))
    for wrong in (tokenizer.vocab_size, -1, 1 << 40):
        with pytest.raises(UsageError, match="token id"):
            tokenizer.decode([wrong])
        with pytest.raises(UsageError, match="is not in the vocabulary"):
            tokenizer.token(wrong)
    with pytest.raises(UsageError, match="lone surrogate"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.model
def test_building_tokenizers_is_fast(catalogue_model: Callable[[str], Path]) -> None:
    """0.3 s for 49152 tokens; measured in processor time, and asserted at twice that."""
    import time

    reader = GGUFReader(catalogue_model("smollm2"))
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        build_tokenizer(reader.metadata, vocab_size=49152, where="smollm2", chat_template=None)
        best = min(best, time.process_time() - start)
    assert best < 0.6
