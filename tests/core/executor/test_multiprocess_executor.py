from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.api.errors import EngineError, UsageError, WorkerDied
from octavo.core.api.executor import WorkerMethod
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import NewRequest, StepPlan
from octavo.core.config import EngineConfig
from octavo.core.discovery import installed
from octavo.core.engine.resolve import resolve
from octavo.core.executor.multiprocess import MultiprocessExecutor


@pytest.fixture
def config(tiny_llama: Path) -> EngineConfig:
    return resolve(
        EngineConfig.from_flat(
            model=str(tiny_llama), platform="cpu", dtype="float32", max_num_seqs=4, num_blocks=40, block_size=4
        )
    ).config


@pytest.fixture
def executor(config: EngineConfig) -> Iterator[MultiprocessExecutor]:
    """Started; afterwards neither its process nor its threads are left, and it can't be used again."""
    threads = set(threading.enumerate())
    made = MultiprocessExecutor()
    with pytest.raises(EngineError, match="hasn't been started"):
        made.call(WorkerMethod.COUNTERS)
    info = made.start(config)
    assert info.vocab_size == 64
    assert info.max_in_flight == 2
    pid = made.pid
    assert pid is not None
    yield made
    made.shutdown()
    made.shutdown()
    assert not _alive(pid)
    assert set(threading.enumerate()) == threads
    with pytest.raises(EngineError):
        made.execute(StepPlan(step=9)).result(5)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _gone_within(pid: int, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        status = Path(f"/proc/{pid}/status")
        if not _alive(pid) or (status.exists() and "State:\tZ" in status.read_text()):
            return True
        time.sleep(0.05)
    return False


def _prefill(tokens: Sequence[int]) -> StepPlan:
    request = NewRequest(
        slot=0, request_id="r", index=0, token_ids=np.array(tokens, np.int32), num_prompt_tokens=len(tokens),
        num_computed_tokens=0, num_cached_tokens=0, block_ids=(np.arange(1, 20, dtype=np.int32),),
        sampling=SamplingParams(temperature=0),
    )  # fmt: skip
    rows, counts = np.array([0], np.int32), np.array([len(tokens)], np.int32)
    return StepPlan(step=0, new=[request], rows=rows, num_scheduled_tokens=counts)


def test_it_is_found_by_its_name() -> None:
    assert installed().load("executor", "multiprocess") is MultiprocessExecutor


def test_a_model_in_another_process_answers(
    executor: MultiprocessExecutor, tiny_llama_greedy: Callable[[Sequence[int], int], list[int]]
) -> None:
    futures = [executor.execute(_prefill([5, 6, 7]))]
    futures += [executor.execute(StepPlan(step=step)) for step in range(1, 6)]
    tokens = [int(future.result(60).sampled[0, 0]) for future in futures]
    assert tokens == tiny_llama_greedy([5, 6, 7], 6)
    assert executor.call(WorkerMethod.ATTENTION_RUNS) == [{0: "reference", 1: "reference"}]
    with pytest.raises(UsageError, match="no extension 'x'"):
        executor.call(WorkerMethod.EXTENSION, name="x", payload=b"\x00")
    executor.check_health()


def test_a_worker_that_is_killed_fails_its_step_with_the_signal(executor: MultiprocessExecutor) -> None:
    executor.execute(_prefill([5, 6, 7])).result(60)
    assert executor.pid is not None
    os.kill(executor.pid, signal.SIGSTOP)  # so that the step can't be done before the process is
    future = executor.execute(StepPlan(step=1))
    os.kill(executor.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"process \d+ was ended by signal 9, SIGKILL \(.*memory"):
        future.result(30)
    with pytest.raises(WorkerDied):
        executor.check_health()
    with pytest.raises(WorkerDied):
        executor.execute(StepPlan(step=2)).result(5)
    with pytest.raises(WorkerDied):
        executor.call(WorkerMethod.COUNTERS)


def test_a_failed_step_keeps_its_message_and_a_silent_worker_is_reported(
    executor: MultiprocessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _prefill([5, 6, 7])
    plan.rows = np.array([0, 1], np.int32)  # a row without its count
    with pytest.raises(EngineError, match="the worker failed in step 0: AssertionError: a count for every row"):
        executor.execute(plan).result(30)
    monkeypatch.setattr("octavo.core.executor.multiprocess._PING_S", 0.3)
    assert executor.pid is not None
    os.kill(executor.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="hasn't answered"):
        executor.check_health()


def test_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_the_next_one(executor: MultiprocessExecutor) -> None:
    main = threading.main_thread().ident
    assert main is not None
    assert executor.pid is not None
    os.kill(executor.pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        executor.check_health()
    timer.join()
    os.kill(executor.pid, signal.SIGCONT)
    (counters,) = executor.call(WorkerMethod.COUNTERS)
    assert set(counters) >= {"host_to_device", "device_to_host"}
    executor.check_health()


def test_a_failed_start_raises_what_the_worker_raised(config: EngineConfig, tmp_path: Path) -> None:
    executor = MultiprocessExecutor()
    with pytest.raises(UsageError, match="no device 7"):
        executor.start(config.with_value("plugins.device", 7))
    assert executor.pid is None
    executor.shutdown()


PARENT = """
    import sys, time
    from octavo.core.config import EngineConfig
    from octavo.core.engine.resolve import resolve
    from octavo.core.executor.multiprocess import MultiprocessExecutor
    fields = dict(platform="cpu", dtype="float32", max_num_seqs=4, num_blocks=40, block_size=4)
    executor = MultiprocessExecutor()
    executor.start(resolve(EngineConfig.from_flat(model=sys.argv[1], **fields)).config)
    print(executor.pid, flush=True)
    if sys.argv[2] == "wait":
        time.sleep(600)
"""


def _start_parent(tiny_llama: Path, what: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(tiny_llama), what]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_a_parent_that_is_killed_leaves_no_orphan(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(tiny_llama), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert _alive(worker)
        parent.kill()
    assert _gone_within(worker, 15)


def test_a_parent_that_forgets_to_shut_down_ends_cleanly_and_prints_nothing_of_the_workers(
    tiny_llama: Path, plugin_box: Any
) -> None:
    plugin_box.add(
        "noisy",
        manifest="""
            [plugin]
            name = "noisy"
            api = "1.0"
            [ops.noisy]
            implements = ["silu_and_mul"]
            platforms = ["cpu"]
        """,
        files={
            "ops.py": """
                import torch
                def make(platform):
                    print("a word from the plugin")
                    def silu_and_mul(x):
                        gate, up = x.chunk(2, -1)
                        return torch.nn.functional.silu(gate) * up
                    return {"silu_and_mul": silu_and_mul}
            """
        },
        entry_points={"octavo.ops": {"noisy": "noisy.ops:make"}},
    )
    body = textwrap.dedent(PARENT).replace("block_size=4)", "block_size=4, op={'silu_and_mul': 'noisy'})")
    done = plugin_box.python("-c", body, str(tiny_llama), "end")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit(), done.stdout
    assert "a word from the plugin" in done.stderr
    assert _gone_within(int(done.stdout), 15)
