"""Results that no executor may give, and a policy that fails late: the engine stops, and says whose fault it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from greedy import params

from octavo.core.api.errors import EngineError, PluginError
from octavo.core.api.scheduling import Logprobs, SchedulingPolicy, StepResult
from octavo.core.engine.llm import LLM

MakeLLM = Callable[..., LLM]
Spoil = Callable[..., tuple[LLM, Any]]


@pytest.fixture
def spoil(make_llm: MakeLLM, EchoExecutor: Any, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """An `LLM` and its executor, whose results go through ``change``; only that of step ``only_at`` where it is given."""

    def make(change: Callable[[StepResult], StepResult], *, only_at: int | None = None, **options: Any) -> tuple[LLM, Any]:
        executor = EchoExecutor()
        run = executor._run

        def wrong(plan: Any) -> StepResult:
            result = run(plan)
            return result if only_at not in (None, executor.num_steps) else change(result)

        monkeypatch.setattr(executor, "_run", wrong)
        return make_llm(executor, **options), executor

    return make


@pytest.mark.parametrize("token", [-2, 257, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8])
def test_a_token_id_outside_the_vocabulary_is_the_executor_s_fault(spoil: Spoil, token: int, dtype: Any) -> None:
    given = -2 if dtype is np.int8 else token

    def change(result: StepResult) -> StepResult:
        sampled = result.sampled.astype(dtype) if dtype is not np.int8 else np.full_like(result.sampled, -1, dtype)
        sampled[-1, 0] = given
        return msgspec.structs.replace(result, sampled=sampled)

    llm, executor = spoil(change)
    says = rf"executor 'inline' completes a step with token id {given}, expected one from 0 to 256"
    with pytest.raises(PluginError, match=says):
        llm.generate(["abc", "defg"], params(4))
    assert executor.is_shut_down


def test_a_result_without_an_array_is_the_executor_s_fault(spoil: Spoil) -> None:
    llm, _ = spoil(lambda result: StepResult(step=result.step, sampled=[[1]]))  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"executor 'inline' completes a step with .*, not a StepResult of token ids"):
        llm.generate("abc", params(4))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_result_for_another_number_of_rows_is_the_executor_s_fault(spoil: Spoil, async_scheduling: bool) -> None:
    def short(result: StepResult) -> StepResult:  # in a step with the rows of the one before
        return msgspec.structs.replace(result, sampled=result.sampled[:-1])

    llm, _ = spoil(short, only_at=3, async_scheduling=async_scheduling)
    with pytest.raises(PluginError, match="executor 'inline' completes a step of 2 rows with tokens for 1"):
        llm.generate(["abc", "defg"], params(6))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_row_that_lacks_its_token_is_the_executor_s_fault(spoil: Spoil, async_scheduling: bool) -> None:
    def silent(result: StepResult) -> StepResult:
        result.sampled[-1] = -1
        return result

    llm, executor = spoil(silent, only_at=3, async_scheduling=async_scheduling)
    says = r"executor 'inline' gave a wrong result: in step \d the row of slot \d lacks its token"
    with pytest.raises(PluginError, match=says):
        llm.generate(["abc", "defg"], params(6))
    assert executor.is_shut_down


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"failed": {99: "x"}}, r"failed=\{99: 'x'\}, not \{row: why\}"),
        ({"failed": {-1: "x"}}, "with failed="),
        ({"failed": None}, "with failed=None"),
        ({"failed": ["x"]}, "with failed="),
        ({"sampled": np.full((1, 3), 7, np.int32)}, "3 tokens a row and no num_accepted"),
        ({"step": 77}, "gave a wrong result: the result of step 77 came when"),
    ],
)
def test_a_wrong_result_stops_the_engine_and_names_the_executor(spoil: Spoil, wrong: dict[str, Any], says: str) -> None:
    llm, executor = spoil(lambda result: msgspec.structs.replace(result, **wrong))
    with pytest.raises(PluginError, match=f"executor 'inline'.*{says}"):
        llm.generate("abc", params(4))
    assert executor.is_shut_down
    with pytest.raises(EngineError, match="the engine has stopped"):
        llm.generate("abc", params(4))


def test_log_probabilities_of_rows_that_are_not_there_stop_the_engine(spoil: Spoil) -> None:
    where = Logprobs(
        rows=np.array([40], np.int32),
        token_ids=np.zeros((1, 1), np.int32),
        logprobs=np.zeros((1, 1), np.float32),
        ranks=np.ones(1, np.int32),
    )
    llm, executor = spoil(lambda result: msgspec.structs.replace(result, prompt_logprobs=where))
    with pytest.raises(EngineError):
        llm.generate("abc", params(4))
    assert executor.is_shut_down


class Moody(SchedulingPolicy):
    """Gives a key once."""

    def __init__(self) -> None:
        self.asked = 0

    def key(self, request: Any) -> tuple[float, ...]:
        self.asked += 1
        if self.asked > 1:
            raise ValueError("not again")
        return (0.0,)


def test_a_policy_that_fails_later_stops_the_engine(make_llm: MakeLLM) -> None:
    llm = make_llm()
    scheduler = llm.front.core._scheduler
    scheduler._waiting._policy = scheduler._roster.policy = Moody()
    llm.front.core.add(llm.front.maker.make("abcdef", params(8, n=3), "r")[0])
    with pytest.raises(PluginError, match=r"scheduling policy Moody gave no key for request 'r'"):
        llm.front.core.finish("r", 0, reason="stop")  # the second completion takes its place
    with pytest.raises(EngineError, match="the engine has stopped"):
        llm.generate("abc", params(4))


def test_the_last_token_of_the_vocabulary_is_one_of_it(make_llm: MakeLLM) -> None:
    assert make_llm().generate("a<end>", params(2, ignore_eos=True))[0].outputs[0].token_ids[-1] == 256
