"""Every interleaving within a small scope: at most four requests and six blocks. No deadlock, no livelock, no breach."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from harness import Harness, full_group, make_request

from octavo.core.api.errors import UsageError
from octavo.core.scheduling import Priority

PROMPTS = ([1, 2], [1, 2, 3], [1, 2, 3, 1], [4])


def fingerprint(harness: Harness) -> tuple[object, ...]:
    """What the future depends on: two states with equal ones behave alike (up to block numbers' history in the free list)."""
    roster, kv = harness.scheduler._roster, harness.kv
    arrays = roster.arrays
    states = [
        (key, state.status.name, state.slot, state.num_tokens, state.num_planned_tokens, state.num_computed_tokens)
        for request_id, states in sorted(harness.scheduler._requests.items())
        for state in states
        for key in [(request_id, state.index)]
    ]
    tables = tuple(manager.table.tobytes() for manager in kv.managers)
    pool = kv.pools[0]
    return (
        tuple(states),
        tuple(roster.order.tolist()),
        tables,
        tuple(pool.free_blocks().tolist()),
        tuple(sorted(pool.indexes[0].items())),
        tuple((plan.step - harness.scheduler._flight.num_planned, tuple(slots)) for plan, slots in harness.plans),
        tuple(sorted(harness.finished)),
        arrays.ignored.tobytes(),
        roster.num_leaving,
    )


def actions(harness: Harness, waiting: int) -> Iterator[tuple[str, str]]:
    yield "plan", ""
    if harness.plans:
        yield "finish_step", ""
    if waiting < len(PROMPTS):
        yield "add", str(waiting)
    for request_id in harness.requests:
        if request_id in harness.scheduler._requests and request_id == "1":  # one that may be aborted at any moment
            yield "abort", request_id


def explore(make: object, max_requests: int) -> tuple[int, int]:
    """Breadth first over all interleavings of arrivals, plans, results and one abort. (states seen, longest way to the end)"""
    frontier = [make()]  # type: ignore[operator]
    seen: set[tuple[object, ...]] = set()
    longest = 0
    while frontier:
        harness = frontier.pop()
        if (key := fingerprint(harness)) in seen:
            continue
        seen.add(key)
        finishing = copy.deepcopy(harness)
        longest = max(longest, finishing.run(limit=200))  # from everywhere, everything ends: no deadlock, no livelock
        finishing.check_outputs()
        for name, argument in actions(harness, len(harness.requests)):
            if name == "add" and len(harness.requests) >= max_requests:
                continue
            following = copy.deepcopy(harness)
            if name == "add":
                number = int(argument)
                request = make_request(
                    argument, PROMPTS[number], max_tokens=3 + number % 2, n=1 + (number == 2), priority=-number
                )
                try:
                    following.add(request)
                except UsageError:
                    continue
            elif name == "abort":
                following.abort(argument)
            elif name == "plan":
                following.plan()
            else:
                following.finish_step()
            following.check_invariants()
            frontier.append(following)
    return len(seen), longest


def configurations(num_blocks: int, block_size: int, max_in_flight: int) -> object:
    def make() -> Harness:
        return Harness(
            [full_group(num_blocks + 1, block_size)],
            max_num_seqs=2,
            max_model_len=10,
            token_budget=3,
            max_in_flight=max_in_flight,
            policy=Priority(),
        )

    return make


def test_no_interleaving_of_two_requests_gets_stuck() -> None:
    states, longest = explore(configurations(3, 2, 1), max_requests=2)
    print(f"{states} states, at most {longest} steps to the end")
    assert states > 40


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(3, 2), (4, 2), (6, 1), (6, 2)])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_no_interleaving_of_four_requests_gets_stuck(num_blocks: int, block_size: int, max_in_flight: int) -> None:
    states, longest = explore(
        configurations(num_blocks, block_size, max_in_flight), max_requests=4 if max_in_flight == 1 else 3
    )
    print(f"{states} states, at most {longest} steps to the end")
    assert states > 100
