"""A step's block copies all read what was there before the step, and a backend never sees a source that is a target too."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.core.api.kv_cache import NULL_BLOCK
from octavo.core.worker.caches import in_waves

NUM_BLOCKS = 8
BLOCKS = st.integers(1, NUM_BLOCKS - 1)


@example({2: 1, 3: 1})  # nothing overlaps: one wave
@example({3: 1, 1: 2})  # a block that is read and then given to somebody else
@example({1: 2, 2: 3, 3: 1, 4: 5, 5: 4, 6: 1})  # two rings, one of them with another reader
@settings(max_examples=300)
@given(st.dictionaries(BLOCKS, BLOCKS))
def test_waves_do_what_all_copies_at_once_would(sources: dict[int, int]) -> None:
    pairs = np.array([(source, target) for target, source in sources.items()], np.int32).reshape(-1, 2)
    given_pairs, blocks = pairs.copy(), np.arange(NUM_BLOCKS)
    for wave in in_waves(pairs):
        assert len(wave)
        assert not np.isin(wave[:, 0], wave[:, 1]).any()
        blocks[wave[:, 1]] = blocks[wave[:, 0]]
    expected = [sources.get(block, block) for block in range(NUM_BLOCKS)]
    assert blocks[NULL_BLOCK + 1 :].tolist() == expected[1:]
    assert np.array_equal(pairs, given_pairs)


def test_copies_that_do_not_overlap_are_one_wave() -> None:
    pairs = np.array([[1, 2], [1, 3], [4, 5]], np.int32)
    assert [wave.tolist() for wave in in_waves(pairs)] == [pairs.tolist()]
