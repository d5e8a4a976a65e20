"""Prompts become requests, or a `UsageError` that says what is wrong, with the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.core.api.errors import UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.engine.requests import RequestMaker, prompt_list, sampling_list


@pytest.fixture
def maker(byte_tokenizer: Any) -> RequestMaker:
    return RequestMaker(
        tokenizer=byte_tokenizer, vocab_size=260, max_model_len=20, eos_token_ids=(256,), scheduling_policy="priority"
    )


def make(maker: RequestMaker, prompt: Any, **params: Any) -> Any:
    return maker.make(prompt, SamplingParams(**params), "r")[0]


def test_text_is_tokenised_and_the_output_clipped_to_the_context(maker: RequestMaker, byte_tokenizer: Any) -> None:
    request, text = maker.make("hello", SamplingParams(max_tokens=100), "r", priority=3)
    assert text == "hello"
    assert request.prompt_token_ids.tolist() == byte_tokenizer.encode("hello")
    assert request.prompt_token_ids.dtype == np.int32
    assert (request.max_tokens, request.priority, request.eos_token_ids) == (15, 3, (256,))
    assert make(maker, "hello", max_tokens=4).max_tokens == 4
    assert make(maker, "hello", max_tokens=None).max_tokens == 15


@pytest.mark.parametrize("ids", [[1, 2, 259], (1, 2, 259), np.array([1, 2, 259])])
def test_token_ids_are_taken_as_they_are(maker: RequestMaker, ids: Any) -> None:
    request, text = maker.make({"prompt_token_ids": ids, "cache_salt": "tenant"}, SamplingParams(), "r")
    assert request.prompt_token_ids.tolist() == [1, 2, 259]
    assert text is None
    assert request.cache_salt == "tenant"


def test_truncation_keeps_the_end(maker: RequestMaker) -> None:
    assert make(maker, {"prompt_token_ids": list(range(50))}, truncate_prompt_tokens=3).prompt_token_ids.tolist() == [
        47,
        48,
        49,
    ]


def test_truncation_to_the_context_leaves_room_for_a_token(maker: RequestMaker) -> None:
    request = make(maker, {"prompt_token_ids": list(range(50))}, truncate_prompt_tokens=-1)
    assert (request.prompt_token_ids.tolist(), request.max_tokens) == (list(range(31, 50)), 1)
    assert len(make(maker, {"prompt_token_ids": [1, 2]}, truncate_prompt_tokens=-1).prompt_token_ids) == 2


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("x" * 20, {}, "the prompt has 20 tokens, but the context holds 20 including the output"),
        ("", {}, "the prompt is empty"),
        ({"prompt_token_ids": []}, {}, "the prompt is empty"),
        ({"prompt_token_ids": [1, 260]}, {}, r"token id 260 is outside the vocabulary \(0 to 259\)"),
        ({"prompt_token_ids": [-1]}, {}, "token id -1 is outside the vocabulary"),
        ({"prompt_token_ids": [2**40]}, {}, "outside the vocabulary"),
        ({"prompt_token_ids": [2**70]}, {}, "whole numbers"),
        ({"prompt_token_ids": [1.5]}, {}, "whole numbers"),
        ({"prompt_token_ids": [[1]]}, {}, "whole numbers"),
        ({"prompt_token_ids": "12"}, {}, "must be a list of token ids"),
        ({"promt": "hi"}, {}, "unknown key 'promt' in a prompt; did you mean 'prompt'"),
        ({}, {}, 'needs "prompt" or "prompt_token_ids"'),
        ({"prompt": 3}, {}, '"prompt" must be text, not int'),
        ({"prompt": "a", "cache_salt": 3}, {}, '"cache_salt" must be text'),
        (3, {}, "a prompt must be text or a mapping, not int"),
        ("a", {"stop_token_ids": [260]}, "stop_token_ids: token id 260 is outside the vocabulary"),
        ("a", {"logit_bias": {300: 1.0}}, "logit_bias: token id 300 is outside the vocabulary"),
        ("a", {"logprobs": 500}, "logprobs is 500, more than the vocabulary's 260 tokens"),
    ],
)
def test_a_wrong_request_is_refused_with_the_numbers(maker: RequestMaker, prompt: Any, params: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        make(maker, prompt, **params)
    assert "\n" not in str(raised.value)


def test_a_special_token_that_the_model_has_no_embedding_for_is_refused(byte_tokenizer: Any) -> None:
    maker = RequestMaker(tokenizer=byte_tokenizer, vocab_size=256, max_model_len=20, eos_token_ids=())
    with pytest.raises(UsageError, match=r"token id 256 is outside the vocabulary \(0 to 255\)"):
        make(maker, "a<end>")


def test_params_of_another_type_are_refused(maker: RequestMaker) -> None:
    with pytest.raises(UsageError, match="sampling_params must be a SamplingParams, not dict"):
        maker.make("a", {"temperature": 0}, "r")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1, 2], "a", {"prompt": "b"}], [{"prompt_token_ids": [1, 2]}, "a", {"prompt": "b"}]),
        ([], []),
    ],
)
def test_one_prompt_or_many(prompts: Any, expected: Any) -> None:
    assert prompt_list(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (np.array([1, 2], np.int32), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
    ],
)
def test_arrays_of_token_ids_are_prompts(maker: RequestMaker, prompts: Any, expected: Any) -> None:
    assert [make(maker, prompt).prompt_token_ids.tolist() for prompt in prompt_list(prompts)] == expected


@pytest.mark.parametrize("priority", [1.5, "1", None, True])
def test_a_priority_is_a_whole_number(maker: RequestMaker, priority: Any) -> None:
    with pytest.raises(UsageError, match="priority must be a whole number"):
        maker.make("a", SamplingParams(), "r", priority=priority)


@pytest.mark.parametrize("prompts", [3, None, np.array([1.5]), ["a", 3.5], [None]])
def test_what_is_no_prompt_is_refused(prompts: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        prompt_list(prompts)


def test_sampling_params_are_one_for_all_or_one_each() -> None:
    one, other = SamplingParams(temperature=0), SamplingParams(top_k=5)
    assert sampling_list(None, 2, other) == [other, other]
    assert sampling_list(one, 2, other) == [one, one]
    assert sampling_list([one, other], 2, one) == [one, other]
    with pytest.raises(UsageError, match="2 sampling_params for 3 prompts"):
        sampling_list([one, other], 3, one)
    with pytest.raises(UsageError, match="must be a SamplingParams or a list"):
        sampling_list({"n": 1}, 1, one)  # type: ignore[arg-type]
