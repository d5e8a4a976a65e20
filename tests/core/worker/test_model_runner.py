from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.api.errors import Unsupported
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import Drafts, StepPlan, StepResult, TableUpdate

GREEDY = SamplingParams(temperature=0)
ByHand = Callable[[Sequence[int], int], list[int]]


def _rows(*slots: int) -> np.ndarray[Any, Any]:
    return np.array(slots, np.int32)


def _column(results: Sequence[StepResult], row: int) -> list[int]:
    return [int(result.sampled[row, 0]) for result in results]


@pytest.mark.parametrize("streams", [False, True])
def test_greedy_tokens_are_those_of_the_model_alone(bench: Any, by_hand: ByHand, streams: bool) -> None:
    runner = bench(streams=streams)
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9]]
    plan = runner.prefill(*(runner.request(slot, prompt) for slot, prompt in enumerate(prompts)))
    results = [runner.runner.launch(plan).result()]
    results += [runner.runner.launch(StepPlan(step=step)).result() for step in range(1, 8)]
    for row, prompt in enumerate(prompts):
        assert _column(results, row) == by_hand(prompt, 8)


def test_steps_launched_before_results_are_read_give_the_same_tokens(bench: Any, by_hand: ByHand) -> None:
    """Two and three steps in flight: inputs come from the device's own last tokens."""
    runner = bench(streams=True)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    pending = [runner.runner.launch(runner.prefill(*(runner.request(slot, p) for slot, p in enumerate(prompts))))]
    for step in range(1, 9):
        pending.append(runner.runner.launch(StepPlan(step=step)))
        if step % 3 == 0:  # read one now and then, late
            pending[step - 2].result()
    results = [step.result() for step in pending]
    for row, prompt in enumerate(prompts):
        assert _column(results, row) == by_hand(prompt, 9)


def test_requests_come_and_go_while_results_are_on_their_way(bench: Any, by_hand: ByHand) -> None:
    runner = bench(streams=True)
    launch = runner.runner.launch
    pending = [launch(runner.prefill(runner.request(0, [1, 2, 3]), runner.request(1, [4, 5])))]
    pending.append(launch(StepPlan(step=1)))
    # Slot 0 changes hands while two results are unread; rows change order.
    newcomer = runner.request(0, [7, 7, 7, 7])
    plan = StepPlan(step=2, released=_rows(0), new=[newcomer], rows=_rows(1, 0), num_scheduled_tokens=_rows(1, 4))
    pending.append(launch(plan))
    pending.append(launch(StepPlan(step=3)))
    results = [step.result() for step in pending]
    assert _column(results[:2], 0) == by_hand([1, 2, 3], 2)
    assert [*_column(results[:2], 1), *_column(results[2:], 0)] == by_hand([4, 5], 4)
    assert _column(results[2:], 1) == by_hand([7, 7, 7, 7], 2)


def test_a_prompt_in_chunks_is_sampled_at_its_end_only(bench: Any, by_hand: ByHand) -> None:
    runner = bench()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    request = runner.request(4, prompt)
    chunks = [StepPlan(step=0, new=[request], rows=_rows(4), num_scheduled_tokens=_rows(3))]
    chunks += [StepPlan(step=step, rows=_rows(4), num_scheduled_tokens=_rows(count)) for step, count in ((1, 4), (2, 1))]
    results = [runner.runner.launch(plan).result() for plan in chunks]
    assert [int(result.sampled[0, 0]) for result in results] == [-1, -1, *by_hand(prompt, 1)]


def test_shared_blocks_are_read_and_never_written(bench: Any, by_hand: ByHand) -> None:
    """A second request starts from the first one's blocks, computes its last token again, and leaves them as they were."""
    runner = bench()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first = runner.request(0, prompt, room=0)
    runner.runner.launch(runner.prefill(first))
    cache = runner.caches.layers[0].kv["tokens"]
    before = cache[torch.from_numpy(first.block_ids[0]).long()].clone()
    blocks = np.concatenate([first.block_ids[0], runner.blocks(4)])
    again = runner.request(1, prompt, num_computed_tokens=7, num_cached_tokens=8, block_ids=(blocks,))
    results = [runner.runner.launch(StepPlan(step=1, new=[again], rows=_rows(1), num_scheduled_tokens=_rows(1))).result()]
    results.append(runner.runner.launch(StepPlan(step=2)).result())
    assert _column(results, 0) == by_hand(prompt, 2)
    assert torch.equal(cache[torch.from_numpy(first.block_ids[0]).long()], before)


