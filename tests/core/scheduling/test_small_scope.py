"""Every interleaving within a small scope: at most four requests and six blocks. No deadlock, no livelock, no breach."""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
from collections.abc import Callable, Iterator, Mapping

import pytest
from harness import Harness, full_group, make_request

from octavo.core.api.errors import UsageError
from octavo.core.api.kv_cache import KVGroupInfo, SlidingWindow
from octavo.core.api.scheduling import SchedulingPolicy
from octavo.core.kv_cache import hashing
from octavo.core.scheduling import FirstComeFirstServed, Priority

SHA256_NAME = "COMPILED_SHA256" if hashing.COMPILED_SHA256 else "PYTHON_SHA256"  # in hashing
PROMPTS = ([1, 2], [1, 2, 3], [1, 2, 3, 1], [4])


def fingerprint(harness: Harness) -> tuple[object, ...]:
    """What the future depends on: two states with equal ones behave alike (up to block numbers' history in the free list)."""
    roster, kv = harness.scheduler._roster, harness.kv
    arrays = roster.arrays
    states = [
        (
            key,
            state.status.name,
            state.slot,
            state.num_tokens,
            state.num_planned_tokens,
            state.num_computed_tokens,
            state.stepped_back_at,
        )
        for request_id, states in sorted(harness.scheduler._requests.items())
        for state in states.values()
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
        harness.scheduler._admission._stuck,
    )


def actions(harness: Harness, max_requests: int) -> Iterator[tuple[str, str]]:
    yield "plan", ""
    if harness.plans:
        yield "finish_step", ""
    if len(harness.requests) < max_requests:
        yield "add", str(len(harness.requests))
    for request_id in harness.requests:
        if request_id in harness.scheduler._requests and request_id == "1":  # one that may be aborted at any moment
            yield "abort", request_id


class _Pickler(pickle.Pickler):
    """Copies a harness several times as fast as `copy.deepcopy`."""

    dispatch_table = copyreg.dispatch_table | {hashing.BlockHash: lambda _: SHA256_NAME}


def freeze(harness: Harness) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(harness)
    return buffer.getvalue()


def explore(make: Callable[[], Harness], max_requests: int) -> tuple[int, int]:
    """All interleavings of arrivals, plans, results and one abort. (states seen, longest way to the end)

    From every state, planning where something can be planned and taking in a result where not leads to the end.
    """
    start = make()
    begin = hash(fingerprint(start))
    frontier = [(begin, freeze(start))]
    seen, onward = {begin}, {}
    while frontier:
        key, frozen = frontier.pop()
        harness: Harness = pickle.loads(frozen)
        if ended := not harness.scheduler.has_unfinished():
            harness.check_outputs()
            harness.check_idle()
        for name, argument in list(actions(harness, max_requests)):
            following: Harness = pickle.loads(frozen)
            goes_on = act(following, name, argument)
            following.check_invariants()
            next_key = hash(fingerprint(following))
            if next_key not in seen:
                seen.add(next_key)
                frontier.append((next_key, freeze(following)))
            if goes_on and not ended:
                onward.setdefault(key, next_key)
        assert ended or key in onward, "unfinished requests, nothing planned and nothing in flight: a deadlock"
    return len(seen), max(map(steps_to_the_end(onward), seen))


def steps_to_the_end(onward: Mapping[int, int]) -> Callable[[int], int]:
    """How many plans and results a state is away from the end."""
    known: dict[int, int] = {}

    def steps(key: int) -> int:
        path = []
        while key in onward and key not in known:
            path.append(key)
            key = onward[key]
            assert len(path) <= len(onward), "a circle of steps: a livelock"
        known.update({earlier: count for count, earlier in enumerate(reversed(path), known.get(key, 0) + 1)})
        return known.get(path[0] if path else key, 0)

    return steps


def act(harness: Harness, name: str, argument: str) -> bool:
    """Whether a step was planned or a result taken in."""
    if name == "plan":
        return harness.plan()
    if name == "finish_step":
        return harness.finish_step() is not None
    if name == "abort":
        harness.abort(argument)
        return False
    number = int(argument)
    request = make_request(argument, PROMPTS[number], max_tokens=3 + number % 2, n=1 + (number == 2), priority=-number)
    with contextlib.suppress(UsageError):  # it can never fit: refused
        harness.add(request)
    return False


def configuration(
    groups: list[KVGroupInfo], max_in_flight: int, policy: type[SchedulingPolicy] = Priority
) -> Callable[[], Harness]:
    def make() -> Harness:
        return Harness(groups, max_num_seqs=2, max_model_len=10, token_budget=3, max_in_flight=max_in_flight, policy=policy())

    return make


def window_group(num_blocks: int, block_size: int) -> KVGroupInfo:
    return KVGroupInfo(spec=SlidingWindow(block_size=block_size, bytes_per_block=1, window=2), num_blocks=num_blocks, pool_id=0)


def test_no_interleaving_of_two_requests_gets_stuck() -> None:
    states, longest = explore(configuration([full_group(4, 2)], 1), max_requests=2)
    print(f"{states} states, at most {longest} steps to the end")
    assert states > 40


FULL_AND_WINDOW = [full_group(7, 2), window_group(7, 2)]


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("groups", "policy"),
    [
        ([full_group(4, 2)], Priority),
        ([full_group(5, 2)], Priority),
        ([full_group(5, 2)], FirstComeFirstServed),
        ([full_group(7, 1)], Priority),
        ([full_group(7, 2)], Priority),
        (FULL_AND_WINDOW, Priority),
    ],
)
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_no_interleaving_of_four_requests_gets_stuck(
    groups: list[KVGroupInfo], policy: type[SchedulingPolicy], max_in_flight: int
) -> None:
    """With 3, 4 and 6 blocks; the last groups share a pool."""
    states, longest = explore(configuration(groups, max_in_flight, policy), max_requests=4)
    print(f"{states} states, at most {longest} steps to the end")
    assert states > 500
