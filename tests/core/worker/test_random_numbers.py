from __future__ import annotations

import numpy as np
import pytest

from octavo.core.api.sampling import SamplingParams
from octavo.core.worker.random_numbers import philox, request_seed, uniforms

# Known answers that the authors of Philox publish with their library (philox4x32-10).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_its_authors_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    found = philox(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert found.tolist() == [expected]


def _one(seed: int, index: int, position: int) -> float:
    return float(uniforms(np.array([seed], np.uint64), np.array([index], np.int32), np.array([position], np.int32))[0])


def test_a_number_depends_on_its_own_row_only() -> None:
    seeds = np.array([1, 2**63 + 5, 1, 1], np.uint64)
    indices, positions = np.array([0, 3, 1, 0], np.int32), np.array([4, 4, 4, 5], np.int32)
    together = uniforms(seeds, indices, positions)
    alone = [
        _one(int(seed), int(index), int(position)) for seed, index, position in zip(seeds, indices, positions, strict=True)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) == 4, "seed, index and position each make a difference"


def test_numbers_fill_the_unit_interval_evenly() -> None:
    count = 20000
    numbers = uniforms(np.full(count, 9, np.uint64), np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    observed = np.histogram(numbers, bins=20, range=(0, 1))[0]
    statistic = float(((observed - count / 20) ** 2 / (count / 20)).sum())
    assert statistic < 43.8, f"chi-square with 19 degrees of freedom at 0.1 %: {statistic}"


def test_a_request_without_a_seed_takes_one_from_the_engine_and_its_id() -> None:
    unseeded = SamplingParams()
    assert request_seed(unseeded, "a", 0) == request_seed(unseeded, "a", 0)
    assert len({request_seed(unseeded, name, seed) for name in ("a", "b") for seed in (0, 1, -1)}) == 6
    assert request_seed(SamplingParams(seed=7), "a", 0) == request_seed(SamplingParams(seed=7), "b", 1) == 7
    assert request_seed(SamplingParams(seed=-1), "a", 0) == 2**64 - 1
