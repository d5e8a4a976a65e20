"""Token ids → text, one token at a time, never half a character.

Both kinds of tokenizer are brought to one form: every token is a piece of a UTF-8 byte string. In a byte-level vocabulary a
piece is written in 256 stand-in characters, one a byte; in a SentencePiece vocabulary the pieces are text, and what has no
piece is spelled in byte tokens, ``<0x00>`` … ``<0xFF>``. An incremental UTF-8 decoder then gives out characters as they become
complete. Bytes that aren't UTF-8 become U+FFFD, one for each maximal invalid sequence, as Unicode recommends.

A completion continues a text. So its first token has the form that it has inside one, where SentencePiece shows the space
before a word: the prompt's text and the completion's put together are the text of all their tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["Detokenizer", "TokenBytes"]

_ANCHORS = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _byte_level_alphabet() -> dict[str, int]:
    """Stand-in character → byte, as GPT-2's vocabulary writes them.

    Bytes that Latin-1 prints (no space among them) stand for themselves; the others, in order, are U+0100 and up.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(sorted(set(range(256)) - set(plain)))})
    return alphabet


class TokenBytes:
    """The bytes of each token of one tokenizer, found when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._raw = tokenizer.raw
        self._byte_level = "ByteLevel(" in repr(self._raw.decoder)
        self._alphabet = _byte_level_alphabet() if self._byte_level else {}
        self._byte_tokens = {} if self._byte_level else self._find_byte_tokens()
        self._anchor = None if self._byte_level else self._find_anchor()
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(tokenizer.special_ids)

    def __call__(self, token_id: int) -> bytes:
        """The piece's bytes; empty for an id that the tokenizer doesn't know (models pad their vocabulary)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find(token_id)
        return found

    def first(self, token_id: int) -> bytes:
        """The piece's bytes at the start of a text, where some tokenizers drop the space that joins words."""
        if self._byte_level or self._byte_tokens.get(token_id, 0) >= 0x80:  # a part of a character
            return self(token_id)
        return self._raw.decode([token_id], skip_special_tokens=False).encode()

    def as_written(self, token_id: int) -> bytes:
        """The piece itself, without what a decoder puts around it."""
        return (self._raw.id_to_token(token_id) or "").encode()

    def text(self, token_id: int) -> str:
        """The token on its own, for reports; U+FFFD where it is part of a character."""
        return self(token_id).decode(errors="replace")

    def join(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens left out; ids that the tokenizer doesn't know have none."""
        detokenizer = Detokenizer(self, at_start=True)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def _find(self, token_id: int) -> bytes:
        piece = self._raw.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            try:
                return bytes(self._alphabet[char] for char in piece)
            except KeyError:  # an added token, kept as it is written
                return piece.encode()
        if token_id in self._byte_tokens:
            return bytes([self._byte_tokens[token_id]])
        if self._raw.decoder is None:  # the library then puts spaces between tokens
            return f" {piece}".encode()
        if self._anchor is None:
            return self._raw.decode([token_id], skip_special_tokens=False).encode()
        return self._raw.decode([self._anchor, token_id], skip_special_tokens=False)[1:].encode()

    def _find_byte_tokens(self) -> dict[int, int]:
        ids = {self._raw.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token_id: byte for token_id, byte in ids.items() if token_id is not None}

    def _find_anchor(self) -> int | None:
        """A token of one plain character: what follows it is not at the start of a text."""
        for char in _ANCHORS:
            token_id: int | None = self._raw.token_to_id(char)
            if token_id is not None:
                return token_id
        return None


class Detokenizer:
    """One completion's text as it grows; with ``at_start``, a text that continues no other.

    ``spaces_between_special_tokens`` False drops the space that some decoders (of whole words) put between two special tokens.
    """

    def __init__(
        self,
        pieces: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        at_start: bool = False,
    ) -> None:
        self._pieces = pieces
        self._skipped = pieces.special_ids if skip_special_tokens else frozenset()
        self._bare = frozenset() if spaces_between_special_tokens else pieces.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = at_start
        self._last_id: int | None = None

    def push(self, token_id: int) -> str:
        """The characters that this token completes; ``""`` when there are none yet."""
        if token_id in self._skipped:
            return ""
        piece = self._pieces(token_id)
        if self._at_start and piece:
            self._at_start = False
            piece = self._pieces.first(token_id)
        if token_id in self._bare and self._last_id in self._bare:
            piece = self._pieces.as_written(token_id)
        self._last_id = token_id
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left at the end of the text: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)
