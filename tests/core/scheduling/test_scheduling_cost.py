"""What a step costs: printed, and asserted at twice the bound (the machine may be busy)."""

from __future__ import annotations

import cProfile

import pytest
from replay import Replay

from octavo.core.cli.bench_scheduler import measure

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1200)]

# Bounds of a tenth of what the incumbent took on a quiet machine of this kind: 12 µs a request and step, 212 µs an addition.
PER_REQUEST_US, ADD_US = 1.2, 53.0


def test_a_request_and_step_costs_a_tenth_of_the_incumbents() -> None:
    for running in (256, 1024):
        row = min((measure(running) for _ in range(3)), key=lambda row: row.per_request_us)
        print(row)
        assert row.per_request_us <= 2 * PER_REQUEST_US
        assert row.add_us <= 2 * ADD_US


def test_cost_grows_flatly_with_the_number_of_requests() -> None:
    few = min(measure(1024).per_request_us for _ in range(3))
    many = min(measure(8192, steps=60).per_request_us for _ in range(2))
    print(f"{few:.3f} µs a request and step with 1,024 running, {many:.3f} µs with 8,192 (bound 1.3 times)")
    assert many <= 2 * 1.3 * few


def test_a_steady_step_calls_python_a_fixed_number_of_times() -> None:
    """However many requests decode: counted, not timed."""
    counts = [_calls_in_a_quiet_step(running) for running in (16, 1024)]
    print(f"{counts} function calls in a schedule() and update() without events")
    assert counts[0] == counts[1]


def _calls_in_a_quiet_step(running: int) -> int:
    replay = Replay(running * 4 + 10, max_num_seqs=running, token_budget=8 * running)
    for number in range(running):
        replay.add(str(number), [number, 7, 9], [5] * 12)
    scheduler, fewest = replay.scheduler, 1 << 30
    for _ in range(10):
        profile = cProfile.Profile()
        profile.enable()
        plan = scheduler.schedule()
        profile.disable()
        assert plan is not None
        replay.rows = replay.rows if plan.rows is None else plan.rows
        result = replay.result(plan.step)
        profile.enable()
        scheduler.update(result)
        profile.disable()
        fewest = min(fewest, sum(entry.callcount for entry in profile.getstats()))
    return fewest
