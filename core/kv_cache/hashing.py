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


class PrefixHasher:
    """Extends chains of keys, one block of ``block_size`` tokens at a time."""

    def __init__(self, block_size: int, algorithm: str = "sha256") -> None:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"unknown prefix hash {algorithm!r}; choose one of {', '.join(sorted(ALGORITHMS))}")
        self.block_size = block_size
        self._hash = ALGORITHMS[algorithm]

    def extend_rows(
        self, keys: Sequence[list[bytes]], slots: IntArray, num_blocks: IntArray, tokens: IntArray, extra: Sequence[bytes]
    ) -> None:
        """Extend each ``keys[i]`` to ``num_blocks[i]`` blocks of the sequence in row ``slots[i]`` of ``tokens``."""
        size = self.block_size
        have = np.fromiter(map(len, keys), np.int32, len(keys))
        single = np.flatnonzero(num_blocks - have == 1)
        if len(single):
            places = (have[single] * size)[:, None] + np.arange(size, dtype=np.int32)
            data = tokens[slots[single][:, None], places].astype("<i4", copy=False).tobytes()
            hash_of, stride = self._hash, 4 * size
            for k, i in enumerate(single.tolist()):
                chain = keys[i]
                parent = chain[-1] if chain else ROOT
                chain.append(hash_of(parent + data[k * stride : (k + 1) * stride] + extra[i]).digest())
        for i in np.flatnonzero(num_blocks - have > 1).tolist():
            self.extend(keys[i], tokens[slots[i], : int(num_blocks[i]) * size], extra[i])

    def extend(self, keys: list[bytes], tokens: IntArray, extra: bytes) -> None:
        """Append the keys of the full blocks in ``tokens`` (whole sequence, [n] int32) that ``keys`` lacks."""
        stride = 4 * self.block_size
        data = tokens[len(keys) * self.block_size :].astype("<i4", copy=False).tobytes()
        end = len(data) // stride * stride
        parent, hash_of = keys[-1] if keys else ROOT, self._hash
        if extra:
            for at in range(0, end, stride):
                parent = hash_of(parent + data[at : at + stride] + extra).digest()
                keys.append(parent)
        else:
            for at in range(0, end, stride):
                parent = hash_of(parent + data[at : at + stride]).digest()
                keys.append(parent)