def test_blocks_are_copied_before_anything_is_written(bench: Any, by_hand: ByHand) -> None:
    runner = bench()
    prompt = [1, 2, 3, 4, 5, 6]
    first = runner.request(0, prompt)
    token = int(runner.runner.launch(runner.prefill(first)).result().sampled[0, 0])
    # A fork shares the first block, and gets a copy of the second one, which is half full.
    source = first.block_ids[0][1]
    target, *more = runner.blocks(12)
    table = np.array([first.block_ids[0][0], target, *more], np.int32)
    fork = runner.request(1, [*prompt, 50], num_prompt_tokens=6, num_computed_tokens=6, num_cached_tokens=6, block_ids=(table,))
    plan = StepPlan(
        step=1,
        new=[fork],
        block_copies=(np.array([[source, target]], np.int32),),
        rows=_rows(0, 1),
        num_scheduled_tokens=_rows(1, 1),
    )
    result = runner.runner.launch(plan).result()
    assert result.sampled[:, 0].tolist() == [by_hand([*prompt, token], 1)[0], by_hand([*prompt, 50], 1)[0]]


def test_new_blocks_reach_the_tables(bench: Any, by_hand: ByHand) -> None:
    runner = bench()
    request = runner.request(0, [1, 2, 3], room=1)
    results = [runner.runner.launch(runner.prefill(request)).result()]
    for step in range(1, 7):
        tables = ()
        if (2 + step) % 4 == 0:
            update = TableUpdate(slots=_rows(0), columns=_rows((2 + step) // 4), block_ids=runner.blocks(1))
            tables = (update,)
        results.append(runner.runner.launch(StepPlan(step=step, tables=tables)).result())
    assert _column(results, 0) == by_hand([1, 2, 3], 7)


@pytest.mark.parametrize("streams", [False, True])
def test_drafts_are_verified_and_rolled_back(bench: Any, by_hand: ByHand, streams: bool) -> None:
    runner = bench(streams=streams, num_speculative_tokens=3)
    prompt = [3, 1, 4]
    truth = by_hand(prompt, 8)
    launch = runner.runner.launch
    launch(runner.prefill(runner.request(0, prompt), runner.request(1, [8, 8])))
    right_and_wrong = [truth[1], truth[2], (truth[3] + 1) % 61]
    plan = StepPlan(
        step=1,
        rows=_rows(0, 1),
        num_scheduled_tokens=_rows(4, 1),
        drafts=Drafts(rows=_rows(0), counts=_rows(3), token_ids=_rows(*right_and_wrong)),
    )
    drafted = launch(plan)
    after = launch(StepPlan(step=2)).result()  # launched before the verification is read: the worker waits for it
    result = drafted.result()
    assert result.num_accepted is not None
    assert result.num_accepted.tolist() == [2, 0]
    other = by_hand([8, 8], 3)
    assert result.sampled.tolist() == [[*truth[1:4], -1], [other[1], -1, -1, -1]]
    assert after.sampled[:, 0].tolist() == [truth[4], other[2]]


def test_seeded_tokens_are_the_same_with_and_without_drafts(bench: Any) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.5, top_p=0.9)
    plain = bench()
    expected = plain.generate(plain.request(0, [3, 1, 4], sampling), 6)
    runner = bench(num_speculative_tokens=3)
    first = runner.runner.launch(runner.prefill(runner.request(0, [3, 1, 4], sampling))).result()
    plan = StepPlan(
        step=1,
        rows=_rows(0),
        num_scheduled_tokens=_rows(4),
        drafts=Drafts(rows=_rows(0), counts=_rows(3), token_ids=_rows(*expected[1:4])),
    )
    drafted = runner.runner.launch(plan).result()
    last = runner.runner.launch(StepPlan(step=2)).result()
    assert [*first.sampled[0], *drafted.sampled[0], *last.sampled[0]] == expected


def test_seeds_do_not_depend_on_the_batch(bench: Any) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=1),
        SamplingParams(temperature=0.9, seed=2, top_k=7),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.2, seed=3, top_p=0.8, min_p=0.01),
        SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.2, logprobs=2),
    ]
    alone = []
    for slot, sampling in enumerate(params):
        single = bench()
        alone.append(single.generate(single.request(slot, [7, slot], sampling), 8))
    runner = bench()
    requests = [runner.request(slot, [7, slot], sampling) for slot, sampling in enumerate(params)]
    # They don't start together, and rows are in another order.
    results: list[list[int]] = [[] for _ in params]
    order: list[int] = []
    for step in range(12):
        new = [requests[step]] if step < len(requests) else []
        order = [request.slot for request in new] + order
        counts = _rows(*(len(requests[slot].token_ids) if slot == step else 1 for slot in order))
        plan = StepPlan(step=step, new=new, rows=_rows(*order), num_scheduled_tokens=counts)
        sampled = runner.runner.launch(plan).result().sampled[:, 0]
        for slot, token in zip(order, sampled.tolist(), strict=True):
            results[slot].append(token)
    assert [tokens[:8] for tokens in results] == alone


