from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from octavo.core.api.errors import EngineError, OutOfMemory, UsageError
from octavo.core.api.executor import WorkerInfo, WorkerMethod
from octavo.core.api.kv_cache import FullAttention, KVGroupInfo
from octavo.core.api.scheduling import StepPlan, StepResult
from octavo.core.config import EngineConfig
from octavo.core.executor.inline import InlineExecutor

GROUPS = (KVGroupInfo(spec=FullAttention(block_size=4, bytes_per_block=8), num_blocks=10, pool_id=0),)
CONFIG = EngineConfig.from_flat(model="m", device=3)


class FakeWorker:
    """Notes what is asked of it, and on which thread."""

    def __init__(self, config: EngineConfig, rank: int, device: int) -> None:
        self.device = device
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.fail_at: dict[str, Exception] = {}

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())
        if call in self.fail_at:
            raise self.fail_at[call]

    def load(self) -> None:
        self.note("load")

    def kv_groups(self) -> tuple[KVGroupInfo, ...]:
        self.note("kv_groups")
        return GROUPS

    def allocate(self, groups: tuple[KVGroupInfo, ...]) -> WorkerInfo:
        self.note("allocate")
        return WorkerInfo(kv=groups, vocab_size=9, weights_bytes=1, attention={"full_attention": "x"})

    def execute(self, plan: StepPlan) -> StepResult:
        self.note(f"step {plan.step}")
        return StepResult(step=plan.step, sampled=np.array([[plan.step]], np.int32))

    def call(self, method: WorkerMethod, **kwargs: Any) -> Any:
        self.note(method.value)
        return kwargs

    def close(self) -> None:
        self.note("close")


class Launch:
    def __init__(self, worker: PipelinedFake, step: int) -> None:
        self.worker, self.step = worker, step
        self.done = False

    def result(self) -> StepResult:
        assert self.worker.arrived[self.step].wait(10)
        if self.step in self.worker.lost:
            raise self.worker.lost[self.step]
        return StepResult(step=self.step, sampled=np.array([[self.step]], np.int32))


