"""Runs a hypothesis state machine the same way for every test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_machine(machine: type[RuleBasedStateMachine], max_examples: int, *, steps: int = 50) -> None:
    """``max_examples`` runs of at most ``steps`` rules; the seed comes from TEST_SEED."""
    run_state_machine_as_test(
        seed(int(os.environ.get("TEST_SEED", "0")))(machine),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
