"""`LLM` on the real scheduler and an executor that echoes the prompt."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from greedy import params

from octavo.core.api.errors import EngineError, OctavoError, PluginError, UsageError, WorkerDied
from octavo.core.api.executor import WorkerMethod
from octavo.core.api.hooks import hookimpl
from octavo.core.api.scheduling import SchedulerStats, StepPlan
from octavo.core.discovery.hooks import Hooks
from octavo.core.engine.beam_search import BeamSearchParams
from octavo.core.engine.interrupt import interrupt_deferred
from octavo.core.engine.llm import LLM

MakeLLM = Callable[..., LLM]


def test_outputs_come_in_the_order_of_the_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompts = [f"number {index}, " for index in range(20)]
    lengths = [5 + 7 * index % 30 for index in range(20)]
    outputs = llm.generate(prompts, [params(length) for length in lengths])
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == [
        (prompt * 10)[:length] for prompt, length in zip(prompts, lengths, strict=True)
    ]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert len({output.request_id for output in outputs}) == 20


@pytest.mark.parametrize("options", [{"async_scheduling": False}, {"max_num_batched_tokens": 7}, {"num_blocks": 24}])
def test_the_text_does_not_depend_on_scheduling(make_llm: MakeLLM, options: Any) -> None:
    prompts = [f"prompt {index} of several" for index in range(6)]
    outputs = make_llm(**options).generate(prompts, params(30))
    assert [output.outputs[0].text for output in outputs] == [(prompt * 2)[:30] for prompt in prompts]


def test_two_steps_are_in_flight_where_the_executor_allows(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    one, two = EchoExecutor(), EchoExecutor()
    make_llm(one, async_scheduling=False).generate(["abc"] * 4, params(20))
    make_llm(two).generate(["abc"] * 4, params(20))
    assert (one.most_in_flight, two.most_in_flight) == (1, 2)


def test_asynchronous_scheduling_is_refused_where_the_executor_cannot(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    with pytest.raises(UsageError, match="can't schedule asynchronously"):
        make_llm(EchoExecutor(max_in_flight=1), async_scheduling=True)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_stop_string_frees_the_request_and_later_tokens_are_dropped(make_llm: MakeLLM, async_scheduling: bool) -> None:
    llm = make_llm(async_scheduling=async_scheduling)
    outputs = llm.generate(["one STOP two ", "no such word "], params(30, stop=["STOP"]))
    assert outputs[0].outputs[0].text == "one "
    assert outputs[0].outputs[0].stop_reason == "STOP"
    assert len(outputs[0].outputs[0].token_ids) == len("one STOP")
    assert len(outputs[1].outputs[0].token_ids) == 30
    assert llm.generate("again ", params(12))[0].outputs[0].text == "again again "


def test_the_end_token_ends_the_text_unless_ignored(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompt = "hi<end>"
    ended, ignored, stopped = llm.generate(
        [prompt] * 3, [params(6), params(6, ignore_eos=True), params(6, stop_token_ids=[257 - 1], ignore_eos=True)]
    )
    assert (ended.outputs[0].text, ended.outputs[0].finish_reason) == ("hi", "stop")
    assert ended.outputs[0].token_ids[-1] == 256
    assert (ignored.outputs[0].text, ignored.outputs[0].finish_reason) == ("hihi", "length")
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("hi", 256)


def test_several_completions_of_one_prompt(make_llm: MakeLLM) -> None:
    (output,) = make_llm().generate("abcdefgh", params(12, n=3))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert {completion.text for completion in output.outputs} == {"abcdefghabcd"}


def test_the_second_use_of_a_prompt_hits_the_prefix_cache(make_llm: MakeLLM) -> None:
    llm = make_llm()
    first, second = (llm.generate("a long enough prompt", params(3))[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= 16
    assert first.outputs[0].text == second.outputs[0].text
    assert llm.reset_prefix_cache() is True
    assert llm.generate("a long enough prompt", params(3))[0].num_cached_tokens == 0


def test_a_wrong_prompt_is_refused_before_anything_runs(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    llm = make_llm(executor)
    with pytest.raises(UsageError, match="token id 999"):
        llm.generate(["fine", {"prompt_token_ids": [999]}], params())
    with pytest.raises(UsageError, match="2 priorities for 1 prompts"):
        llm.generate(["fine"], params(), priority=[1, 2])
    assert executor.num_steps == 0
    assert not llm.front.core.has_unfinished()


def test_a_request_that_could_never_fit_is_refused_with_the_numbers(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=5)
    with pytest.raises(UsageError, match="block"):
        llm.generate(["short", "far too long for four blocks of four tokens"], params(10))
    assert not llm.front.core.has_unfinished()
    assert llm.generate("short", params(5))[0].outputs[0].text == "short"


@pytest.mark.parametrize("failure", [WorkerDied("the worker died"), RuntimeError("a bug")])
def test_a_failed_worker_ends_the_engine_with_a_typed_error(make_llm: MakeLLM, EchoExecutor: Any, failure: Exception) -> None:
    executor = EchoExecutor(fail_at=3, failure=failure)
    llm = make_llm(executor)
    with pytest.raises(EngineError, match=str(failure)):
        llm.generate(["abc", "def"], params(20))
    assert executor.is_shut_down
    with pytest.raises(EngineError, match="the engine has stopped"):
        llm.generate("again", params())
    llm.close()


def test_when_one_completion_fails_the_others_of_its_request_are_ended_too(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    llm = make_llm(EchoExecutor(fail_row_at=3))
    with pytest.raises(EngineError, match="no token"):
        llm.generate("abc", params(190, n=3))
    assert llm.front.core.stats().num_running == 0
    assert llm.generate("abc", params(3))[0].finished


def test_a_step_that_the_executor_does_not_take_stops_the_engine(
    make_llm: MakeLLM, EchoExecutor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = EchoExecutor()
    llm = make_llm(executor)

    def refuse(step: StepPlan) -> None:
        raise OSError("no route to the worker")

    monkeypatch.setattr(executor, "execute", refuse)
    with pytest.raises(EngineError, match="a step failed: OSError: no route to the worker"):
        llm.generate("abc", params())
    assert executor.is_shut_down
    with pytest.raises(EngineError, match="the engine has stopped: a step failed"):
        llm.generate("abc", params())


@pytest.mark.parametrize(
    ("failure", "error", "says"),
    [
        (WorkerDied("node 3 is gone"), WorkerDied, "^node 3 is gone$"),
        (OSError("no route"), PluginError, r"executor 'inline' failed in check_health\(\): OSError: no route"),
        (TimeoutError("no answer"), PluginError, r"executor 'inline' failed in check_health\(\): TimeoutError: no answer"),
        (SystemExit(3), PluginError, r"executor 'inline' failed in check_health\(\): SystemExit: 3"),
    ],
)
@pytest.mark.timeout(30)
def test_a_worker_that_is_lost_while_its_step_is_waited_for_ends_the_engine(
    make_llm: MakeLLM,
    EchoExecutor: Any,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    error: type[OctavoError],
    says: str,
) -> None:
    monkeypatch.setattr("octavo.core.engine.core._HEALTH_CHECK_S", 0.02)
    executor = EchoExecutor()
    llm = make_llm(executor)
    llm.generate("abc", params(3))
    executor.gate.clear()
    checks = itertools.count()

    def lost_at_the_third_look() -> None:
        if next(checks) == 2:
            raise failure

    monkeypatch.setattr(executor, "check_health", lost_at_the_third_look)
    with pytest.raises(error, match=says):
        llm.generate("abc", params())
    assert executor.is_shut_down
    with pytest.raises(EngineError, match="the engine has stopped"):
        llm.generate("abc", params())


def test_a_long_step_is_waited_for_and_health_is_asked_about_once_an_interval(
    make_llm: MakeLLM, EchoExecutor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.core.engine.core._HEALTH_CHECK_S", 0.1)
    executor = EchoExecutor()
    llm = make_llm(executor)
    num_checks = 0

    def healthy() -> None:
        nonlocal num_checks
        num_checks += 1

    monkeypatch.setattr(executor, "check_health", healthy)
    llm.generate("abc", params(20))
    assert num_checks == 0, "steps that take a millisecond"
    executor.gate.clear()
    threading.Timer(0.55, executor.gate.set).start()
    assert llm.generate("abc", params(3))[0].outputs[0].text == "abc"
    assert 1 <= num_checks <= 5


@contextmanager
def _two_interrupts(after_s: float) -> Iterator[None]:
    """What pressing Ctrl-C twice does to the main thread: the second one isn't deferred."""
    main = threading.main_thread().ident
    assert main is not None
    timers = [threading.Timer(after_s * times, signal.pthread_kill, (main, signal.SIGINT)) for times in (1, 2)]
    for timer in timers:
        timer.start()
    yield
    for timer in timers:
        timer.join()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("interval_s", [60.0, 0.01])