class PipelinedFake(FakeWorker):
    """Steps are launched at once; their results arrive when the test says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.arrived = [threading.Event() for _ in range(5)]
        self.launched = [threading.Event() for _ in range(5)]
        self.lost: dict[int, Exception] = {}

    def launch(self, plan: StepPlan) -> Launch:
        self.note(f"launch {plan.step}")
        self.launched[plan.step].set()
        return Launch(self, plan.step)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[InlineExecutor, Any]]]:
    """Starts an executor on a fake worker; checks that no thread is left."""
    before = set(threading.enumerate())
    executors = []

    def make(kind: type[FakeWorker] = FakeWorker, **fail_at: Exception) -> tuple[InlineExecutor, Any]:
        made: list[FakeWorker] = []

        def factory(config: EngineConfig, rank: int, device: int) -> FakeWorker:
            made.append(kind(config, rank, device))
            made[0].fail_at = dict(fail_at)
            return made[0]

        monkeypatch.setattr("octavo.core.worker.worker.make_worker", factory)
        executor = InlineExecutor()
        executors.append(executor)
        executor.start(CONFIG)
        return executor, made[0]

    yield make
    for executor in executors:
        executor.shutdown()
    assert set(threading.enumerate()) == before


def test_start_brings_the_worker_up_in_order_and_says_what_it_is(start: Any) -> None:
    executor, worker = start()
    assert worker.calls == ["load", "kv_groups", "allocate"]
    assert worker.device == 3
    with pytest.raises(AssertionError, match="starts once"):
        executor.start(CONFIG)


def test_results_come_in_order_from_one_thread(start: Any) -> None:
    executor, worker = start()
    futures = [executor.execute(StepPlan(step=step)) for step in range(4)]
    assert [future.result(5).step for future in futures] == [0, 1, 2, 3]
    assert executor.call(WorkerMethod.EXTENSION, name="n", payload=b"p") == [{"name": "n", "payload": b"p"}]
    executor.check_health()
    executor.shutdown()
    assert worker.calls[-1] == "close"
    assert len(worker.threads) == 1
    assert threading.get_ident() not in worker.threads


class GatedWorker(FakeWorker):
    """A step takes until the test opens the gate."""

    gate = threading.Event()
    entered = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.gate.wait(10)
        return super().execute(plan)


def _wait_for_the_end(executor: InlineExecutor) -> None:
    for _ in range(1000):
        executor.check_health()
        time.sleep(0.01)


def test_a_shutdown_lets_the_running_step_end_and_fails_those_that_wait(start: Any) -> None:
    GatedWorker.gate.clear()
    executor, worker = start(GatedWorker)
    running, waiting = executor.execute(StepPlan(step=0)), executor.execute(StepPlan(step=1))
    assert worker.entered.wait(5)
    stopper = threading.Thread(target=executor.shutdown)
    stopper.start()
    with pytest.raises(EngineError, match="has been shut down"):
        _wait_for_the_end(executor)
    GatedWorker.gate.set()
    stopper.join(10)
    executor.shutdown()
    assert running.result(0).step == 0
    with pytest.raises(EngineError, match="step 1 wasn't run: the executor has been shut down"):
        waiting.result(0)
    assert worker.calls.count("close") == 1
    assert worker.calls[-1] == "close"
    with pytest.raises(EngineError, match="has been shut down"):
        executor.execute(StepPlan(step=1))
    with pytest.raises(EngineError, match="has been shut down"):
        executor.call(WorkerMethod.COUNTERS)


def test_an_executor_that_never_started_can_be_shut_down() -> None:
    InlineExecutor().shutdown()


@pytest.mark.parametrize("stage", ["load", "kv_groups", "allocate"])
def test_a_failed_start_raises_the_workers_error_and_closes_it(start: Any, stage: str) -> None:
    with pytest.raises(OutOfMemory, match="too big"):
        start(**{stage: OutOfMemory("too big")})


def test_what_is_not_typed_becomes_an_engine_error(start: Any) -> None:
    with pytest.raises(EngineError, match="the worker failed in starting the worker: ZeroDivisionError: by zero"):
        start(load=ZeroDivisionError("by zero"))


def test_after_a_failed_step_no_other_is_run(start: Any) -> None:
    executor, worker = start(**{"step 1": ValueError("bad")})
    futures = [executor.execute(StepPlan(step=step)) for step in range(3)]
    assert futures[0].result(5).step == 0
    with pytest.raises(EngineError, match="the worker failed in step 1: ValueError: bad"):
        futures[1].result(5)
    with pytest.raises(EngineError, match="step 2 wasn't run: the worker failed in step 1"):
        futures[2].result(5)
    assert "step 2" not in worker.calls
    with pytest.raises(EngineError, match="step 1"):
        executor.check_health()


def test_a_call_that_fails_leaves_the_executor_running(start: Any) -> None:
    executor, _ = start(extension=UsageError("no such extension"))
    with pytest.raises(UsageError, match="no such extension"):
        executor.call(WorkerMethod.EXTENSION, name="x", payload=b"")
    assert executor.execute(StepPlan(step=0)).result(5).step == 0


def test_a_step_is_launched_before_the_last_ones_result_is_there(start: Any) -> None:
    executor, worker = start(PipelinedFake)
    first, second = executor.execute(StepPlan(step=0)), executor.execute(StepPlan(step=1))
    assert worker.launched[1].wait(5), "the second step doesn't wait for the first one's result"
    assert not first.done()
    worker.arrived[1].set()
    time.sleep(0.02)
    assert not second.done(), "results keep their order"
    worker.arrived[0].set()
    assert [first.result(5).step, second.result(5).step] == [0, 1]


def test_a_result_that_gets_lost_fails_its_step(start: Any) -> None:
    executor, worker = start(PipelinedFake)
    worker.lost[0] = RuntimeError("device lost")
    first = executor.execute(StepPlan(step=0))
    worker.arrived[0].set()
    with pytest.raises(EngineError, match="step 0: RuntimeError: device lost"):
        first.result(5)
    with pytest.raises(EngineError, match="step 1 wasn't run"):
        executor.execute(StepPlan(step=1)).result(5)


def test_a_result_that_nobody_can_wait_for_any_more_fails_its_step(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = start(PipelinedFake)

    def refuse(*work: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(executor._collector, "submit", refuse)
    with pytest.raises(EngineError, match="step 0: RuntimeError: cannot schedule new futures"):
        executor.execute(StepPlan(step=0)).result(5)