def test_seeds_do_not_depend_on_who_joins_a_steady_batch(bench: Any) -> None:
    first, second = SamplingParams(temperature=1.1, seed=1), SamplingParams(temperature=1.3, seed=2)
    alone = []
    for slot, sampling in enumerate((first, second)):
        single = bench()
        alone.append(single.generate(single.request(slot, [7, slot], sampling), 9))
    runner = bench()
    launch = runner.runner.launch
    results = [launch(runner.prefill(runner.request(0, [7, 0], first))).result()]
    results += [launch(StepPlan(step=step)).result() for step in (1, 2, 3)]
    join = StepPlan(step=4, new=[runner.request(1, [7, 1], second)], rows=_rows(0, 1), num_scheduled_tokens=_rows(1, 2))
    results += [launch(plan).result() for plan in (join, StepPlan(step=5), StepPlan(step=6))]
    # One of them alone again, and the other back after a pause.
    results.append(launch(StepPlan(step=7, rows=_rows(0), num_scheduled_tokens=_rows(1))).result())
    results.append(launch(StepPlan(step=8, rows=_rows(0, 1), num_scheduled_tokens=_rows(1, 1))).result())
    assert _column(results, 0) == alone[0]
    assert [*_column(results[4:7], 1), *_column(results[8:], 1)] == alone[1][:4]


def test_completions_of_one_request_differ_and_repeat(bench: Any) -> None:
    def run(index: int) -> list[int]:
        single = bench()
        return single.generate(single.request(0, [1, 2], SamplingParams(seed=9, temperature=1.5), index=index), 10)

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_a_resumed_request_goes_on_with_the_same_tokens(bench: Any) -> None:
    """Preempted, then computed again from the start: penalties, seeds and min_tokens carry on as if nothing had happened."""
    sampling = SamplingParams(
        temperature=1.0, seed=6, repetition_penalty=1.4, frequency_penalty=0.3, min_tokens=5, stop_token_ids=[11, 12]
    )
    single = bench()
    expected = single.generate(single.request(0, [1, 2, 3], sampling), 8)
    runner = bench()
    runner.generate(runner.request(0, [1, 2, 3], sampling), 4)
    resumed = runner.request(5, [1, 2, 3, *expected[:4]], sampling, num_prompt_tokens=3, request_id="r0")
    plan = runner.prefill(resumed, step=9)
    plan.released = _rows(0)
    results = [runner.runner.launch(plan).result()]
    results += [runner.runner.launch(StepPlan(step=step)).result() for step in (10, 11, 12)]
    assert _column(results, 0) == expected[4:]


def test_stop_tokens_are_forbidden_until_min_tokens(bench: Any, by_hand: ByHand) -> None:
    """Two tokens are made likelier than all others, but one stops and the other is the end of text."""
    runner = bench()
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[42], logit_bias={42: 50.0, 43: 40.0})
    plain = by_hand([1, 2], 1)[0]
    tokens = runner.generate(runner.request(0, [1, 2], sampling, eos_token_ids=(43,)), 4)
    assert tokens[:2] == [plain, by_hand([1, 2, plain], 1)[0]]
    assert tokens[2:] == [42, 42]


def test_a_logit_bias_is_added(bench: Any, by_hand: ByHand) -> None:
    runner = bench()
    assert runner.generate(runner.request(0, [1], SamplingParams(temperature=0, logit_bias={42: 100.0})), 3) == [42] * 3
    plan = runner.prefill(runner.request(0, [1, 2]), step=3)
    plan.released = _rows(0)
    token = int(runner.runner.launch(plan).result().sampled[0, 0])
    assert token == by_hand([1, 2], 1)[0] != 42, "the slot's next owner has none"


