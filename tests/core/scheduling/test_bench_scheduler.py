"""``octavo bench scheduler``."""

from __future__ import annotations

import json

from click.testing import CliRunner

from octavo.core.cli.bench import bench


def test_bench_lists_its_benchmarks_without_importing_them() -> None:
    done = CliRunner().invoke(bench, ["--help"])
    assert done.exit_code == 0
    assert "scheduler" in done.output


def test_bench_scheduler_prints_a_table_for_people() -> None:
    done = CliRunner().invoke(bench, ["scheduler", "--running", "4", "--prefix-hash", "xxh3"])
    assert done.exit_code == 0, done.output
    assert "RUNNING" in done.output


def test_bench_scheduler_prints_one_json_list() -> None:
    done = CliRunner().invoke(bench, ["scheduler", "--json", "--running", "8", "--running", "16"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)
    assert [row["running"] for row in rows] == [8, 16]
    assert all(set(row) == {"running", "add_us", "schedule_us", "update_us", "per_request_us"} for row in rows)
    assert all(value > 0 for row in rows for value in row.values())
