"""Threads that share their cores with other work shouldn't spin for long: what the engine sets, and what it leaves alone."""

from __future__ import annotations

import os

import pytest

from octavo.core.config import environment


def test_spinning_is_limited_where_the_operator_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv(environment.SPIN_COUNT, "")  # restored after the test, whatever the call sets
    monkeypatch.delenv(environment.SPIN_COUNT)
    environment.limit_spinning()
    assert os.environ[environment.SPIN_COUNT] == "1000"


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5")])
def test_what_the_operator_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for variable in ("OMP_WAIT_POLICY", environment.SPIN_COUNT):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    environment.limit_spinning()
    assert {variable: os.environ.get(variable) for variable in (name, environment.SPIN_COUNT)}[name] == value
    assert (environment.SPIN_COUNT in os.environ) == (name == environment.SPIN_COUNT)
