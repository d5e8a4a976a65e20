"""Keys of the prefix cache: ``H(parent ‖ tokens as little-endian int32 ‖ canonical msgpack of the extra keys)``, one a full
block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from octavo.core.api.errors import UsageError
from octavo.core.api.scheduling import IntArray


class _Hash(Protocol):
    def digest(self) -> bytes: ...


ALGORITHMS: dict[str, Callable[[bytes], _Hash]] = {"sha256": hashlib.sha256, "xxh3": xxhash.xxh3_128}
"""``xxh3`` costs less than half of ``sha256``, but equal keys can be made on purpose: only where all requests are trusted."""

ROOT = b"octavo prefix cache, first block"
_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")


def encode_extra(cache_salt: str | None, extra_keys: Any) -> bytes:
    """The extra keys as they are hashed into every block: empty when there are none. Raises `UsageError` if not encodable."""
    if cache_salt is None and extra_keys is None:
        return b""
    try:
        return _CANONICAL.encode((cache_salt, extra_keys))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"extra_keys must be plain data that msgpack can carry: {error}") from error


class Prefix:
    """What a sequence is found by: the keys of its full blocks so far (a chain for each block size) and its extra keys."""

    __slots__ = ("chains", "extra")

    def __init__(self, chains: tuple[list[bytes], ...], extra: bytes) -> None:
        self.chains = chains
        self.extra = extra


class PrefixHasher:
    """Extends chains of keys, one block of ``block_size`` tokens at a time."""

    def __init__(self, block_size: int, algorithm: str = "sha256") -> None:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"unknown prefix hash {algorithm!r}; choose one of {', '.join(sorted(ALGORITHMS))}")
        self.block_size = block_size
        self._hash = ALGORITHMS[algorithm]

    def extend(self, chain: list[bytes], tokens: IntArray, extra: bytes) -> None:
        """Append the keys of the full blocks in ``tokens`` (the whole sequence, [n] int32) that ``chain`` lacks."""
        stride = 4 * self.block_size
        data = tokens[len(chain) * self.block_size :].astype("<i4", copy=False).tobytes()
        parent, hash_of, append = chain[-1] if chain else ROOT, self._hash, chain.append
        for at in range(0, len(data) // stride * stride, stride):
            parent = hash_of(parent + data[at : at + stride] + extra).digest()
            append(parent)

    def next_keys(
        self, prefixes: Sequence[Prefix], number: int, slots: IntArray, columns: IntArray, tokens: IntArray
    ) -> list[bytes]:
        """The key of block ``columns[i]`` of the sequence in row ``slots[i]`` of ``tokens``, appended to chain ``number`` of
        ``prefixes[i]`` if it isn't there; the blocks before it must be. All blocks' tokens are gathered at once.
        """
        data = self._blocks(tokens, slots, columns).astype("<i4", copy=False).tobytes()
        keys, hash_of, stride = [], self._hash, 4 * self.block_size
        at = 0
        for prefix, column in zip(prefixes, columns.tolist(), strict=True):
            chain = prefix.chains[number]
            if len(chain) == column:
                key = hash_of((chain[-1] if chain else ROOT) + data[at : at + stride] + prefix.extra).digest()
                chain.append(key)
            else:
                key = chain[column]
            keys.append(key)
            at += stride
        return keys

    def _blocks(self, tokens: IntArray, slots: IntArray, columns: IntArray) -> IntArray:
        """[n, block_size]: the tokens of these blocks."""
        size, width = self.block_size, tokens.shape[1]
        blocks: IntArray
        if width % size == 0:
            blocks = tokens.reshape(-1, width // size, size)[slots, columns]
        else:
            blocks = tokens[slots[:, None], (columns * size)[:, None] + np.arange(size, dtype=np.int32)]
        return blocks
