"""`LLM` and `AsyncLLM` as people construct them, on a tiny real model."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.core.api.errors import BrokenModel, EngineError, UsageError
from octavo.core.config import EngineConfig
from octavo.core.loading.tokenizer import Tokenizer

OPTIONS: dict[str, Any] = {
    "platform": "cpu",
    "attention_backend": "reference",
    "dtype": "float32",
    "kv_cache_memory_bytes": "4M",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "enable_prefix_caching": False,
    "seed": 3,
    "long_prefill_token_threshold": 16,
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}{{ suffix }}"


@pytest.fixture
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), **OPTIONS) as made:
        yield made


def test_every_option_is_a_keyword_and_every_choice_becomes_explicit(llm: LLM) -> None:
    flat = llm.config.flat()
    assert {name: flat[name] for name in OPTIONS} == {
        **OPTIONS,
        "attention_backend": {"full_attention": "reference"},
        "kv_cache_memory_bytes": 4_000_000,
    }
    assert isinstance(llm.get_tokenizer(), Tokenizer)
    assert llm.front.core.startup_s > 0


def test_a_configuration_does_as_well(tiny_llama: Path) -> None:
    config = EngineConfig.from_flat(model=str(tiny_llama), **OPTIONS)
    with LLM.from_config(config) as llm:
        assert llm.generate("w1 w2", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids


def test_an_unknown_option_is_refused_with_near_matches(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="unknown option 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(str(tiny_llama), max_num_seq=3)


def test_chat_needs_a_template(llm: LLM) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        llm.chat([{"role": "user", "content": "w1"}])


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user", "content": "w1"}, [None], [["w1"]], 3])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    llm.front.source.chat_template = TEMPLATE
    with pytest.raises(UsageError, match="must be a list of messages"):
        llm.chat(messages)


@pytest.mark.parametrize("priority", [3, "1", [1.5], ["1"]])
def test_what_is_no_list_of_priorities_is_refused(llm: LLM, priority: Any) -> None:
    with pytest.raises(UsageError, match="priority must be a"):
        llm.generate(["w1"], priority=priority)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 20},
        {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1},
        {"top_k": 2**31 - 1},
        {"truncate_prompt_tokens": 2**31 - 1},
        {"seed": 2**63 - 1, "temperature": 1},
        {"seed": -(2**63), "temperature": 1},
        {"stop_token_ids": list(range(40, 64)), "min_tokens": 3},
        {"logit_bias": dict.fromkeys(range(64), 100)},
        {"repetition_penalty": 1e6, "presence_penalty": -2, "frequency_penalty": 2},
        {"temperature": 1e6},
        {"temperature": 1e-300},
        {"stop": ["w9"] * 1000},
    ],
)
def test_no_extreme_of_one_request_harms_the_others(llm: LLM, values: dict[str, Any]) -> None:
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (before,) = llm.generate("w1 w2 w3", plain)
    both = llm.generate(["w1 w2 w3", "w4 w5"], [plain, SamplingParams(**{"max_tokens": 6, **values})])
    assert both[0].outputs[0].token_ids == before.outputs[0].token_ids
    assert both[1].finished


def test_minus_one_asks_for_the_whole_vocabulary(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    whole, one = llm.generate(["w1 w2", "w1 w2"], [params, SamplingParams(max_tokens=2, temperature=0, logprobs=1)])
    for position in (*(whole.prompt_logprobs or ())[1:], *(whole.outputs[0].logprobs or ())):
        assert position is not None
        assert sorted(position) == list(range(64))
        assert math.isclose(sum(math.exp(entry.logprob) for entry in position.values()), 1, rel_tol=1e-4)
    assert all(len(position) == 1 for position in one.outputs[0].logprobs or ()), "greedy: the chosen one is the best"


def test_end_tokens_outside_the_vocabulary_are_ignored_with_one_warning(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2**40, 64, 62]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with LLM(str(folder), **OPTIONS) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(llm.generate("w1", params)[0].outputs[0].token_ids) == 2
        assert llm.chat([{"role": "user", "content": "w1"}], params)[0].prompt_token_ids == [1]
        assert llm.front.maker.eos_token_ids == (62, 2)  # 2 is config.json's
    warnings = [record.getMessage() for record in caplog.records if "end tokens" in record.getMessage()]
    assert warnings == [f"the model's files name end tokens outside its vocabulary of 64, ignored: {2**40}, 64"]


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    tokenizer = llm.front.tokenizer
    llm.front.source.chat_template = TEMPLATE
    llm.front.tokenizer = Tokenizer(
        tokenizer.raw,
        bos_token_id=None,
        eos_token_ids=tokenizer.eos_token_ids,
        special_ids=tokenizer.special_ids,
        chat_template=TEMPLATE,
    )
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    one = [{"role": "user", "content": "w1"}]
    two = [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w3"}]
    (single,) = llm.chat(one, params)
    assert (single.prompt, single.prompt_token_ids) == ("w1 ", [1])
    assert [output.prompt_token_ids for output in llm.chat([one, two], params)] == [[1], [2, 3]]
    (suffixed,) = llm.chat(one, params, chat_template_kwargs={"suffix": "w9"})
    assert suffixed.prompt_token_ids == [1, 9]


def test_a_tokenizer_that_fails_leaves_no_worker(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.core.loading.source import ModelSource

    def fail(self: ModelSource) -> Tokenizer:
        raise BrokenModel("the tokenizer is broken")

    monkeypatch.setattr(ModelSource, "tokenizer", fail)
    with pytest.raises(BrokenModel, match="the tokenizer is broken"):
        LLM(str(tiny_llama), **{**OPTIONS, "seed": 4})  # a configuration that nothing has resolved before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-")]


def test_a_progress_bar_is_drawn_on_a_terminal_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate(["w1"] * 3, params)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(["w1"] * 3, params, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(["w1"] * 3, params)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Generating" in err
    assert "3/3" in err


async def test_the_asynchronous_front_gives_the_same_tokens(llm: LLM, tiny_llama: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = llm.generate("w1 w2 w3", params)[0].outputs[0].token_ids
    other = AsyncLLM(str(tiny_llama), **OPTIONS)
    try:
        outputs = [output async for output in other.generate("w1 w2 w3", params, "r")]
        assert other.config.flat() == llm.config.flat()
        assert other.metrics()["steps_total"] >= 8
    finally:
        other.shutdown()
    assert outputs[-1].outputs[0].token_ids == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_seeded_samples_repeat_and_completions_differ(llm: LLM, temperature: float) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=temperature, seed=7, ignore_eos=True)
    first, second = (llm.generate("w1 w2", params)[0] for _ in range(2))
    tokens = [completion.token_ids for completion in first.outputs]
    assert tokens == [completion.token_ids for completion in second.outputs]
    assert len({tuple(ids) for ids in tokens}) == (1 if temperature == 0 else 3)


def test_log_probabilities_of_the_whole_vocabulary_add_up_to_one(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=2.0, seed=1, logprobs=64, prompt_logprobs=64)
    output = llm.generate("w1 w2 w3", params)[0]
    positions = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())[1:]]
    assert len(positions) == 4
    for position in positions:
        assert position is not None
        assert position.keys() == set(range(64))
        assert sum(math.exp(entry.logprob) for entry in position.values()) == pytest.approx(1, abs=1e-4)
        assert {entry.rank for entry in position.values()} == set(range(1, 65))


def test_a_forked_child_is_told_that_the_engine_stayed_in_its_parent(llm: LLM, tiny_llama: Path) -> None:
    other = AsyncLLM(str(tiny_llama), **OPTIONS)
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    def fails(call: Callable[[], object]) -> bool:
        try:
            call()
        except EngineError as error:
            return "start one after the fork" in str(error)
        return False

    def step_async() -> object:
        try:
            other.generate({"prompt_token_ids": [1]}, params, "r").__anext__().send(None)
        except StopIteration as answer:
            return answer.value
        return None

    child = os.fork()
    if child == 0:
        signal.alarm(20)  # what hangs must not outlive the test
        calls = (
            lambda: llm.generate([1, 2], params),
            lambda: next(llm.stream({"prompt_token_ids": [1, 2]}, params)),
            step_async,
        )
        good = all(fails(call) for call in calls)
        llm.close()
        other.shutdown()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other.shutdown()
    assert llm.generate([1, 2], params)[0].finished
