"""Keys of the prefix cache: ``H(parent ‖ tokens as little-endian int32 ‖ canonical msgpack of the extra keys)``, one a full
block.

SHA-256 comes from the compiled `_chain` where the processor has instructions for it, from hashlib everywhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash

from octavo.core.api.errors import UsageError
from octavo.core.api.scheduling import IntArray

try:
    from octavo.core.kv_cache import _chain
except ImportError:  # installed without a C compiler
    _chain = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class BlockHash:
    """Two functions that make the keys of blocks of ``stride`` bytes each.

    ``chain(parent, data, stride, extra)``: of the whole blocks in ``data``, each the parent of the next. ``each(parents, data,
    stride, extras)``: of every block in ``data``, under a parent and extra keys of its own.
    """

    chain: Callable[[bytes, bytes, int, bytes], list[bytes]]
    each: Callable[[list[bytes], bytes, int, list[bytes]], list[bytes]]


def block_hash(digest_of: Callable[[bytes], bytes]) -> BlockHash:
    """A `BlockHash` from a function that gives the digest of one message."""

    def chain(parent: bytes, data: bytes, stride: int, extra: bytes) -> list[bytes]:
        keys = []
        for at in range(0, len(data) // stride * stride, stride):
            parent = digest_of(parent + data[at : at + stride] + extra)
            keys.append(parent)
        return keys

    def each(parents: list[bytes], data: bytes, stride: int, extras: list[bytes]) -> list[bytes]:
        rows = enumerate(zip(parents, extras, strict=True))
        return [digest_of(parent + data[i * stride : (i + 1) * stride] + extra) for i, (parent, extra) in rows]

    return BlockHash(chain, each)


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


PYTHON_SHA256 = block_hash(_sha256)
COMPILED_SHA256 = BlockHash(_chain.chain, _chain.each) if _chain is not None and _chain.supported() else None
ALGORITHMS: Mapping[str, BlockHash] = {
    "sha256": COMPILED_SHA256 or PYTHON_SHA256,
    "xxh3": block_hash(xxhash.xxh3_128_digest),
}
"""``xxh3`` is the faster one where SHA-256 isn't compiled, but equal keys can be made on purpose: only where all requests are
trusted."""

ROOT = b"octavo prefix cache, first block"
_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")


def encode_extra(cache_salt: str | None, extra_keys: Any) -> bytes:
    """The extra keys as they are hashed into every block: empty when there are none. Raises `UsageError` if not encodable."""
    if cache_salt is None and extra_keys is None:
        return b""
    try:
        _check_plain(extra_keys)
        return _CANONICAL.encode((cache_salt, extra_keys))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"extra_keys must be plain data that msgpack can carry: {error}") from error


def _check_plain(value: Any) -> None:
    """msgspec also encodes objects, as what has other keys: a decimal as text, a dataclass as a map."""
    if isinstance(value, Mapping):
        for part in (*value.keys(), *value.values()):
            _check_plain(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_plain(part)
    elif type(value) not in (type(None), bool, int, float, str, bytes):
        raise TypeError(f"{type(value).__name__} isn't")


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
        data = tokens[len(chain) * self.block_size :].astype("<i4", copy=False).tobytes()
        chain += self._hash.chain(chain[-1] if chain else ROOT, data, 4 * self.block_size, extra)

    def next_keys(
        self, prefixes: Sequence[Prefix], number: int, slots: IntArray, columns: IntArray, tokens: IntArray
    ) -> list[bytes]:
        """The key of block ``columns[i]`` of the sequence in row ``slots[i]`` of ``tokens``, appended to chain ``number`` of
        ``prefixes[i]`` if it isn't there; the blocks before it must be. All blocks' tokens are gathered at once.
        """
        chains = [prefix.chains[number] for prefix in prefixes]
        wanted = columns.tolist()
        lacking = [i for i, (chain, column) in enumerate(zip(chains, wanted, strict=True)) if len(chain) == column]
        if lacking:
            data = self._blocks(tokens, slots[lacking], columns[lacking]).astype("<i4", copy=False).tobytes()
            above = [chains[i][-1] if chains[i] else ROOT for i in lacking]
            keys = self._hash.each(above, data, 4 * self.block_size, [prefixes[i].extra for i in lacking])
            for i, key in zip(lacking, keys, strict=True):
                chains[i].append(key)
        return [chain[column] for chain, column in zip(chains, wanted, strict=True)]

    def _blocks(self, tokens: IntArray, slots: IntArray, columns: IntArray) -> IntArray:
        """[n, block_size]: the tokens of these blocks."""
        size, width = self.block_size, tokens.shape[1]
        blocks: IntArray
        if width % size == 0:
            blocks = tokens.reshape(-1, width // size, size)[slots, columns]
        else:
            blocks = tokens[slots[:, None], (columns * size)[:, None] + np.arange(size, dtype=np.int32)]
        return blocks