def test_ctrl_c_interrupts_the_wait_and_the_step_stays_in_flight(
    make_llm: MakeLLM, EchoExecutor: Any, monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> None:
    monkeypatch.setattr("octavo.core.engine.core._HEALTH_CHECK_S", interval_s)
    executor = EchoExecutor()
    llm = make_llm(executor, async_scheduling=False)
    executor.gate.clear()
    monkeypatch.setattr(executor, "check_health", lambda: time.sleep(0.05))
    with _two_interrupts(0.2), pytest.raises(KeyboardInterrupt):
        llm.generate("abcdef", params(9))
    assert llm.front.core.has_work()
    executor.gate.set()
    assert llm.generate("xyz", params(4))[0].outputs[0].text == "xyzx"


def test_after_close_nothing_runs_and_closing_again_is_harmless(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    with make_llm(executor) as llm:
        llm.generate("abc", params())
    assert executor.is_shut_down
    llm.close()
    with pytest.raises(EngineError, match="shut down"):
        llm.generate("abc", params())


def test_a_stream_grows_and_leaving_it_aborts_the_request(make_llm: MakeLLM) -> None:
    llm = make_llm()
    texts = [output.outputs[0].text for output in llm.stream("abcdef", params(9))]
    assert texts[-1] == "abcdefabc"
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    stream = llm.stream("abcdef", params(100))
    next(stream)
    stream.close()
    assert not llm.front.processor.requests
    assert llm.generate("xyz", params(4))[0].outputs[0].text == "xyzx"


def test_a_stream_shows_its_end_although_another_call_brought_it_there(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream("abc", params(5))
    assert not next(stream).finished
    llm.generate("xyz", params(30))
    (last,) = stream
    assert last.finished
    assert last.outputs[0].text == "abcab"


def test_several_threads_may_call_at_once(make_llm: MakeLLM) -> None:
    llm = make_llm()
    wanted = {f"thread {number}, ": (f"thread {number}, " * 4)[: 20 + number] for number in range(8)}
    answers: dict[str, set[str]] = {}

    def call(prompt: str, text: str) -> None:
        outputs = [llm.generate([prompt] * 3, params(len(text)), use_tqdm=False) for _ in range(5)]
        streamed = [*llm.stream(prompt, params(len(text)))][-1]
        answers[prompt] = {output.outputs[0].text for batch in [*outputs, [streamed]] for output in batch}

    threads = [threading.Thread(target=call, args=item) for item in wanted.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {prompt: {text} for prompt, text in wanted.items()}


def test_a_paused_engine_runs_nothing_and_says_what_to_do(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    llm = make_llm(executor)
    stream = llm.stream("abc", params(9))
    next(stream)
    llm.pause()
    with pytest.raises(EngineError, match=r"the engine is paused .*; call resume\(\) first"):
        llm.generate("xyz", params(4))
    with pytest.raises(EngineError, match="the engine is paused"):
        list(stream)
    num_steps = executor.num_steps
    with pytest.raises(EngineError, match="the engine is paused"):
        llm.generate("xyz", params(4))
    assert executor.num_steps == num_steps
    with pytest.raises(EngineError, match="the engine is paused"):
        llm.beam_search("abc", BeamSearchParams(beam_width=2, max_tokens=4))
    llm.resume()
    assert llm.generate("xyz", params(4))[0].outputs[0].text == "xyzx"


def test_a_draining_engine_lets_streams_end_and_takes_nothing_new(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream("abc", params(9))
    next(stream)
    llm.drain()
    with pytest.raises(EngineError, match="the engine is draining"):
        llm.generate("xyz", params(4))
    assert list(stream)[-1].outputs[0].text == "abcabcabc"
    llm.resume()
    assert llm.generate("xyz", params(4))[0].outputs[0].text == "xyzx"


def test_an_error_reaches_the_call_whose_request_it_is(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    llm = make_llm(EchoExecutor(fail_row_at=4))
    stream = llm.stream("abc", params(50))
    next(stream)
    assert llm.generate("xyz", params(30))[0].outputs[0].finish_reason == "length"
    with pytest.raises(EngineError, match="no token"):
        list(stream)


def test_ctrl_c_ends_a_batch_and_the_engine_goes_on(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    step, steps = llm.front.core.step, itertools.count()

    def interrupted() -> Any:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.front.core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "def"], params(50))
    assert not llm.front.processor.requests
    assert llm.generate("xyz", params(4))[0].outputs[0].text == "xyzx"


@pytest.mark.parametrize(("num_signals", "done"), [(1, ["inside"]), (2, [])])
def test_an_interrupt_is_deferred_to_the_end_but_a_second_one_is_not(num_signals: int, done: list[str]) -> None:
    found = []

    def work() -> None:
        with interrupt_deferred():
            for _ in range(num_signals):
                signal.raise_signal(signal.SIGINT)
            found.append("inside")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert found == done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_default_sampling_params_are_the_models(make_llm: MakeLLM) -> None:
    llm = make_llm()
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.0, 7, 1.0)
    assert llm.generate("abc")[0].outputs[0].text == ("abc" * 9)[:16]


def test_metrics_and_worker_calls_reach_through(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate(["abc"] * 3, params(5))
    figures = llm.metrics()
    assert figures["steps_total"] >= 5
    assert figures["num_running"] == 0
    assert figures["prefix_hit_rate"] == figures["prefix_hits_total"] / figures["prefix_queries_total"]
    assert "listener/lines" not in figures
    assert llm.front.core.call(WorkerMethod.COUNTERS) == [{"method": "counters"}]


def test_a_priority_that_would_be_ignored_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(UsageError, match="has priority 2, but the scheduling policy fcfs serves in order of arrival"):
        llm.generate(["abc", "def"], params(5), priority=[0, 2])
    with pytest.raises(UsageError, match="has priority -1"):
        next(iter(llm.stream("abc", params(5), priority=-1)))
    assert not llm.front.core.has_unfinished()
    assert llm.generate("abc", params(5), priority=[0])[0].outputs[0].text == "abcab"


def test_lower_priorities_are_served_first(make_llm: MakeLLM) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    last, middle, first = llm.generate(["abc", "def", "ghi"], params(5), priority=[2, 1, -1])
    ends = [output.metrics.finished_s for output in (first, middle, last)]
    assert ends == sorted(ends)
    assert next(iter(llm.stream("abc", params(5), priority=3))).request_id


def test_guesses_and_steps_planned_ahead_exclude_each_other(make_llm: MakeLLM) -> None:
    with pytest.raises(UsageError, match="steps can't be planned ahead with speculative=ngram: guesses follow known tokens"):
        make_llm(speculative="ngram", async_scheduling=True)
    assert make_llm(speculative="ngram").front.core._max_in_flight == 1
    assert make_llm().front.core._max_in_flight == 2


def test_a_step_budget_below_the_number_of_requests_is_warned_of(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    make_llm(max_num_seqs=8, max_num_batched_tokens=8)
    assert not caplog.records
    make_llm(max_num_seqs=8, max_num_batched_tokens=7)
    (record,) = caplog.records
    assert "max_num_batched_tokens (7) is below max_num_seqs (8)" in record.getMessage()


class Listener:
    """A plugin that counts steps."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.num_stops = 0

    @hookimpl
    def octavo_step_finished(self, stats: SchedulerStats, step_s: float) -> None:
        self.steps.append(step_s)

    @hookimpl
    def octavo_metrics(self) -> dict[str, float]:
        return {"steps": float(len(self.steps))}

    @hookimpl
    def octavo_engine_stopped(self) -> None:
        self.num_stops += 1


def test_plugins_hear_of_steps_metrics_and_the_end(make_llm: MakeLLM) -> None:
    listener = Listener()
    llm = make_llm(hooks=Hooks({"listener": listener}))
    llm.generate(["abc"] * 3, params(5))
    assert len(listener.steps) >= 5
    assert all(step_s >= 0 for step_s in listener.steps)
    assert llm.front.core.metrics()["listener/steps"] == len(listener.steps)
    llm.close()
    llm.close()
    assert listener.num_stops == 1
