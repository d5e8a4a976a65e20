"""How a step's tokens are shared among rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.scheduling.grants import share_budget


def share(
    wanted: list[int], budget: int, *, starts: list[int] | None = None, decode_query_len: int = 1, **options
) -> list[int]:
    where = np.array(starts or [0] * len(wanted), np.int32)
    granted = share_budget(np.array(wanted, np.int32), where, budget=budget, decode_query_len=decode_query_len, **options)
    return granted.tolist()


@pytest.mark.parametrize(
    ("wanted", "budget", "options", "granted"),
    [
        ([1, 20, 1, 5], 100, {}, [1, 20, 1, 5]),
        ([1, 20, 1, 5], 10, {}, [1, 8, 1, 0]),  # decodes first, then prompts in order
        ([30, 1, 1, 1], 2, {}, [0, 1, 1, 0]),
        ([3, 20, 3], 8, {"decode_query_len": 3}, [3, 2, 3]),
        ([3, 3, 20, 3], 5, {"decode_query_len": 3}, [3, 1, 0, 1]),  # every row's own token before any guess
        ([3, 9, 2], 4, {"decode_query_len": 3, "chunked": False}, [3, 0, 1]),
        ([20, 20, 1], 100, {"long_prefill_token_threshold": 6}, [6, 6, 1]),
        ([20, 20, 1], 10, {"long_prefill_token_threshold": 6}, [6, 3, 1]),
        ([9, 4, 1], 6, {"chunked": False}, [0, 4, 1]),  # whole or not at all
        ([9, 4, 1], 6, {"chunked": False, "long_prefill_token_threshold": 2}, [0, 4, 1]),
        ([20, 20], 100, {"edges": [8], "starts": [0, 5]}, [8, 3]),
        ([20, 20], 10, {"edges": [8, 12], "starts": [10, 0]}, [2, 8]),
        ([0, 0], 5, {}, [0, 0]),
    ],
)
def test_shares(wanted, budget, options, granted) -> None:
    assert share(wanted, budget, **options) == granted


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 60), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_no_more_than_wanted_and_no_more_than_there_is(wanted, budget, decode_query_len, cap, chunked) -> None:
    options = {"decode_query_len": decode_query_len, "long_prefill_token_threshold": cap, "chunked": chunked}
    granted = share(wanted, budget, **options)
    assert sum(granted) <= budget
    assert all(0 <= got <= want for got, want in zip(granted, wanted, strict=True))
    if chunked and not cap:
        assert sum(granted) == min(budget, sum(wanted))  # nothing is left unused
    decodes = [(want, got) for want, got in zip(wanted, granted, strict=True) if want <= decode_query_len]
    if sum(want > 0 for want, _ in decodes) <= budget:
        assert all(got > 0 for want, got in decodes if want)
    if sum(want for want, _ in decodes) <= budget:
        assert all(want == got for want, got in decodes)