def test_penalties_follow_the_output(bench: Any) -> None:
    """A bias makes one token win; each time it is out, the frequency penalty takes from it, until another wins."""
    runner = bench()
    sampling = SamplingParams(temperature=0, logit_bias={42: 11.0}, frequency_penalty=2.0)
    tokens = runner.generate(runner.request(0, [1, 42], sampling), 8)
    assert tokens[:4] == [42] * 4, "the prompt doesn't count"
    assert tokens.count(42) < 8
    # Another request in the same slot starts with a clean slate.
    again = runner.request(0, [1, 42], sampling, room=4)
    plan = runner.prefill(again, step=20)
    plan.released = _rows(0)
    assert runner.runner.launch(plan).result().sampled[0, 0] == 42


def test_requests_with_penalties_come_and_go(bench: Any) -> None:
    """Joining while others are under way and taking over slots, each says what it says alone."""
    rng = np.random.default_rng(0)
    runner = bench()
    live: dict[int, tuple[list[int], SamplingParams, list[int], Any]] = {}  # slot → prompt, parameters, output, blocks

    def leave(slot: int) -> int:
        prompt, sampling, output, blocks = live.pop(slot)
        single = bench()
        assert output == single.generate(single.request(0, prompt, sampling), len(output))
        runner.give_back(blocks)
        return slot

    for step in range(40):
        released = [leave(slot) for slot in sorted(live) if rng.random() < 0.25]
        new = []
        for slot in set(range(8)) - set(live):
            if rng.random() < 0.5:
                sampling = SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.0 + rng.random())
                new.append(runner.request(slot, [5, int(rng.integers(60))], sampling if rng.random() < 0.8 else GREEDY))
                live[slot] = (new[-1].token_ids.tolist(), new[-1].sampling, [], new[-1].block_ids[0])
        rows = sorted(slot for slot in live if len(live[slot][2]) < 12)
        if not rows:
            continue
        counts = _rows(*(len(live[slot][0]) if not live[slot][2] else 1 for slot in rows))
        plan = StepPlan(step=step, released=_rows(*released), new=new, rows=_rows(*rows), num_scheduled_tokens=counts)
        for slot, token in zip(rows, runner.runner.launch(plan).result().sampled[:, 0].tolist(), strict=True):
            live[slot][2].append(token)


def _scores(tokens: Sequence[int]) -> torch.Tensor:
    """log-softmax of the logits behind a sequence, computed apart from the worker."""
    import zlib

    print_ = zlib.crc32(np.asarray(tokens, np.int32).tobytes()) & 0xFFFF
    waves = torch.arange(1, 62, dtype=torch.float32)
    return (3 * torch.sin(print_ * torch.tensor(0.7) + waves * waves)).log_softmax(-1)


def test_logprobs_are_the_models_own(bench: Any) -> None:
    """Before temperature, penalties and bias; the token itself, then the best, and its rank."""
    runner = bench()
    odd = SamplingParams(temperature=1.5, seed=4, logit_bias={7: 3.0}, presence_penalty=1.0, logprobs=3)
    requests = [
        runner.request(0, [1, 2], GREEDY),
        runner.request(1, [3], odd),
        runner.request(2, [4], SamplingParams(logprobs=0)),
    ]
    result = runner.runner.launch(runner.prefill(*requests)).result()
    logprobs = result.logprobs
    assert logprobs is not None
    assert logprobs.rows.tolist() == [1, 2]
    for line, (row, prompt, wanted) in enumerate(((1, [3], 3), (2, [4], 0))):
        scores, token = _scores(prompt), int(result.sampled[row, 0])
        best = scores.topk(wanted)
        assert logprobs.token_ids[line, : 1 + wanted].tolist() == [token, *best.indices.tolist()]
        assert logprobs.token_ids[line, 1 + wanted :].tolist() == [-1] * (3 - wanted)
        expected = torch.cat([scores[token : token + 1], best.values])
        np.testing.assert_allclose(logprobs.logprobs[line, : 1 + wanted], expected, rtol=1e-5)
        assert logprobs.ranks[line] == 1 + int((scores > scores[token]).sum())


