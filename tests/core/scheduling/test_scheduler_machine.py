"""Anything an engine may do with a scheduler, in any order: the protocol holds, blocks add up, outputs are exact."""

import pytest
from machine import SchedulerMachine
from machines import run_machine


def test_scheduler_keeps_the_protocol_whatever_happens() -> None:
    run_machine(SchedulerMachine, 40)


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_scheduler_keeps_the_protocol_in_two_thousand_examples() -> None:
    run_machine(SchedulerMachine, 2000)
