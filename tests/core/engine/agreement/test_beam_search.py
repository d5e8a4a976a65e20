"""`LLM.beam_search` finds what transformers' beam search finds, and keeps one copy of what beams share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.api.errors import UsageError
from octavo.core.engine.beam_search import BeamSearchParams

NUM_TOKENS = 12
EOS = 256


def prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(0, 256, length).tolist() for length in (3, 20, 45)]


def open_engine(folder: Path, **options: Any) -> LLM:
    defaults = {"platform": "cpu", "attention_backend": "reference", "dtype": "float32", "kv_cache_memory_bytes": "16M"}
    return LLM(str(folder), **{**defaults, **options})


@torch.inference_mode()
def expected(reference: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """(prompt and tokens, score) of transformers' beams, best first."""
    ids = torch.tensor([prompt])
    found = reference.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=True if params.early_stopping else "never",
        do_sample=False,
        eos_token_id=None if params.ignore_eos else EOS,
        pad_token_id=259,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [[token for token in row if token != 259] for row in found.sequences.tolist()]
    return list(zip(rows, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=4, max_tokens=NUM_TOKENS),
        BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, length_penalty=0.0),
        BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, length_penalty=2.0, early_stopping=True),
        BeamSearchParams(beam_width=2, max_tokens=NUM_TOKENS, ignore_eos=True),
    ],
)
def test_beams_agree_with_transformers(llama: Any, params: BeamSearchParams) -> None:
    folder, reference = llama
    with open_engine(folder, max_num_seqs=8) as llm:
        outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts()], params)
    for prompt, output in zip(prompts(), outputs, strict=True):
        wanted = expected(reference, prompt, params)
        assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in wanted]
        for sequence, (_, score) in zip(output.sequences, wanted, strict=True):
            assert sequence.score == pytest.approx(score, abs=1e-4)


def test_sequences_end_at_the_end_token_and_are_sorted_by_score(llama: Any) -> None:
    folder, _ = llama
    with open_engine(folder) as llm:
        outputs = llm.beam_search(
            [{"prompt_token_ids": ids} for ids in prompts()], BeamSearchParams(beam_width=6, max_tokens=6)
        )
    found = [sequence for output in outputs for sequence in output.sequences]
    assert {sequence.finish_reason for sequence in found} == {"stop", "length"}
    assert all((sequence.tokens[-1] == EOS) == (sequence.finish_reason == "stop") for sequence in found)
    for output in outputs:
        scores = [sequence.score for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)


def test_the_result_does_not_depend_on_the_schedule_or_the_pool(llama: Any) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=NUM_TOKENS, ignore_eos=True)
    many = [{"prompt_token_ids": prompt} for prompt in prompts()]
    results = []
    for options in ({}, {"async_scheduling": False, "max_num_seqs": 4}, {"max_num_batched_tokens": 7}, {"num_blocks": 20}):
        with open_engine(llama[0], **options) as llm:
            results.append([[sequence.tokens for sequence in output.sequences] for output in llm.beam_search(many, params)])
            assert llm.reset_prefix_cache()
    assert results[1:] == results[:1] * 3


def test_one_beam_is_greedy(llama: Any) -> None:
    with open_engine(llama[0]) as llm:
        (output,) = llm.beam_search(prompts()[1], BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))
    assert output.sequences[0].tokens[20:] == llama[1].generate(prompts()[1], 8)


def test_beams_hold_one_copy_of_the_prompt(llama: Any) -> None:
    """12 blocks of prompt; four beams of at most 16 tokens more may each add their own two."""
    prompt = np.random.default_rng(3).integers(0, 256, 192).tolist()
    with open_engine(llama[0], num_blocks=1 + 12 + 4 * 2) as llm:
        (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True))
        assert len(output.sequences) == 4
        assert llm.front.core.stats().preemptions_total == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 0, "max_tokens": 4}, "beam_width must be a whole number of at least 1, not 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be a whole number"),
        ({"beam_width": 2, "max_tokens": 4, "length_penalty": float("nan")}, "length_penalty must be a number"),
    ],
)
def test_wrong_parameters_are_refused(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BeamSearchParams(**values)


def test_beams_that_have_no_room_together_take_turns(llama: Any) -> None:
    params = BeamSearchParams(beam_width=8, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = []
    for num_blocks in (7, 200):
        with open_engine(llama[0], num_blocks=num_blocks) as llm:
            (output,) = llm.beam_search([prompts()[2]], params)
            found.append([sequence.tokens for sequence in output.sequences])
            assert (llm.front.core.stats().preemptions_total > 0) == (num_blocks == 7)
            assert llm.reset_prefix_cache()
    assert found[0] == found[1]


def test_more_beams_than_may_run_are_refused(llama: Any) -> None:
    with open_engine(llama[0], max_num_seqs=2) as llm, pytest.raises(UsageError, match="beam_width 3 exceeds max_num_seqs 2"):
        llm.beam_search([1, 2, 3], BeamSearchParams(beam_width=3, max_tokens=4))


def test_a_search_beside_an_open_stream_is_refused_and_the_stream_goes_on(llama: Any) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    with open_engine(llama[0]) as llm:
        stream = llm.stream("abc", SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        next(stream)
        with pytest.raises(UsageError, match="beam search runs alone, but a stream is open"):
            llm.beam_search("ab", params)
        assert len(list(stream)[-1].outputs[0].token_ids) == 6
        assert len(llm.beam_search("ab", params)[0].sequences) == 2
