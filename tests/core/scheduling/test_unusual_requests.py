"""Requests of extreme kinds cost and break nothing for the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, full_group, make_request
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.api.errors import UsageError
from octavo.core.api.kv_cache import KVGroupInfo, RecurrentState
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import IntArray, Proposer, Request
from octavo.core.scheduling import Priority
from octavo.core.scheduling.state import STOP_COLUMNS


def request_of(**values: Any) -> Request:
    sampling = SamplingParams(temperature=0, **values.pop("sampling", {}))
    defaults = {"request_id": "r", "prompt_token_ids": np.array([1, 2, 3], np.int32), "max_tokens": 8}
    return Request(sampling=sampling, **{**defaults, **values})


def test_more_tokens_than_an_int32_counts_may_be_asked_for() -> None:
    harness = Harness([full_group(40)])
    harness.add(request_of(sampling={"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 2}, eos_token_ids=(1,)))
    harness.run()
    assert harness.finished["r", 0].reason == "length"


@given(
    lists=st.lists(st.lists(st.integers(0, 12), max_size=3 * STOP_COLUMNS), min_size=1, max_size=5),
    min_tokens=st.sampled_from([0, 3]),
)
def test_stop_lists_of_any_length_mean_the_same(lists: list[list[int]], min_tokens: int) -> None:
    harness = Harness([full_group(80)], max_num_seqs=3)
    for number, stop in enumerate(lists):
        harness.add(make_request(str(number), [number, 1], stop=tuple(stop), min_tokens=min_tokens, max_tokens=9))
    harness.run()
    harness.check_outputs()


def test_a_long_stop_list_leaves_nothing_behind() -> None:
    harness = Harness([full_group(80)], max_num_seqs=3)
    for number in range(5):
        harness.add(make_request(str(number), [number, 1], stop=tuple(range(2, 5000)), max_tokens=4))
    harness.run()
    arrays = harness.scheduler._arrays
    assert len(arrays.stop_ids) <= STOP_COLUMNS
    assert not arrays.stop_sets


class AlwaysGuesses(Proposer):
    name = "always"

    def propose(self, tokens: Any, num_speculative_tokens: int) -> list[IntArray]:
        return [np.zeros(num_speculative_tokens, np.int32) for _ in tokens]


def test_guesses_take_no_row_s_own_token_away() -> None:
    harness = Harness(
        [full_group(400)],
        max_num_seqs=12,
        token_budget=12,
        proposer=AlwaysGuesses(),
        num_speculative_tokens=8,
        max_model_len=64,
    )
    for number in range(12):
        harness.add(make_request(str(number), [number], max_tokens=30))
    for _ in range(60):
        harness.plan()
        harness.finish_step()
    lengths = [len(harness.tokens.get((str(number), 0), [])) for number in range(12)]
    assert min(lengths) >= 25, lengths
    harness.run()
    harness.check_outputs()


class Scribbler(Proposer):
    """Guesses in place."""

    name = "scribbler"

    def propose(self, tokens: Any, num_speculative_tokens: int) -> list[IntArray]:
        for sequence in tokens:
            sequence[0] = 9
        return [sequence[:0] for sequence in tokens]


def test_a_proposer_can_t_write_into_the_sequences() -> None:
    harness = Harness([full_group(40)], proposer=Scribbler())
    harness.add(make_request("a", [1, 2, 3]))
    with pytest.raises(ValueError, match="read-only"):
        harness.run()


def test_a_prompt_that_has_to_be_computed_whole_gets_its_turn() -> None:
    """Two kinds of state cut it at their edges, and requests of one token keep coming."""
    groups = [
        KVGroupInfo(spec=RecurrentState(block_size=size, bytes_per_block=1), num_blocks=400, pool_id=number)
        for number, size in enumerate((16, 24))
    ]
    harness = Harness(groups, max_num_seqs=128, max_model_len=80, token_budget=64, enable_chunked_prefill=False)
    for step in range(400):
        if step == 60:
            harness.add(make_request("long", list(range(1, 61)), max_tokens=2))
        while harness.scheduler.stats().num_waiting < 40:
            number = len(harness.requests)
            harness.add(make_request(str(number), [number % 50], max_tokens=20 + number % 10))
        harness.plan()
        harness.finish_step()
    assert ("long", 0) in harness.finished


@pytest.mark.parametrize("paused", [False, True])
def test_requests_that_end_while_they_wait_are_forgotten(paused: bool) -> None:
    harness = Harness([full_group(40)], max_num_seqs=1, policy=Priority())
    scheduler = harness.scheduler
    if paused:
        scheduler.pause()
    harness.add(make_request("first", [1], max_tokens=30))
    for number in range(2000):
        scheduler.add(make_request(str(number), [2], priority=5))
        scheduler.abort(str(number))
        if number % 100 == 0:
            harness.plan()
            harness.finish_step()
    assert len(scheduler._waiting._heap) < 200


def test_tokens_of_another_width_are_refused() -> None:
    harness = Harness([full_group(40)])
    with pytest.raises(UsageError, match="prompt_token_ids must be int32, not int64"):
        harness.add(request_of(prompt_token_ids=np.array([1, 2**40], np.int64)))


def test_many_completions_of_one_request_end_one_by_one() -> None:
    harness = Harness([full_group(2000)], max_num_seqs=50, token_budget=200, max_model_len=16)
    harness.add(make_request("many", [1, 2, 3], n=500, max_tokens=3))
    for index in range(200, 300):  # some of them before their prompt is computed
        harness.stop(("many", index))
    harness.run()
    assert len(harness.finished) == 500
    harness.check_outputs()