def test_logprobs_of_accepted_drafts_come_with_their_row(bench: Any, by_hand: ByHand) -> None:
    runner = bench(num_speculative_tokens=2)
    truth = by_hand([1, 2], 4)
    sampling = SamplingParams(temperature=0, logprobs=1)
    runner.runner.launch(runner.prefill(runner.request(0, [9]), runner.request(1, [1, 2], sampling)))
    plan = StepPlan(
        step=1,
        rows=_rows(0, 1),
        num_scheduled_tokens=_rows(1, 3),
        drafts=Drafts(rows=_rows(1), counts=_rows(2), token_ids=_rows(truth[1], (truth[2] + 1) % 61)),
    )
    logprobs = runner.runner.launch(plan).result().logprobs
    assert logprobs is not None
    assert logprobs.rows.tolist() == [1, 1], "one line for each token that counts"
    assert logprobs.token_ids[:, 0].tolist() == truth[1:3]
    for line, known in enumerate(([1, 2, truth[0]], [1, 2, *truth[:2]])):
        assert logprobs.logprobs[line, 0] == pytest.approx(float(_scores(known).max()), rel=1e-5)


def test_prompt_logprobs_cover_every_prompt_token_but_the_first(bench: Any) -> None:
    runner = bench()
    prompt = [3, 1, 4, 1, 5, 9, 2]
    asked = runner.request(0, prompt, SamplingParams(temperature=0, prompt_logprobs=2))
    other = runner.request(1, [8, 8, 8])
    lines: list[tuple[int, list[int], float, int]] = []
    plans = [
        StepPlan(step=0, new=[asked, other], rows=_rows(1, 0), num_scheduled_tokens=_rows(3, 4)),
        StepPlan(step=1, rows=_rows(1, 0), num_scheduled_tokens=_rows(1, 3)),
        StepPlan(step=2),
    ]
    for plan in plans:
        found = runner.runner.launch(plan).result().prompt_logprobs
        if found is not None:
            lines += zip(found.rows.tolist(), found.token_ids.tolist(), found.logprobs[:, 0].tolist(), found.ranks, strict=True)
    assert len(lines) == len(prompt) - 1
    for position, (row, token_ids, logprob, rank) in enumerate(lines, start=1):
        scores = _scores(prompt[:position])
        assert row == 1
        assert token_ids == [prompt[position], *scores.topk(2).indices.tolist()]
        assert logprob == pytest.approx(float(scores[prompt[position]]), rel=1e-5)
        assert rank == 1 + int((scores > scores[prompt[position]]).sum())


@pytest.mark.parametrize("streams", [False, True])
def test_prompt_logprobs_of_the_whole_vocabulary_are_made_in_parts_and_come_back_whole(
    bench: Any, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    runner = bench(max_num_seqs=1, streams=streams)
    asked_at_once: list[int] = []
    logits = runner.model.logits

    def counted(x: Any, residual: Any, rows: Any, step: Any) -> Any:
        asked_at_once.append(len(rows))
        return logits(x, residual, rows, step)

    monkeypatch.setattr(runner.model, "logits", counted)
    prompt = [(7 * i * i + 3) % 61 for i in range(40)]
    sampling = SamplingParams(temperature=0, prompt_logprobs=-1)
    found = runner.runner.launch(runner.prefill(runner.request(0, prompt, sampling))).result().prompt_logprobs
    assert sum(asked_at_once) == 1 + 39
    assert max(asked_at_once) <= 8, "no more rows of logits than a step has memory for"
    assert runner.runner.transfers.device_to_host > 1, "results don't gather on the device"
    assert found.rows.tolist() == [0] * 39
    for position, line in enumerate(found.token_ids.tolist(), start=1):
        scores = _scores(prompt[:position])
        assert line == [prompt[position], *scores.topk(61).indices.tolist()]
        at_hand = torch.tensor(found.logprobs[position - 1])
        torch.testing.assert_close(at_hand, scores[line], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("streams", [False, True])
def test_nan_logits_fail_their_own_row_and_say_why(bench: Any, by_hand: ByHand, streams: bool) -> None:
    runner = bench(streams=streams)
    runner.model.nan_after = 55
    plan = runner.prefill(runner.request(0, [1, 2]), runner.request(1, [3, 55]), runner.request(2, [4], SamplingParams(seed=1)))
    pending = runner.runner.launch(plan)
    after = runner.runner.launch(StepPlan(step=1)).result()
    result = pending.result()
    assert list(result.failed) == [1]
    assert "NaN" in result.failed[1]
    assert result.sampled[1].tolist() == [-1]
    assert int(result.sampled[0, 0]) == by_hand([1, 2], 1)[0]
    assert int(after.sampled[0, 0]) == by_hand([1, 2], 2)[1]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=1, presence_penalty=0.5)], ids=str
)
def test_a_steady_step_takes_one_upload_and_one_wait(bench: Any, sampling: SamplingParams) -> None:
    runner = bench(streams=True)
    runner.runner.launch(runner.prefill(*(runner.request(slot, [1, slot], sampling) for slot in range(6)))).result()
    for step in range(1, 6):
        runner.platform.uploads = runner.platform.waits = 0
        runner.runner.launch(StepPlan(step=step)).result()
        assert (runner.platform.uploads, runner.platform.waits) == (1, 1)
    transfers = runner.runner.transfers
    assert transfers.device_to_host == 6


