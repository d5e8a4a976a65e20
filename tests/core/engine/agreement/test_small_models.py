"""Every architecture, from tokens to tokens through the whole engine, agrees with transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import VOCAB_SIZE

from octavo import LLM, RequestOutput, SamplingParams

NUM_TOKENS = 32
TOLERANCE = 5e-4


def prompts() -> list[dict[str, list[int]]]:
    """Of several lengths, two of them with a long prefix in common; longer than the sliding windows of 12."""
    random = np.random.default_rng(5)
    made = [random.integers(0, 256, length).tolist() for length in (1, 17, 40, 64)]
    return [{"prompt_token_ids": ids} for ids in [*made, made[3][:50] + made[0]]]


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **more)


def open_engine(folder: Path, **options: Any) -> LLM:
    defaults = {"platform": "cpu", "attention_backend": "reference", "dtype": "float32", "kv_cache_memory_bytes": "16M"}
    return LLM(str(folder), **{**defaults, **options})


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def full(entry: Any) -> torch.Tensor:
    """One position's log probabilities, of the whole vocabulary; the least likely token may be missing."""
    assert len(entry) >= VOCAB_SIZE - 1
    values = torch.full((VOCAB_SIZE,), torch.nan)
    for token_id, logprob in entry.items():
        values[token_id] = logprob.logprob
    return values


def test_greedy_tokens_and_log_probabilities_agree(small_model: Any) -> None:
    folder, reference = small_model
    with open_engine(folder) as llm:
        outputs = llm.generate(prompts(), greedy(logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE))
    for output in outputs:
        made = output.outputs[0]
        expected = reference.logprobs([*output.prompt_token_ids, *made.token_ids])
        first = len(output.prompt_token_ids) - 1
        assert made.token_ids == expected[first:-1].argmax(-1).tolist()
        assert made.logprobs is not None
        found = torch.stack([full(entry) for entry in [*(output.prompt_logprobs or [])[1:], *made.logprobs]])
        assert found.shape == expected[:-1].shape
        assert float((found - expected[:-1]).abs().nan_to_num().max()) < TOLERANCE
        assert len(set(made.token_ids)) > NUM_TOKENS // 4, "too monotonous to prove anything"
        own = expected[first:-1].gather(1, torch.tensor(made.token_ids)[:, None]).sum()
        assert made.cumulative_logprob == pytest.approx(float(own), abs=TOLERANCE * NUM_TOKENS)
    assert tokens(outputs)[2] == reference.generate(outputs[2].prompt_token_ids, NUM_TOKENS)


@pytest.fixture(scope="session")
def plain(small_model: Any) -> list[list[int]]:
    """Each prompt on its own, nothing cached, one step at a time."""
    with open_engine(small_model[0], enable_prefix_caching=False, async_scheduling=False) as llm:
        return [tokens(llm.generate([prompt], greedy()))[0] for prompt in prompts()]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 7}, id="chunked"),
        pytest.param({"async_scheduling": False, "block_size": 32, "max_num_seqs": 2}, id="one step at a time, two requests"),
        pytest.param({"num_blocks": 9}, id="preempted"),
        pytest.param({"num_blocks": 9, "max_num_batched_tokens": 7, "async_scheduling": False}, id="preempted and chunked"),
    ],
)
def test_tokens_do_not_depend_on_scheduling(small_model: Any, plain: list[list[int]], options: dict[str, Any]) -> None:
    with open_engine(small_model[0], **options) as llm:
        assert tokens(llm.generate(prompts(), greedy())) == plain
        windows_only = set(llm.config.plugins.attention_backend) == {"sliding_window"}  # these need no more as they grow
        if "num_blocks" in options and not windows_only:
            assert llm.front.core.stats().preemptions_total > 0


def test_tokens_do_not_depend_on_batching_and_the_prefix_cache(small_model: Any, plain: list[list[int]]) -> None:
    with open_engine(small_model[0]) as llm:
        assert tokens(llm.generate(prompts(), greedy())) == plain
        again = llm.generate(prompts(), greedy())
    assert tokens(again) == plain
    assert max(output.num_cached_tokens or 0 for output in again) >= 48
