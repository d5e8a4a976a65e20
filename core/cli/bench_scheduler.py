"""``octavo bench scheduler``: what a step costs in the scheduler and the KV cache manager, and what adding a request costs."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np

from octavo.core.api.kv_cache import FullAttention, KVGroupInfo
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import IntArray, Request, StepResult
from octavo.core.cli.table import table
from octavo.core.config.scheduler import SchedulerConfig
from octavo.core.kv_cache import KVCacheManager
from octavo.core.scheduling import FirstComeFirstServed, Scheduler

PROMPT_TOKENS, STEPS, BLOCK_SIZE = 512, 200, 16
MAX_MODEL_LEN = 8192
EOS, STOP, SAMPLED = 2, 3, 7


@dataclass(frozen=True)
class Row:
    """In microseconds: the mean of making and adding a request (its prompt is there already), medians of the decode steps."""

    running: int
    add_us: float
    schedule_us: float
    update_us: float
    per_request_us: float


@click.command("scheduler")
@click.option("--running", type=click.IntRange(1), multiple=True, help="requests that run at once (default: 32, 256, 1024)")
@click.option("--prefix-hash", type=click.Choice(["sha256", "xxh3"]), default="sha256", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="one JSON document on standard output")
def command(running: Sequence[int], prefix_hash: str, as_json: bool) -> None:
    """Requests of 512 random tokens in steady decode, block hashing on: no model, one sampled token a request and step, each
    checked against its stop conditions.
    """
    rows = [measure(count, prefix_hash=prefix_hash) for count in running or (32, 256, 1024)]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    cells = [
        (
            str(row.running),
            f"{row.add_us:.1f}",
            f"{row.schedule_us:.1f}",
            f"{row.update_us:.1f}",
            f"{row.per_request_us:.3f}",
        )
        for row in rows
    ]
    click.echo(table(("RUNNING", "ADD µs", "SCHEDULE µs", "UPDATE µs", "µs A REQUEST AND STEP"), cells))


def measure(running: int, *, prefix_hash: str = "sha256", steps: int = STEPS) -> Row:
    """Fill a scheduler with ``running`` requests, let all prompts be computed, and time ``steps`` steps after that."""
    scheduler = _scheduler(running, prefix_hash, steps)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0, stop_token_ids=[STOP])
    prompts = [rng.integers(100, 40_000, PROMPT_TOKENS, dtype=np.int32) for _ in range(running)]
    gc.collect()
    begun_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        scheduler.add(
            Request(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling=sampling,
                eos_token_ids=(EOS,),
                max_tokens=_output_tokens(running, steps),
            )
        )
    add_us = (time.perf_counter() - begun_s) * 1e6 / running
    worker = _Worker()
    while not (worker.decodes_only and len(worker.rows) == running):
        worker.step(scheduler)
    times = [worker.step(scheduler) for _ in range(steps)]
    schedule_us, update_us = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    figures = (add_us, schedule_us, update_us, (schedule_us + update_us) / running)
    return Row(running, *(round(figure, 4) for figure in figures))


def _token_budget(running: int) -> int:
    """8192 tokens a step, more where that many requests decode."""
    return max(8192, 3 * running)


def _output_tokens(running: int, steps: int) -> int:
    """Enough for the first request, which decodes while the last ones' prompts are still computed."""
    return steps + 32 + running * PROMPT_TOKENS // (_token_budget(running) - running)


def _scheduler(running: int, prefix_hash: str, steps: int) -> Scheduler:
    num_blocks = running * (PROMPT_TOKENS + _output_tokens(running, steps)) // BLOCK_SIZE + 100
    group = KVGroupInfo(spec=FullAttention(block_size=BLOCK_SIZE, bytes_per_block=1), num_blocks=num_blocks, pool_id=0)
    kv = KVCacheManager([group], max_num_seqs=running, max_model_len=MAX_MODEL_LEN, prefix_hash=prefix_hash)
    config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=_token_budget(running))
    return Scheduler(config, kv, max_model_len=MAX_MODEL_LEN, policy=FirstComeFirstServed())


class _Worker:
    """Answers every row that reaches its last token with one token."""

    def __init__(self) -> None:
        self.rows: IntArray = np.zeros(0, np.int32)
        self.decodes_only = False
        self._left: dict[int, int] = {}  # slot → prompt tokens still to be computed

    def step(self, scheduler: Scheduler) -> tuple[float, float]:
        """One step; seconds in schedule() and in update()."""
        begun_s = time.perf_counter()
        plan = scheduler.schedule()
        schedule_s = time.perf_counter() - begun_s
        assert plan is not None, "requests are left, and nothing can run"
        for new in plan.new:
            self._left[new.slot] = new.num_prompt_tokens - new.num_computed_tokens
        sampled = np.full((len(self.rows), 1), SAMPLED, np.int32)
        if plan.rows is not None and plan.num_scheduled_tokens is not None:
            self.rows = plan.rows
            sampled = np.full((len(self.rows), 1), SAMPLED, np.int32)
            for i, (slot, count) in enumerate(zip(self.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)):
                self._left[slot] = max(self._left[slot] - count, 0)
                if self._left[slot]:
                    sampled[i] = -1
            self.decodes_only = not any(self._left.values())
        result = StepResult(step=plan.step, sampled=sampled)
        begun_s = time.perf_counter()
        scheduler.update(result)
        return schedule_s, time.perf_counter() - begun_s
