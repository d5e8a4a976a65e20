"""The tokenizer that a GGUF's metadata describes: byte-level BPE ("gpt2") or SentencePiece's BPE with scores ("llama")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from octavo.core.api.errors import BrokenModel, UnsupportedModel
from octavo.core.config.suggest import nearest
from octavo.core.loading.bpe_pipelines import PIPELINES
from octavo.core.loading.fields import Fields
from octavo.core.loading.gguf_header import StringArray
from octavo.core.loading.library_errors import refused_by_library
from octavo.core.loading.spm_merges import spm_merges
from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["build_tokenizer", "check_tokenizer"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KINDS = ("gpt2", "llama")
_SPACE = "▁"
# Files made before GGUF had eot_token_id name only the end of text; these control tokens end a turn in their families.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


def check_tokenizer(metadata: Mapping[str, Any], *, vocab_size: int, where: str) -> None:
    """Whether a tokenizer can be built, at the price of a look at the metadata.

    Raises `BrokenModel` for a missing or inconsistent one, `UnsupportedModel` for a kind or ``pre`` that Octavo doesn't know.
    """
    fields = Fields(metadata, where)
    if not fields.has("tokenizer.ggml.model"):
        raise BrokenModel(f"{where}: has no tokenizer (tokenizer.ggml.model)", hint="use a GGUF made with its tokenizer")
    kind = fields.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise UnsupportedModel(f"{where}: tokenizer kind {kind[:40]!r} isn't supported", hint=f"supported: {', '.join(_KINDS)}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        fields.broken("the tokenizer has no list of tokens")
    if len(tokens) != vocab_size:
        fields.broken(f"the tokenizer has {len(tokens)} tokens, the embedding {vocab_size} rows")
    _numbers(fields, "tokenizer.ggml.token_type", len(tokens), "iu", required=False)
    if kind == "llama":
        _numbers(fields, "tokenizer.ggml.scores", len(tokens), "f")
        if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
            raise UnsupportedModel(f"{where}: a tokenizer that removes extra whitespace isn't supported")
    else:
        if not isinstance(metadata.get("tokenizer.ggml.merges"), StringArray):
            fields.broken("the BPE tokenizer has no merges")
        pre = fields.text("tokenizer.ggml.pre", "default")
        if pre not in PIPELINES:
            raise UnsupportedModel(
                f"{where}: pre-tokenizer {pre[:40]!r} isn't known{nearest(pre, PIPELINES)}",
                hint=f"known: {', '.join(PIPELINES)}",
            )
    for key in ("bos", "eos", "eot", "eom"):
        fields.integer(f"tokenizer.ggml.{key}_token_id", 0, least=0, most=len(tokens) - 1)


def build_tokenizer(metadata: Mapping[str, Any], *, vocab_size: int, where: str, chat_template: str | None) -> Tokenizer:
    """The tokenizer. Raises what `check_tokenizer` raises, and `BrokenModel` for tokens or merges that make no tokenizer."""
    check_tokenizer(metadata, vocab_size=vocab_size, where=where)
    fields = Fields(metadata, where)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"].strings()
    types = _numbers(fields, "tokenizer.ggml.token_type", len(tokens), "iu", required=False)
    if types is None:
        types = np.full(len(tokens), _NORMAL, np.int32)
    byte_level = fields.text("tokenizer.ggml.model") == "gpt2"
    if not byte_level:
        tokens = _with_spaces_as_matched(fields, tokens, types)
    raw = _byte_level_bpe(fields, tokens) if byte_level else _sentencepiece_bpe(fields, tokens, types)
    controls = _add_whole_tokens(raw, tokens, types)
    bos = _special_id(fields, "bos")
    eos = end_tokens(fields, tokens, types)
    _add_ends(raw, fields, tokens, bos=bos, eos=eos[0] if eos else None, add_bos_default=not byte_level)
    return Tokenizer(raw, bos_token_id=bos, eos_token_ids=eos, special_ids=frozenset(controls), chat_template=chat_template)


def end_tokens(fields: Fields, tokens: list[str], types: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Every token that ends a turn or the text, the file's own EOS first."""
    ids = [_special_id(fields, key) for key in ("eos", "eot", "eom")]
    ids.extend(index for index in np.flatnonzero(types == _CONTROL).tolist() if tokens[index] in _TURN_ENDS)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _special_id(fields: Fields, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    return fields.integer(name, least=0) if fields.has(name) else None


def _numbers(fields: Fields, key: str, count: int, kinds: str, *, required: bool = True) -> np.ndarray[Any, Any] | None:
    """An array of one number a token."""
    values = fields.values.get(key)
    if values is None and not required:
        return None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or len(values) != count:
        fields.broken(f"{key!r} must hold {count} numbers, one a token")
    return values


def _byte_level_bpe(fields: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    pipeline = PIPELINES[fields.text("tokenizer.ggml.pre", "default")]
    merges = [tuple(merge.split(" ", 1)) for merge in fields.values["tokenizer.ggml.merges"].strings()]
    if any(len(merge) != 2 for merge in merges):
        fields.broken("a merge isn't two tokens with a space between them")
    raw = _tokenizer(fields, tokens, merges, ignore_merges=pipeline.ignore_merges)
    if pipeline.normalizer is not None:
        raw.normalizer = pipeline.normalizer()
    raw.pre_tokenizer = pipeline.pre_tokenizer()
    raw.decoder = decoders.ByteLevel()
    return raw


def _sentencepiece_bpe(fields: Fields, tokens: list[str], types: np.ndarray[Any, Any]) -> tokenizers.Tokenizer:
    scores = _numbers(fields, "tokenizer.ggml.scores", len(tokens), "f")
    assert scores is not None
    if np.isnan(scores).any():
        fields.broken("a token's score is not a number")
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0, least=0, most=len(tokens) - 1)
    raw = _tokenizer(
        fields,
        tokens,
        spm_merges(tokens, scores, np.isin(types, (_NORMAL, _UNUSED))),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=bool((types == _BYTE).any()),
    )
    prefix = fields.boolean("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return raw


def _tokenizer(fields: Fields, tokens: list[str], merges: list[Any], **options: Any) -> tokenizers.Tokenizer:
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        fields.broken("the tokenizer has a token twice")
    with refused_by_library(f"{fields.where}: the tokenizer's merges don't fit its tokens"):
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def _with_spaces_as_matched(fields: Fields, tokens: list[str], types: np.ndarray[Any, Any]) -> list[str]:
    """User-defined tokens with their spaces written as the text has them when it is searched for them.

    SentencePiece searches the normalised text, where a space is "▁". So do we, unless every text gets a "▁" in front: the
    library would put one before the token too. Files spell such tokens either way.
    """
    old, new = (_SPACE, " ") if fields.boolean("tokenizer.ggml.add_space_prefix", True) else (" ", _SPACE)
    tokens = list(tokens)
    for index in np.flatnonzero(types == _USER_DEFINED).tolist():
        tokens[index] = tokens[index].replace(old, new)
    return tokens


def _add_whole_tokens(raw: tokenizers.Tokenizer, tokens: list[str], types: np.ndarray[Any, Any]) -> list[int]:
    """Makes control and user-defined tokens match whole, before anything is cut. Returns the ids of the control tokens."""
    controls = np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist()
    raw.add_special_tokens([AddedToken(tokens[index], normalized=False, special=True) for index in controls if tokens[index]])
    users = np.flatnonzero(types == _USER_DEFINED).tolist()
    raw.add_tokens([AddedToken(text, normalized=_SPACE in text) for index in users if (text := tokens[index])])
    return controls


def _add_ends(
    raw: tokenizers.Tokenizer, fields: Fields, tokens: list[str], *, bos: int | None, eos: int | None, add_bos_default: bool
) -> None:
    """BOS and EOS around every text, as the file's flags say."""
    ends: list[list[tuple[str, int]]] = [[], []]
    if bos is not None and fields.boolean("tokenizer.ggml.add_bos_token", add_bos_default):
        ends[0].append((tokens[bos], bos))
    if eos is not None and fields.boolean("tokenizer.ggml.add_eos_token", False):
        ends[1].append((tokens[eos], eos))
    if not any(ends):
        return
    raw.post_processor = processors.TemplateProcessing(
        single=[*(name for name, _ in ends[0]), "$A", *(name for name, _ in ends[1])],
        special_tokens=[pair for end in ends for pair in end],
    )
