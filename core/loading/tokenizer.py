"""`Tokenizer`: text to token ids and back, with special tokens and the chat template. One class for every kind of file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from octavo.core.api.errors import UsageError
from octavo.core.loading.chat_template import ChatTemplate

__all__ = ["Tokenizer"]


class Tokenizer:
    """A fast tokenizer with what the model's files say around it.

    ``raw`` is the `tokenizers.Tokenizer`; ``special_ids`` are the control tokens that `decode` leaves out by default.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        special_ids: frozenset[int],
        chat_template: str | None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``variables`` are further special tokens that the chat template may name (``pad_token``, …)."""
        self.raw = raw
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_ids = special_ids
        self.chat_template = chat_template
        self._variables = dict(variables or {})

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.raw.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens in it are recognised whole; BOS and EOS are added where the file says so."""
        try:
            ids: list[int] = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            if not isinstance(text, str):
                raise
            # The library takes a string that has no UTF-8 form for something that isn't a string.
            raise UsageError("the text holds a lone surrogate, which is no Unicode character", hint="remove it") from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that form no whole character become U+FFFD. Raises `UsageError` for an unknown id."""
        ids = list(ids)
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise UsageError(f"token ids must lie between 0 and {self.vocab_size - 1}")
        if not self._byte_values.keys().isdisjoint(ids):
            return self._decode_bytes(ids, skip_special_tokens)
        return str(self.raw.decode(ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """The vocabulary's entry for an id. Raises `UsageError` when there is none."""
        text = self.raw.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if text is None:
            raise UsageError(f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens")
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt of a conversation: ``[{"role": "user", "content": "…"}, …]``.

        ``extra`` reaches the template as variables (``tools``, ``enable_thinking``, …). Raises `UsageError` when the model has
        no template or the template refuses the messages, `BrokenModel` when the template itself is wrong.
        """
        if self.chat_template is None:
            raise UsageError("this model has no chat template", hint="give it a plain prompt (--raw)")
        variables = {**self._token_variables, **extra}
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    @cached_property
    def _byte_values(self) -> Mapping[int, int]:
        """Token id → byte, of a vocabulary that spells unknown characters as bytes (``<0xE2>``)."""
        if self.raw.decoder is None or b"ByteFallback" not in self.raw.decoder.__getstate__():
            return {}
        found = {self.raw.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token_id: byte for token_id, byte in found.items() if token_id is not None}

    def _decode_bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As the library decodes, but a run of bytes that ends in half a character keeps its whole ones."""
        texts: list[str] = []
        run = bytearray()
        for token_id in ids:
            if token_id in self._byte_values:
                run.append(self._byte_values[token_id])
            elif not (skip_special_tokens and token_id in self.special_ids):
                texts += [run.decode(errors="replace"), self.token(token_id)] if run else [self.token(token_id)]
                run.clear()
        return str(self.raw.decoder.decode([*texts, run.decode(errors="replace")] if run else texts))

    @cached_property
    def _template(self) -> ChatTemplate:
        assert self.chat_template is not None
        return ChatTemplate(self.chat_template)

    @cached_property
    def _token_variables(self) -> dict[str, str]:
        named = dict(self._variables)
        for key, ids in (("bos_token", (self.bos_token_id,)), ("eos_token", self.eos_token_ids)):
            known = [token_id for token_id in ids if token_id is not None and token_id < self.vocab_size]
            if known:  # a model's files may name ids that its tokenizer doesn't have
                named.setdefault(key, self.token(known[0]))
        return named
