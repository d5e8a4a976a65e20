"""The models of the catalogue, from their GGUF files, agree with transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.model

NUM_TOKENS = 64
TOLERANCE = 5e-4
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers greater than 100.",
    "Explain photosynthesis to a child.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Name the planets of the solar system in order.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Was ist die Hauptstadt von Österreich?",
    "Quelle est la différence entre « savoir » et « connaître » ?",
    "日本の首都はどこですか？",
    "Summarise the plot of Cinderella in two sentences.",
    "What is 17 * 23?",
    "Use an emoji 😀 in a sentence about cats.",
    "How do I boil an egg?\n\n1. Short answer\n2. Long answer",
    "Tell me a joke about computers.",
    "In what year did the first human walk on the moon, and who was it?",
]


def greedy(num_tokens: int = NUM_TOKENS, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)


def assert_agrees(outputs: list[RequestOutput], reference: Any) -> None:
    """Given the same tokens before it, transformers would have chosen each token too; and the log probabilities are close."""
    for output in outputs:
        made = output.outputs[0]
        expected = reference.logprobs([*output.prompt_token_ids, *made.token_ids[:-1]])[len(output.prompt_token_ids) - 1 :]
        assert made.token_ids == expected.argmax(-1).tolist(), output.prompt
        assert made.logprobs is not None
        found = torch.tensor([[entry.logprob for entry in entries.values()] for entries in made.logprobs])
        ids = torch.tensor([list(entries) for entries in made.logprobs])
        assert float((found - expected.gather(1, ids)).abs().max()) < TOLERANCE


@pytest.fixture(scope="module")
def smollm2(catalogue_path: Callable[[str], Path]) -> Path:
    return catalogue_path("smollm2")


@pytest.fixture(scope="module")
def answers(smollm2: Path) -> Iterator[list[RequestOutput]]:
    """The 20 questions, batched, with nothing unusual."""
    with LLM(str(smollm2), platform="cpu", attention_backend="reference", dtype="float32", kv_cache_memory_bytes="512M") as llm:
        yield llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], greedy(logprobs=5))


def test_smollm2_agrees_on_20_chat_prompts(
    answers: list[RequestOutput], smollm2: Path, gguf_reference: Callable[[Path], Any]
) -> None:
    reference = gguf_reference(smollm2)
    assert_agrees(answers, reference)
    assert answers[2].outputs[0].token_ids[:16] == reference.generate(answers[2].prompt_token_ids, 16)
    assert "Paris" in answers[0].outputs[0].text


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 7}, id="chunked"),
        pytest.param({"num_blocks": 14, "block_size": 8, "async_scheduling": False}, id="preempted"),
    ],
)
def test_smollm2_says_the_same_however_it_is_scheduled(
    answers: list[RequestOutput], smollm2: Path, open_llm: Callable[..., LLM], options: dict[str, Any]
) -> None:
    llm = open_llm(smollm2, kv_cache_memory_bytes="512M", max_model_len=128, **options)
    some, num_tokens = answers[:4], 24
    outputs = llm.generate([{"prompt_token_ids": answer.prompt_token_ids} for answer in some], greedy(num_tokens))
    assert [output.outputs[0].token_ids for output in outputs] == [answer.outputs[0].token_ids[:num_tokens] for answer in some]
    if "num_blocks" in options:
        assert llm.front.core.stats().preemptions_total > 0
    (again,) = llm.generate([{"prompt_token_ids": some[1].prompt_token_ids}], greedy(num_tokens))
    assert again.outputs[0].token_ids == some[1].outputs[0].token_ids[:num_tokens]


@pytest.mark.prove  # transformers takes a minute to read this file
def test_gemma3_agrees(
    catalogue_path: Callable[[str], Path], open_llm: Callable[..., LLM], gguf_reference: Callable[[Path], Any]
) -> None:
    path = catalogue_path("gemma3-270m")
    llm = open_llm(path, kv_cache_memory_bytes="512M", max_model_len=2048)
    texts = ["The capital of France is", "Once upon a time, in a land far away,", "def fibonacci(n):\n    "]
    outputs = llm.generate(texts, greedy(24, logprobs=5))
    with torch.inference_mode():
        assert_agrees(outputs, gguf_reference(path))
