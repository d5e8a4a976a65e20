"""The compiled SHA-256 of blocks gives what hashlib gives, for parts of any size."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.kv_cache import hashing

_chain = pytest.importorskip("octavo.core.kv_cache._chain", reason="installed without a C compiler")
pytestmark = pytest.mark.skipif(not _chain.supported(), reason="this processor has no SHA instructions")

TWIN = hashing.PYTHON_SHA256
PARTS = st.binary(max_size=200)


def test_the_compiled_twin_is_the_one_in_use() -> None:
    assert hashing.ALGORITHMS["sha256"] is hashing.COMPILED_SHA256 is not None


@pytest.mark.parametrize("size", [*range(1, 200), 255, 256, 1000, 4096])
def test_a_message_of_every_size_around_the_padding(size: int) -> None:
    data = bytes(range(256)) * 16
    assert _chain.chain(b"", data[:size], size, b"") == [hashlib.sha256(data[:size]).digest()]


@given(parent=PARTS, data=st.binary(max_size=600), stride=st.integers(1, 130), extra=PARTS)
def test_chains_are_equal(parent: bytes, data: bytes, stride: int, extra: bytes) -> None:
    assert _chain.chain(parent, data, stride, extra) == TWIN.chain(parent, data, stride, extra)


@given(rows=st.lists(st.tuples(PARTS, st.binary(min_size=130, max_size=130), PARTS), max_size=6), stride=st.integers(1, 130))
def test_single_blocks_are_equal(rows: list[tuple[bytes, bytes, bytes]], stride: int) -> None:
    parents, data, extras = [r[0] for r in rows], b"".join(r[1][:stride] for r in rows), [r[2] for r in rows]
    assert _chain.each(parents, data, stride, extras) == TWIN.each(parents, data, stride, extras)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: _chain.chain(b"", b"abc", 0, b""), ValueError),
        (lambda: _chain.chain(b"", b"abc", -4, b""), ValueError),
        (lambda: _chain.chain("text", b"abc", 1, b""), TypeError),
        (lambda: _chain.each([b""], b"abcd", 1, [b""]), ValueError),
        (lambda: _chain.each([b"", None], b"ab", 1, [b"", b""]), TypeError),
        (lambda: _chain.each([b"", b""], b"ab", 1, [b"", 7]), TypeError),
        (lambda: _chain.each((b"",), b"a", 1, [b""]), TypeError),
    ],
)
def test_a_wrong_argument_is_an_error(call, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
