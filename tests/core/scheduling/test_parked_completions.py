"""Completions that wait for their next token to be chosen hold slots and blocks; they never keep others waiting for good."""

from __future__ import annotations

import pytest
from harness import Harness, full_group, make_request


def step_all(harness: Harness) -> None:
    """Steps, as an engine takes them, until every completion waits for its next token to be chosen."""
    while harness.plan() or harness.plans:
        harness.finish_step()


def test_what_waits_gets_the_blocks_of_parked_completions_when_nothing_else_runs() -> None:
    harness = Harness([full_group(1 + 4, block_size=2)], token_budget=16)
    harness.add(make_request("beams", [1, 2, 3], max_tokens=5, stepwise=True, ignore_eos=True))
    step_all(harness)
    for index in (100, 101, 102):
        harness.fork(("beams", 0), index, index % 7)
    harness.advance(("beams", 0))
    harness.add(make_request("other", [4, 5, 6], max_tokens=5))
    step_all(harness)
    assert ("other", 0) in harness.finished
    assert harness.awaiting == {("beams", index) for index in (0, 100, 101, 102)}  # each got its token
    assert harness.scheduler.stats().preemptions_total > 0
    harness.run()
    harness.check_outputs()


def test_more_forks_than_slots_all_go_on() -> None:
    harness = Harness([full_group(40)], max_num_seqs=2)
    harness.add(make_request("beams", [1, 2, 3], max_tokens=4, stepwise=True, ignore_eos=True))
    step_all(harness)
    for index in range(100, 105):
        harness.fork(("beams", 0), index, index % 7)
    harness.advance(("beams", 0))
    step_all(harness)
    assert len(harness.awaiting) == 6
    harness.run()


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_an_index_may_be_used_again_after_its_completion_ended_while_it_waited(max_num_seqs: int) -> None:
    harness = Harness([full_group(40)], max_num_seqs=max_num_seqs)
    scheduler = harness.scheduler
    harness.add(make_request("beams", [1, 2, 3], max_tokens=4, stepwise=True, ignore_eos=True))
    step_all(harness)
    for token in (4, 5, 6):
        scheduler.fork("beams", 0, new_index=7, token_id=token)
        scheduler.finish("beams", 7, reason="stop")
    harness.fork(("beams", 0), 7, 5)
    step_all(harness)
    assert ("beams", 7) in harness.awaiting
