"""Random numbers that depend on nothing but (seed, completion index, position): the same in any batch and on any platform.

The generator is Philox4x32-10, counter-based (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), in NumPy on the host. One uniform number a sampled token is enough: tokens are drawn by inverting the cumulative
distribution.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import IntArray

__all__ = ["philox", "request_seed", "uniforms"]

UInt32Array: TypeAlias = NDArray[np.uint32]

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Philox4x32-10 of each row: ``counter`` [n, 4], ``key`` [n, 2] → [n, 4], all uint32."""
    c0, c1, c2, c3 = (column.astype(np.uint64) for column in counter.T)
    k0, k1 = (column.astype(np.uint64) for column in key.T)
    for round_number in range(_ROUNDS):
        bump0 = np.uint64(_WEYL[0] * round_number & 0xFFFFFFFF)
        bump1 = np.uint64(_WEYL[1] * round_number & 0xFFFFFFFF)
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> _SHIFT) ^ c1 ^ ((k0 + bump0) & _LOW), (product0 >> _SHIFT) ^ c3 ^ ((k1 + bump1) & _LOW)
        c1, c3 = product1 & _LOW, product0 & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seeds: NDArray[np.uint64], indices: IntArray, positions: IntArray) -> NDArray[np.float32]:
    """A number in [0, 1) for each row [n], in steps of 2⁻²⁴: of the request's ``seeds``, its index and the token's position."""
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0] = positions
    counter[:, 1] = indices
    key = np.stack([seeds & _LOW, seeds >> _SHIFT], axis=1).astype(np.uint32)
    words = philox(counter, key)[:, 0]
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def request_seed(sampling: SamplingParams, request_id: str, engine_seed: int) -> int:
    """The request's 64-bit seed: its own, or one derived from the engine's seed and the request's id."""
    if sampling.seed is not None:
        return sampling.seed & (2**64 - 1)
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, key=(engine_seed & (2**64 - 1)).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")
