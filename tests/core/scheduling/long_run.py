"""The scheduler's state machine for longer than CI has time: ``python tests/core/scheduling/long_run.py --long --out FILE``.

``--long`` is 100,000 examples, in batches with seeds of their own; the record is written after every batch, and a run that was
interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from machine import SchedulerMachine
from machines import run_machine

BATCH = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_const", const=100_000, dest="examples", help="100,000 examples")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("TEST_SEED", "0")))
    parser.add_argument("--out", type=Path, default=None, help="record of the run (JSON); continued if it is there")
    options = parser.parse_args()
    record = {"machine": "SchedulerMachine", "seed": options.seed, "examples": 0, "failures": 0, "seconds": 0.0}
    if options.out is not None and options.out.exists():
        record = json.loads(options.out.read_text())
        if record["seed"] != options.seed:
            parser.error(
                f"{options.out} records a run with seed {record['seed']}; give --seed {record['seed']} or another file"
            )
    while record["examples"] < options.examples:
        os.environ["TEST_SEED"] = str(record["seed"] * 1_000_003 + record["examples"])
        begun_s = time.monotonic()
        count = min(BATCH, options.examples - record["examples"])
        run_machine(SchedulerMachine, count)  # raises with the failing steps
        record["examples"] += count
        record["seconds"] = round(record["seconds"] + time.monotonic() - begun_s, 1)
        print(json.dumps(record), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
