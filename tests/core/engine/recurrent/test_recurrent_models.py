"""A model with recurrent layers says, through the whole engine, what it says token by token, however it is scheduled."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.api.errors import PluginError, SelectionError, Unsupported
from octavo.core.engine.beam_search import BeamSearchParams
from octavo.core.worker.caches import GroupCaches

NUM_TOKENS = 10  # over at least one edge
TOLERANCE = 1e-3
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 32, 33)


def draw(*lengths: int, seed: int = 3) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 64, length).tolist() for length in lengths]


def generate(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS, **more: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0, **more})
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def assert_right(outputs: Sequence[RequestOutput], model: Any) -> None:
    for output in outputs:
        for completion in output.outputs:
            model.reference.assert_greedy(output.prompt_token_ids, completion)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_prompts_around_block_edges(model: Any, open_llm: Callable[..., LLM], async_scheduling: bool) -> None:
    llm = open_llm(async_scheduling=async_scheduling)
    outputs = generate(llm, draw(*EDGES))
    assert_right(outputs, model)
    assert len({tuple(ids) for ids in tokens(outputs)}) == len(EDGES), "what a prompt says matters"
    assert len({token for ids in tokens(outputs) for token in ids}) > 16, "too monotonous to prove anything"


def test_the_first_token_is_remembered_over_four_edges(model: Any) -> None:
    """Or no test here would notice a checkpoint that is lost."""
    (prompt,) = draw(32)
    other = [(prompt[0] + 1) % 64, *prompt[1:]]
    ends = [model.reference.logprobs(one)[-1] for one in (prompt, other)]
    assert float((ends[0] - ends[1]).abs().max()) > 20 * TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5, "async_scheduling": False},
        {"max_num_batched_tokens": 5, "block_size": 4},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 3},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 3, "async_scheduling": False},
        {"max_num_seqs": 2, "enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_chunks_and_batches_change_nothing(model: Any, open_llm: Callable[..., LLM], options: dict[str, Any]) -> None:
    assert_right(generate(open_llm(**options), draw(*EDGES)), model)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_preempted_requests_come_back_to_the_same_tokens(
    model: Any, open_llm: Callable[..., LLM], async_scheduling: bool
) -> None:
    """Four requests reach each edge together, and there are three blocks for them."""
    llm = open_llm(num_blocks=8, block_size=4, max_model_len=28, async_scheduling=async_scheduling)
    assert_right(generate(llm, draw(*[2] * 6), 24), model)
    stats = llm.front.core.stats()
    assert stats.preemptions_total > 0
    assert stats.kv_usage == 0


def test_completions_of_one_prompt(model: Any, open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    prompts = draw(5, 8, 17)
    outputs = generate(llm, prompts, n=3)
    assert_right(outputs, model)
    assert [len(output.outputs) for output in outputs] == [3, 3, 3]
    for output in generate(llm, prompts, n=3, temperature=1.5, seed=5):
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
        for completion in output.outputs:
            model.reference.assert_logprobs(output.prompt_token_ids, completion)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_cached_prefix_starts_from_its_last_checkpoint(
    model: Any, open_llm: Callable[..., LLM], gated_states: Callable[[], Any], async_scheduling: bool
) -> None:
    llm = open_llm(async_scheduling=async_scheduling)
    prompts = draw(7, 8, 9, 20, 32)
    first = generate(llm, prompts)
    assert [output.num_cached_tokens for output in first] == [0] * 5
    before = gated_states().num_copies
    again = generate(llm, prompts)
    assert [output.num_cached_tokens for output in again] == [0, 0, 8, 16, 24]  # never the last token
    assert tokens(again) == tokens(first)
    assert gated_states().num_copies > before
    related = [prompts[4][:20] + prompts[0], prompts[4] + tokens(first)[4][:9], [*prompts[3][:15], 1]]
    outputs = generate(llm, related)
    assert [output.num_cached_tokens for output in outputs] == [16, 40, 8]
    for some in (first, again, outputs):
        assert_right(some, model)
    assert_right(generate(llm, [prompts[4]], prompt_logprobs=1), model)


def test_a_reset_cache_has_no_checkpoints(model: Any, open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    prompts = draw(20, 32)
    for _ in range(2):
        outputs = generate(llm, prompts)
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert_right(outputs, model)
        assert llm.reset_prefix_cache()


def test_an_abort_leaves_the_others_alone(model: Any, open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(max_num_batched_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    for num_steps in (1, 3, 8):
        prompts = draw(8, 20, 17)
        streams = [llm.stream({"prompt_token_ids": prompt}, params) for prompt in prompts]
        for stream in streams:
            next(stream)
        for _ in range(num_steps):
            next(streams[0])
        streams[0].close()
        assert_right([list(stream)[-1] for stream in streams[1:]], model)
        assert llm.front.core.stats().kv_usage == 0
        assert_right(generate(llm, prompts), model)


@pytest.mark.parametrize("options", [{}, {"num_blocks": 12, "async_scheduling": False}], ids=["roomy", "tight"])
def test_beams(model: Any, open_llm: Callable[..., LLM], options: dict[str, Any]) -> None:
    llm = open_llm(block_size=4, **options)
    prompts = draw(3, 8, 13)
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output in zip(prompts, found, strict=True):
        expected = model.reference.beams(prompt, 3, 10)
        assert [sequence.tokens[len(prompt) :] for sequence in output.sequences] == [made for made, _ in expected]
        assert [one.cum_logprob for one in output.sequences] == pytest.approx([total for _, total in expected], abs=TOLERANCE)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_crowd_with_common_prefixes_in_few_blocks(model: Any, open_llm: Callable[..., LLM], async_scheduling: bool) -> None:
    random = np.random.default_rng([int(os.environ.get("TEST_SEED", "0")), async_scheduling])
    stems = draw(30, 30, seed=9)
    prompts = [
        [*stems[random.integers(2)][: random.integers(1, 31)], *random.integers(0, 64, random.integers(1, 3)).tolist()]
        for _ in range(8)
    ]
    llm = open_llm(block_size=4, num_blocks=18, max_num_batched_tokens=20, async_scheduling=async_scheduling)
    for _ in range(2):
        assert_right(generate(llm, prompts, 8, n=2), model)
    assert llm.front.core.stats().prefix_hits_total > 0
    assert llm.front.core.stats().kv_usage == 0


def test_a_block_that_one_beam_gives_back_goes_to_the_next(
    model: Any, open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a prefix in every free block, a beam's block is given away while a copy from it is still to come."""
    overlaps = []
    copy_blocks = GroupCaches.copy_blocks

    def watch(self: GroupCaches, pairs: Any) -> None:
        overlaps.append(bool(set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist())))
        copy_blocks(self, pairs)

    monkeypatch.setattr(GroupCaches, "copy_blocks", watch)
    llm = open_llm(block_size=4, num_blocks=14)
    for prompt in draw(10, 10, 10, seed=4):
        assert_right(generate(llm, [prompt], 15), model)  # 24 tokens are computed: no block is left half full
    core, (first, second) = llm.front.core, draw(2, 3)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    for name, prompt in (("first", first), ("second", second)):
        request, _ = llm.front.maker.make({"prompt_token_ids": prompt}, params, name)
        core.add(msgspec.structs.replace(request, stepwise=True))
    core.step()
    for name, token in (("first", 7), ("second", 8)):
        core.fork(name, 0, new_index=1, token_id=token)
        core.finish(name, 0, reason="stop")
    made: dict[str, list[int]] = {"first": [], "second": []}
    owners: dict[int, str] = {}
    while len(made["second"]) < 6:
        output = core.step()
        owners |= {started.slot: started.request_id for started in output.started}
        for slot, (token, *_) in zip(output.slots.tolist(), output.token_ids.tolist(), strict=True):
            made[owners[slot]].append(token)
            core.advance(owners[slot], 1)
    assert any(overlaps)
    for name, prompt in (("first", [*first, 7]), ("second", [*second, 8])):
        core.abort(name)
        expected = [int(row.argmax()) for row in model.reference.logprobs([*prompt, *made[name]])[len(prompt) - 1 : -1]]
        assert made[name] == expected


def test_guesses_are_refused(open_llm: Callable[..., LLM]) -> None:
    """A state can't take a rejected token back, whatever the backend's manifest says."""
    with pytest.raises(SelectionError, match="multi_token_decode"):
        open_llm(speculative="ngram")
    with pytest.raises(Unsupported, match="recurrent layers can't take any out of their states"):
        open_llm(speculative="ngram", attention_backend="recurrent=gated-states-guessing")


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("gated-states-in-blocks", r"kv_format\(\) with unit 'block' for recurrent layers, expected 'request'"),
        ("gated-states-unfinished", r"has no forward\(\)"),
    ],
)
def test_a_backend_that_keeps_no_states_is_refused(open_llm: Callable[..., LLM], backend: str, message: str) -> None:
    with pytest.raises(PluginError, match=f"attention backend '{backend}' .*{message}"):
        open_llm(attention_backend=f"recurrent={backend}")
