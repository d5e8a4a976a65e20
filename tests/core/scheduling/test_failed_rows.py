"""A row whose logits give no token ends its completion with the reason; the others go on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from harness import Harness, full_group, make_request

from octavo.core.api.scheduling import StepPlan, StepResult


def fail_once(harness: Harness, monkeypatch: pytest.MonkeyPatch, request_id: str, num_tokens: int) -> None:
    """Let the row of a request fail in the first step that would give its token after ``num_tokens`` known ones."""
    execute = harness.worker.execute
    done = []

    def failing(plan: StepPlan, running: Collection[int] | None = None) -> StepResult:
        result = execute(plan, running)
        for row, slot in enumerate(harness.worker.rows):
            held = harness.worker.slots[slot]
            if held.new.request_id == request_id and not done and len(held.tokens) == num_tokens + 1:
                result.sampled[row] = -1
                result.failed = {row: "its logits are NaN"}
                done.append(row)
        return result

    monkeypatch.setattr(harness.worker, "execute", failing)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_tokens", [4, 6])
def test_a_failed_row_ends_its_request_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, max_in_flight: int, num_tokens: int
) -> None:
    harness = Harness([full_group(40)], max_in_flight=max_in_flight)
    fail_once(harness, monkeypatch, "bad", num_tokens)
    harness.add(make_request("good", [1, 2, 3, 4, 5], max_tokens=8))
    harness.add(make_request("bad", [9, 8, 7, 6], max_tokens=8))
    run(harness)
    ended: Any = harness.finished["bad", 0]
    assert (ended.reason, ended.message) == ("error", "its logits are NaN")
    assert len(harness.tokens.get(("bad", 0), [])) == num_tokens - 4
    assert harness.finished["good", 0].reason == "length"
    assert len(harness.tokens["good", 0]) == 8
    assert harness.kv.usage == 0
    assert not harness.scheduler.has_unfinished()


def test_a_request_that_was_aborted_before_its_row_failed_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness([full_group(40)], max_in_flight=2)
    fail_once(harness, monkeypatch, "bad", 4)
    harness.add(make_request("bad", [9, 8, 7, 6], max_tokens=8))
    assert harness.plan()
    harness.abort("bad")
    run(harness)
    assert harness.finished["bad", 0].reason == "abort"
    assert harness.kv.usage == 0


def run(harness: Harness) -> None:
    while harness.scheduler.has_unfinished():
        while harness.plan():
            pass
        harness.finish_step()
