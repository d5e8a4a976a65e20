"""Keys of the prefix cache, against the formula written out with hashlib."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import msgspec
import numpy as np
import pytest
import xxhash

from octavo.core.api.errors import UsageError
from octavo.core.kv_cache.hashing import ROOT, BlockHash, Prefix, PrefixHasher, encode_extra

TOKENS = np.arange(100, 147, dtype=np.int32)  # 47 tokens


def chain_of(tokens: list[int], size: int, extra: bytes, hash_of=lambda data: hashlib.sha256(data).digest()) -> list[bytes]:
    keys, parent = [], ROOT
    for begin in range(0, len(tokens) // size * size, size):
        data = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens[begin : begin + size])
        parent = hash_of(parent + data + extra)
        keys.append(parent)
    return keys


@pytest.mark.parametrize("extra", [b"", b"tenant"])
def test_a_key_is_the_hash_of_its_parent_its_tokens_and_the_extra_keys(extra: bytes) -> None:
    chain: list[bytes] = []
    PrefixHasher(16).extend(chain, TOKENS, extra)
    assert chain == chain_of(TOKENS.tolist(), 16, extra)
    assert len(chain) == 2


def test_xxh3_is_a_choice() -> None:
    chain: list[bytes] = []
    PrefixHasher(8, "xxh3").extend(chain, TOKENS, b"")
    assert chain == chain_of(TOKENS.tolist(), 8, b"", lambda data: xxhash.xxh3_128(data).digest())


def test_an_unknown_hash_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="sha256, xxh3"):
        PrefixHasher(16, "md5")


def test_chains_grow_with_their_sequences() -> None:
    hasher, chain = PrefixHasher(4), []
    for end in (3, 4, 11, 11, 47):
        hasher.extend(chain, TOKENS[:end], b"x")
        assert chain == chain_of(TOKENS[:end].tolist(), 4, b"x")


@pytest.mark.parametrize("width", [48, 50])
def test_several_rows_are_hashed_at_once(width: int) -> None:
    tokens = np.arange(5 * width, dtype=np.int32).reshape(5, width)
    hasher = PrefixHasher(16)
    slots, columns = np.array([3, 1, 4], np.int32), np.array([0, 2, 1], np.int32)
    prefixes = []
    for slot, column in zip(slots.tolist(), columns.tolist(), strict=True):
        chain: list[bytes] = []
        hasher.extend(chain, tokens[slot, : 16 * column], b"e")
        prefixes.append(Prefix((chain,), b"e"))
    keys = hasher.next_keys(prefixes, 0, slots, columns, tokens)
    for slot, column, prefix, key in zip(slots.tolist(), columns.tolist(), prefixes, keys, strict=True):
        assert prefix.chains[0] == chain_of(tokens[slot, : 16 * (column + 1)].tolist(), 16, b"e")
        assert key == prefix.chains[0][-1]


def test_extra_keys_are_canonical_and_tell_tenants_apart() -> None:
    assert encode_extra(None, None) == b""
    assert encode_extra("a", {"x": 1, "y": [2]}) == encode_extra("a", {"y": [2], "x": 1})
    assert msgspec.msgpack.decode(encode_extra("a", {"x": 1})) == ["a", {"x": 1}]
    different = [encode_extra(*pair) for pair in ((None, None), ("a", None), (None, "a"), ("b", None), ("a", "a"))]
    assert len(set(different)) == len(different)


def _endless() -> list[object]:
    endless: list[object] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    "extra", [object(), Decimal("1"), np.float64(1), np.int32(1), dataclass(type("Plain", (), {}))(), {1}, 2**70, _endless()]
)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"image": x}, lambda x: [1, (x,)]])
def test_extra_keys_must_be_plain_data(extra: object, wrap: Callable[[object], object]) -> None:
    """What msgpack would say in the words of something else, or not at all: two keys must never be one by accident."""
    with pytest.raises(UsageError, match="plain data"):
        encode_extra(None, wrap(extra))


def test_keys_that_a_chain_has_already_are_not_made_again() -> None:
    tokens = np.arange(96, dtype=np.int32).reshape(2, 48)
    hasher, known, fresh = PrefixHasher(16), [], []
    hasher.extend(known, tokens[0], b"e")
    prefixes = [Prefix((known,), b"e"), Prefix((fresh,), b"e")]
    hashed = []
    make = hasher._hash.each
    hasher._hash = BlockHash(hasher._hash.chain, lambda parents, *rest: hashed.extend(parents) or make(parents, *rest))
    slots, columns = np.array([0, 1], np.int32), np.array([2, 0], np.int32)
    keys = hasher.next_keys(prefixes, 0, slots, columns, tokens)
    assert keys == [chain_of(tokens[0].tolist(), 16, b"e")[2], *chain_of(tokens[1, :16].tolist(), 16, b"e")]
    assert hashed == [ROOT], "only the second sequence lacks its key"
    assert (len(known), len(fresh)) == (3, 1)
