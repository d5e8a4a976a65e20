"""The byte-level BPE pipelines that GGUF files name in ``tokenizer.ggml.pre``.

The name stands for how text is cut before the merges; a wrong guess silently gives other tokens, so a name that isn't here is
refused. Each is the pipeline that the named family publishes in its tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

__all__ = ["PIPELINES", "Pipeline"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How text becomes the pieces that merges work within."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False  # a piece that is a token as it stands needs no merges


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2_LIKE = Pipeline(pre_tokenizer=_gpt2)
_DIGITS = Pipeline(pre_tokenizer=_digits)
_LLAMA3_LIKE = Pipeline(pre_tokenizer=_split(_LLAMA3), ignore_merges=True)
_QWEN2_LIKE = Pipeline(pre_tokenizer=_split(_QWEN2), normalizer=normalizers.NFC)

PIPELINES: Mapping[str, Pipeline] = {
    "default": _GPT2_LIKE,
    "gpt-2": _GPT2_LIKE,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3_LIKE,
    "llama-v3": _LLAMA3_LIKE,
    "llama-bpe": _LLAMA3_LIKE,
    "qwen2": _QWEN2_LIKE,
    "deepseek-r1-qwen": _QWEN2_LIKE,
    "tekken": Pipeline(pre_tokenizer=_split(_TEKKEN), ignore_merges=True),
}
"""``tokenizer.ggml.pre`` → pipeline. A file without the key is taken as "default", GPT-2's own."""
