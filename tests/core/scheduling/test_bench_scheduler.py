"""``octavo bench scheduler``."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from octavo.core.cli import bench_scheduler
from octavo.core.cli.bench import bench


def test_bench_lists_its_benchmarks_without_importing_them() -> None:
    done = CliRunner().invoke(bench, ["--help"])
    assert done.exit_code == 0
    assert "scheduler" in done.output


def test_bench_scheduler_prints_a_table_for_people() -> None:
    done = CliRunner().invoke(bench, ["scheduler", "--running", "4", "--prefix-hash", "xxh3"])
    assert done.exit_code == 0, done.output
    assert "RUNNING" in done.output


def test_the_rows_are_those_of_the_comparison_unless_others_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(running: int, **_: str) -> bench_scheduler.Row:
        measured.append(running)
        return bench_scheduler.Row(running, 1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(bench_scheduler, "measure", measure)
    assert CliRunner().invoke(bench, ["scheduler", "--json"]).exit_code == 0
    assert measured == [32, 256, 1024]


@pytest.mark.parametrize("token", [bench_scheduler.EOS, bench_scheduler.STOP])
def test_each_token_is_checked_against_its_request_s_stop_conditions(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Were they not, tokens that end a request would be counted like any other; so nothing is left to run."""
    monkeypatch.setattr(bench_scheduler, "SAMPLED", token)
    with pytest.raises(AssertionError, match="nothing can run"):
        bench_scheduler.measure(8)


def test_bench_scheduler_prints_one_json_list() -> None:
    done = CliRunner().invoke(bench, ["scheduler", "--json", "--running", "8", "--running", "16"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)
    assert [row["running"] for row in rows] == [8, 16]
    assert all(set(row) == {"running", "add_us", "schedule_us", "update_us", "per_request_us"} for row in rows)
    assert all(value > 0 for row in rows for value in row.values())