def test_logprobs_and_drafts_come_back_in_the_same_copy(bench: Any) -> None:
    runner = bench(num_speculative_tokens=2)
    sampling = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1)
    runner.platform.waits = 0
    runner.runner.launch(runner.prefill(runner.request(0, [1, 2, 3], sampling))).result()
    drafts = Drafts(rows=_rows(0), counts=_rows(2), token_ids=_rows(1, 1))
    runner.runner.launch(StepPlan(step=1, rows=_rows(0), num_scheduled_tokens=_rows(3), drafts=drafts)).result()
    assert runner.platform.waits == 2


def test_who_ran_a_layer_is_known_once_it_ran(bench: Any) -> None:
    runner = bench()
    assert runner.caches.runs == {}
    runner.generate(runner.request(0, [1]), 2)
    assert runner.caches.runs == {0: "tokens"}
    assert runner.caches.layers[0].backend is runner.caches.backend, "later steps reach the backend directly"


def test_a_backend_that_fails_at_first_use_is_named(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bench()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("no kernel for this head")

    monkeypatch.setattr(runner.caches.backend, "attend", broken)
    with pytest.raises(Unsupported, match=r"attention backend 'tokens' failed in layer 0.*no kernel for this head"):
        runner.generate(runner.request(0, [1]), 1)


def test_a_backend_that_gives_the_wrong_shape_is_named(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bench()
    monkeypatch.setattr(runner.caches.backend, "attend", lambda q, *args, **kwargs: q[:, :, :0])
    with pytest.raises(Unsupported, match=r"'tokens' gave \(1, 1, 0\).*expected \(1, 1, 1\)"):
        runner.generate(runner.request(0, [1]), 1)


def test_steps_make_the_host_wait_for_nothing(bench: Any, without_host_reads: Callable[[], Any], monkeypatch: Any) -> None:
    """Everything but the fake model's own kernel, which looks at values as a CPU kernel may."""
    runner = bench(streams=True, num_speculative_tokens=2)
    monkeypatch.setattr(runner.caches.backend, "forward", lambda q, k, v, kv, plan, layer, out: (q, kv))
    monkeypatch.setattr("octavo.core.worker.caches._FirstRun.forward", lambda self, q, k, v, kv, *rest: _Result(q, kv))
    sampling = SamplingParams(
        temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=1, presence_penalty=0.5, logprobs=2, prompt_logprobs=1,
        min_tokens=2, stop_token_ids=[3],
    )  # fmt: skip
    drafts = Drafts(rows=_rows(0), counts=_rows(2), token_ids=_rows(1, 1))
    with without_host_reads():
        runner.runner.launch(runner.prefill(runner.request(0, [1, 2, 3], sampling), runner.request(1, [4])))
        runner.runner.launch(StepPlan(step=1))
        runner.runner.launch(StepPlan(step=2, rows=_rows(0, 1), num_scheduled_tokens=_rows(3, 1), drafts=drafts))


class _Result:
    def __init__(self, out: Any, kv: Any) -> None:
        self.out, self.kv = out, kv


def test_numbers_made_ahead_are_those_made_step_by_step(bench: Any) -> None:
    """A steady request draws from numbers made for many steps at once; one whose rows are named each time doesn't."""
    sampling = SamplingParams(temperature=1.2, seed=8)
    steady = bench()
    expected = steady.generate(steady.request(0, [1, 2, 3], sampling, room=50), 45)
    runner = bench()
    results = [runner.runner.launch(runner.prefill(runner.request(0, [1, 2, 3], sampling, room=50))).result()]
    plans = [StepPlan(step=step, rows=_rows(0), num_scheduled_tokens=_rows(1)) for step in range(1, 45)]
    results += [runner.runner.launch(plan).result() for plan in plans]
    assert _column(results, 0) == expected
