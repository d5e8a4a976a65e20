"""The n-gram proposer alone, with the fake worker, and with a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_worker import FakeModel
from harness import Harness, full_group, make_request
from hypothesis import given
from hypothesis import strategies as st

from octavo import LLM, SamplingParams
from octavo.core.api.errors import Unsupported
from octavo.core.api.scheduling import Proposer
from octavo.core.loading.catalogue import find
from octavo.core.scheduling.ngram import NgramProposer


def guess(tokens: list[int], count: int = 4) -> list[int]:
    (found,) = NgramProposer().propose([np.array(tokens, np.int32)], count)
    return found.tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        ([1, 2, 3, 9, 5, 2], []),  # one token alone says too little
        ([7, 1, 2, 3, 4, 8, 1, 2, 3, 4], [8, 1, 2, 3]),
        ([1, 2, 5, 5, 5, 5, 1, 2, 6, 6, 6, 6, 1, 2], [6, 6, 6, 6]),  # the latest place
        ([9, 1, 2, 5, 5, 5, 5, 8, 1, 2, 6, 6, 6, 6, 9, 1, 2], [5, 5, 5, 5]),  # unless an earlier one agrees further back
        ([1, 2, 1, 2, 1, 2], [1, 2]),
        ([4], []),
        ([4, 4], []),
    ],
)
def test_what_followed_before_is_guessed_again(tokens: list[int], expected: list[int]) -> None:
    assert guess(tokens) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6))
def test_a_guess_continues_an_earlier_pair(tokens: list[int], count: int) -> None:
    found = guess(tokens, count)
    assert len(found) <= count
    text = ",".join(map(str, tokens))
    if found:
        assert ",".join(map(str, tokens[-2:] + found)) in text


def test_guesses_save_steps_and_change_no_token() -> None:
    figures = {}
    for proposer in (None, NgramProposer()):
        harness = Harness([full_group(100)], proposer=proposer, model=FakeModel(vocab=8, memory=2), max_model_len=128)
        for i in range(3):
            harness.add(make_request(str(i), [i, i + 1], max_tokens=90, n=2))
        figures[proposer is not None] = harness.run(), harness.tokens
        harness.check_outputs()
    print(f"{figures[False][0]} steps without guesses, {figures[True][0]} with")
    assert figures[True][1] == figures[False][1]
    assert figures[True][0] < 0.5 * figures[False][0]


def test_guesses_are_dropped_before_anyone_is_preempted_for_them() -> None:
    harness = Harness([full_group(12, 2)], proposer=NgramProposer(), model=FakeModel(vocab=4, memory=1), max_num_seqs=2)
    for i in range(2):
        harness.add(make_request(str(i), [i, 3, 1], max_tokens=8))
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().preemptions_total == 0
    assert harness.worker.num_accepted > 0


def test_a_worker_side_proposer_is_refused_for_now() -> None:
    class OnDevice(Proposer):
        location = "worker"

        def propose(self, tokens: Any, num_speculative_tokens: int) -> Any:
            return tokens

    with pytest.raises(Unsupported, match="run in the worker"):
        Harness([full_group(10)], proposer=OnDevice())


REPETITIVE = ["red green blue black white pink grey. " * 4 + "red green", "the cat sat on the mat. " * 8 + "the cat"]
MISLEADING = ["a dog and a cat, a dog and a bird, a dog and a", "one two three, one two four, one two five, one two"]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"async_scheduling": False},
    {"speculative": "ngram", "num_speculative_tokens": 6},
    {"scheduling_policy": "priority", "max_num_batched_tokens": 16, "num_blocks": 14, "prefix_hash": "xxh3"},
)


@pytest.mark.model
@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_a_real_model_says_the_same_under_every_policy_budget_pool_and_with_guesses() -> None:
    path: Path = find("smollm2").path
    if not path.is_file():
        pytest.skip("smollm2 isn't on this machine: octavo models pull smollm2")
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    said, steps = [], []
    for options in OPTIONS:
        common: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": "256MiB",
        }
        with LLM(str(path), platform="cpu", **common, **options) as llm:
            priority = [1, 0] if "scheduling_policy" in options else None
            outputs = llm.generate(REPETITIVE, params, use_tqdm=False, priority=priority)
            steps.append(llm.front.core.stats().steps_total)
            outputs += llm.generate(MISLEADING, params, use_tqdm=False, priority=priority)
            said.append([output.outputs[0].token_ids for output in outputs])
            figures = llm.metrics()
            if "speculative" in options:
                drafts, accepted = figures["draft_tokens_total"], figures["accepted_tokens_total"]
                print(f"{accepted:.0f} of {drafts:.0f} guesses were right")
                assert 0 < accepted < drafts - 10, "the texts must bring right and wrong guesses"
    print(f"plain decoding took {steps[0]} steps, n-gram speculation {steps[1]}")
    assert all(tokens == said[0] for tokens in said)
    assert steps[1] <= 0.5 * steps[0]


def test_log_probabilities_come_for_the_tokens_that_are_kept() -> None:
    harness = Harness([full_group(60)], proposer=NgramProposer(), model=FakeModel(vocab=6, memory=1))
    for i in range(6):
        harness.add(make_request(str(i), [i, 3, 1, 3, 1], max_tokens=20, eos=(i,), logprobs=0, n=1 + i % 2))
    harness.run()
    harness.check_outputs()  # compares them, stops in the middle of accepted guesses included
    assert harness.worker.num_accepted > 0
