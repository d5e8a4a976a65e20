"""`AsyncLLM` on the real scheduler and an executor that echoes the prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from greedy import params

from octavo.core.api.errors import EngineError, RequestAborted, UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.engine.async_llm import AsyncLLM
from octavo.core.engine.outputs import RequestOutput

MakeLLM = Callable[..., AsyncLLM]


@pytest_asyncio.fixture
async def make_llm(echo_front: Any) -> AsyncIterator[MakeLLM]:
    made: list[AsyncLLM] = []

    def make(*arguments: Any, **options: Any) -> AsyncLLM:
        made.append(AsyncLLM.from_front(echo_front(*arguments, **options)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


async def last(llm: AsyncLLM, prompt: Any, sampling: SamplingParams, request_id: str) -> RequestOutput:
    return [output async for output in llm.generate(prompt, sampling, request_id)][-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_many_coroutines_share_the_engine(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompts = [f"prompt {index} " for index in range(30)]
    outputs = await asyncio.gather(*(last(llm, prompt, params(25), str(i)) for i, prompt in enumerate(prompts)))
    assert [output.outputs[0].text for output in outputs] == [(prompt * 4)[:25] for prompt in prompts]
    assert [output.request_id for output in outputs] == [str(index) for index in range(30)]


async def test_an_iterator_gives_everything_so_far_and_ends_finished(make_llm: MakeLLM) -> None:
    outputs = [output async for output in make_llm().generate("abcdef", params(12), "r")]
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == "abcdefabcdef"
    assert all("abcdefabcdef".startswith(text) for text in texts)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


async def test_stop_strings_end_a_request(make_llm: MakeLLM) -> None:
    llm = make_llm()
    output = await last(llm, "one STOP two ", params(40, stop="STOP"), "r")
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one ", "STOP")
    await until(lambda: not llm.front.core.has_unfinished())


async def test_a_slow_consumer_misses_no_text(make_llm: MakeLLM) -> None:
    text = ""
    async for output in make_llm().generate("abc", params(30), "r"):
        assert output.outputs[0].text.startswith(text)
        text = output.outputs[0].text
        await asyncio.sleep(0.02)
    assert text == "abc" * 10


async def test_leaving_the_iterator_aborts_the_request(make_llm: MakeLLM) -> None:
    llm = make_llm()
    async with aclosing(llm.generate("abc", params(150), "r")) as outputs:
        async for _ in outputs:
            break
    await until(lambda: not llm.front.core.has_unfinished())
    assert (await last(llm, "xyz", params(4), "r")).outputs[0].text == "xyzx"


async def test_a_cancelled_consumer_aborts_the_request(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    executor.gate.clear()
    llm = make_llm(executor)
    task = asyncio.create_task(last(llm, "abc", params(150), "r"))
    await until(llm.front.core.has_unfinished)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    executor.gate.set()
    await until(lambda: not llm.front.core.has_unfinished())


async def test_abort_ends_the_iterator_with_what_there_is(make_llm: MakeLLM) -> None:
    llm = make_llm()
    outputs = []
    async for output in llm.generate("abc", params(150), "r"):
        outputs.append(output)
        await llm.abort("r")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await llm.abort("unknown")
    await until(lambda: not llm.front.core.has_unfinished())


async def test_a_wrong_request_is_refused_and_the_others_go_on(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=12)
    good = asyncio.create_task(last(llm, "abc", params(30), "good"))
    with pytest.raises(UsageError, match="outside the vocabulary"):
        await last(llm, {"prompt_token_ids": [999]}, params(), "bad")
    with pytest.raises(UsageError, match="block"):
        await last(llm, "x" * 100, params(), "too long for the cache")
    assert (await good).outputs[0].text == "abc" * 10


async def test_while_draining_a_new_request_is_refused_and_the_others_go_on(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    llm = make_llm(executor)
    running = asyncio.create_task(last(llm, "abc", params(100), "running"))
    await until(lambda: executor.num_steps > 2)
    await llm.drain()
    with pytest.raises(EngineError, match="the engine is draining"):
        await last(llm, "abc", params(3), "late")
    assert (await running).outputs[0].text == ("abc" * 34)[:100]
    await llm.resume()
    assert (await last(llm, "abc", params(3), "later")).outputs[0].text == "abc"


async def test_while_paused_running_requests_wait_and_new_ones_too(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    llm = make_llm(executor)
    running = [asyncio.create_task(last(llm, "abc", params(60), f"running {i}")) for i in range(3)]
    await until(lambda: executor.num_steps > 5)
    await llm.pause()
    await until(lambda: not llm.front.core.has_work())
    num_steps = executor.num_steps
    late = asyncio.create_task(last(llm, "xyz", params(6), "late"))
    gone = asyncio.create_task(last(llm, "abc", params(6), "gone"))
    await until(lambda: len(llm.front.processor.requests) == 5)
    await llm.abort("gone")
    assert (await gone).outputs[0].finish_reason == "abort"
    await asyncio.sleep(0.05)
    assert executor.num_steps == num_steps
    assert not any(task.done() for task in [*running, late])
    await llm.resume()
    assert {(await task).outputs[0].text for task in running} == {"abc" * 20}
    assert (await late).outputs[0].text == "xyzxyz"


async def test_a_paused_engine_can_be_shut_down(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    llm = make_llm(executor)
    running = asyncio.create_task(last(llm, "abc", params(150), "r"))
    await until(lambda: executor.num_steps > 2)
    await llm.pause()
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(RequestAborted):
        await running
    for command in (llm.pause, llm.drain, llm.resume):
        with pytest.raises(EngineError, match="the engine has stopped"):
            await command()


async def test_a_command_that_the_engine_never_gets_to_is_answered(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor(fail_at=1)
    executor.gate.clear()
    llm = make_llm(executor)
    request = asyncio.create_task(last(llm, "abc", params(), "r"))
    await until(llm.front.core.has_work)
    command = asyncio.create_task(llm.pause())  # the engine thread waits for the step, which will fail
    await asyncio.sleep(0.01)
    executor.gate.set()
    with pytest.raises(EngineError, match="the engine has stopped: the worker died"):
        await asyncio.wait_for(command, 10)
    with pytest.raises(EngineError, match="the worker died"):
        await request


@pytest.mark.parametrize("prompt", ["abc", {"prompt": "abc"}])
async def test_a_prompt_becomes_tokens_while_the_event_loop_goes_on(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    llm = make_llm()
    tokenizer: Any = llm.get_tokenizer()
    encode, go_on = tokenizer.encode, threading.Event()

    def slow(text: str, **more: Any) -> list[int]:
        assert go_on.wait(10), "the event loop stood still"
        ids: list[int] = encode(text, **more)
        return ids

    monkeypatch.setattr(tokenizer, "encode", slow)
    request = asyncio.create_task(last(llm, prompt, params(6), "r"))
    by_ids = await last(llm, {"prompt_token_ids": encode("xyz")}, params(3), "ids")
    assert by_ids.outputs[0].text == "xyz"
    go_on.set()
    assert (await request).outputs[0].text == "abcabc"


async def test_an_id_in_use_is_refused(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    executor.gate.clear()
    llm = make_llm(executor)
    first = asyncio.create_task(last(llm, "abc", params(6), "r"))
    await until(lambda: bool(llm.front.processor.requests))
    with pytest.raises(UsageError, match="request id 'r' is in use"):
        await last(llm, "abc", params(6), "r")
    executor.gate.set()
    assert (await first).outputs[0].text == "abcabc"


async def test_a_failed_worker_reaches_every_waiting_request(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    llm = make_llm(EchoExecutor(fail_at=4))
    results = await asyncio.gather(*(last(llm, "abc", params(99), str(i)) for i in range(12)), return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    assert {str(result) for result in results} == {"the worker died"}
    with pytest.raises(EngineError, match="the engine has stopped: the worker died"):
        await last(llm, "abc", params(), "later")
    with pytest.raises(EngineError, match="the worker died"):
        llm.check_health()


async def test_a_bug_in_the_loop_reaches_every_waiting_request(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    monkeypatch.setattr(llm.front.core, "step", lambda: [][1])
    with pytest.raises(EngineError, match="the engine loop failed: IndexError"):
        await last(llm, "abc", params(), "r")


async def test_a_bug_in_the_output_loop_reaches_every_waiting_request(
    make_llm: MakeLLM, EchoExecutor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = EchoExecutor()
    llm = make_llm(executor)
    monkeypatch.setattr(llm.front.processor, "process", lambda output: {}["gone"])
    with pytest.raises(EngineError, match="the output loop failed: KeyError: 'gone'"):
        await last(llm, "abc", params(), "r")
    await until(lambda: executor.is_shut_down)
    with pytest.raises(EngineError, match="the output loop failed"):
        await last(llm, "abc", params(), "later")


async def test_when_one_completion_fails_the_others_of_its_request_are_ended_too(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    llm = make_llm(EchoExecutor(fail_row_at=3))
    with pytest.raises(EngineError, match="no token"):
        await last(llm, "abc", params(190, n=3), "r")
    await until(lambda: not llm.front.core.has_unfinished())
    assert llm.metrics()["steps_total"] < 50
    assert (await last(llm, "abc", params(3), "later")).finished


async def test_shutdown_ends_pending_requests_and_leaves_no_thread(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    llm = make_llm(executor)
    llm.check_health()
    tasks = [asyncio.create_task(last(llm, "abc", params(190), str(i))) for i in range(12)]
    await until(lambda: executor.num_steps > 5)
    llm.shutdown()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, RequestAborted) for result in results)
    assert executor.is_shut_down
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-")]
    llm.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        await last(llm, "abc", params(), "later")


async def test_shutdown_does_not_hang_on_a_step_that_never_ends(make_llm: MakeLLM, EchoExecutor: Any) -> None:
    executor = EchoExecutor()
    executor.gate.clear()
    llm = make_llm(executor)
    task = asyncio.create_task(last(llm, "abc", params(100), "r"))
    await until(llm.front.core.has_work)
    await asyncio.wait_for(asyncio.to_thread(llm.shutdown, timeout_s=0.2), 10)
    with pytest.raises(EngineError):
        await task


def test_two_event_loops_share_one_engine(echo_front: Any) -> None:
    llm = AsyncLLM.from_front(echo_front())
    results: dict[int, str] = {}

    def work(number: int) -> None:
        results[number] = asyncio.run(last(llm, f"loop {number} ", params(14), str(number))).outputs[0].text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llm.shutdown()
    assert results == {number: f"loop {number} " * 2 for number in range(4)}
