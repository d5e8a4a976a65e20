"""What the out-of-tree attention backends declare, they do: every case that their manifests cover, by the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def test_they_are_right_on_every_case_that_they_declare(site: Any) -> None:
    problems: dict[str, dict[str, str]] = json.loads(site.run(str(HERE / "oracle_runs.py")).stdout)
    for name, least in (("seam-functional", 30), ("seam-packed", 25)):
        assert len(problems[name]) >= least, f"{name} was given {len(problems[name])} cases only"
        assert {case: problem for case, problem in problems[name].items() if problem} == {}
