from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.worker.sampling_op import FAILED, PROMPT_BIT, Penalties, SamplingBatch, verify_and_sample

VOCAB = 40


def _logits(seed: int, rows: int = 1) -> Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def _random(rows: int, **parameters: Any) -> SamplingBatch:
    uniform = torch.from_numpy(np.random.default_rng(11).random(rows, np.float32))
    fields: dict[str, Any] = {"temperature": torch.ones(rows), "uniform": uniform, "readable": True}
    return SamplingBatch(num_random=rows, **(fields | parameters))


def _counts(logits: Tensor, draws: int, **parameters: Any) -> np.ndarray[Any, Any]:
    tokens = verify_and_sample(logits.expand(draws, -1).clone(), _random(draws, **parameters)).token_ids
    return np.bincount(tokens[:, 0].numpy(), minlength=VOCAB)


def _assert_follows(observed: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Chi-square well above its 0.1 % point, with rare tokens put together so that each class expects at least 8."""
    draws = observed.sum()
    assert (observed[expected == 0] == 0).all(), "a token of probability 0 was drawn"
    common = expected * draws >= 8
    classes = [(observed[i], expected[i] * draws) for i in np.flatnonzero(common)]
    rest = expected[~common].sum() * draws
    if rest > 0:
        classes.append((observed[~common].sum(), rest))
    statistic = sum((o - e) ** 2 / e for o, e in classes)
    freedom = max(len(classes) - 1, 1)
    limit = freedom + 3.1 * (2 * freedom) ** 0.5 + 8
    assert statistic < limit, f"{statistic} with {freedom} degrees of freedom"


def _filtered(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray[Any, Any]:
    """The distribution after min-p, top-k and top-p, one token at a time in float64."""
    probs = logits.double().softmax(-1).numpy()
    kept = probs >= min_p * probs.max()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if top_k:
        kept &= probs >= probs[order[top_k - 1]]
    total, sum_so_far = probs[kept].sum(), 0.0
    for token in order:
        if not kept[token]:
            continue
        if sum_so_far >= top_p * total:
            kept[token] = False
        sum_so_far += probs[token]
    return np.where(kept, probs, 0) / probs[kept].sum()


def test_greedy_rows_take_the_largest() -> None:
    logits = _logits(0, 6)
    expected = logits.argmax(-1)
    sampled = verify_and_sample(logits.clone(), SamplingBatch(num_random=0))
    assert sampled.token_ids.dtype == torch.int32
    assert sampled.token_ids[:, 0].tolist() == expected.tolist()
    assert sampled.num_accepted is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_random_rows_follow_the_distribution_at_their_temperature(temperature: float) -> None:
    draws, logits = 20000, _logits(1)
    observed = _counts(logits, draws, temperature=torch.full((draws,), temperature))
    _assert_follows(observed, (logits[0].double() / temperature).softmax(-1).numpy())


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.8, "min_p": 0.02}], ids=str
)
def test_filters_keep_what_a_token_by_token_reference_keeps(filters: dict[str, Any], readable: bool) -> None:
    draws, logits = 8000, _logits(2)
    parameters: dict[str, Any] = {name: torch.full((draws,), value) for name, value in filters.items()}
    observed = _counts(logits, draws, max_top_k=int(filters.get("top_k", 0)), readable=readable, **parameters)
    expected = _filtered(logits[0], **filters)
    assert set(np.flatnonzero(observed)) <= set(np.flatnonzero(expected))
    _assert_follows(observed, expected)


@given(st.floats(2**-100, 2.0, width=32))
def test_the_largest_number_stays_below_every_total(total: float) -> None:
    largest = np.float32(1 - 2**-24)
    assert largest * np.float32(total) < np.float32(total)


def test_the_ends_of_the_unit_interval_draw_the_ends_of_the_vocabulary() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 0] = logits[:, -1] = -torch.inf
    tokens = verify_and_sample(logits, _random(2, uniform=torch.tensor([0.0, 1 - 2**-24]))).token_ids[:, 0]
    assert tokens.tolist() == [1, VOCAB - 2]


def test_a_nucleus_wider_than_the_first_guess_is_found_all_the_same() -> None:
    """Top-p of an almost flat distribution over a large vocabulary keeps more tokens than the widths tried first."""
    generator = torch.Generator().manual_seed(5)
    logits = 0.01 * torch.randn(4, 9000, generator=generator)
    fields = {"top_p": torch.full((4,), 0.9), "uniform": torch.tensor([0.0, 0.3, 0.7, 0.9999])}
    looked = verify_and_sample(logits.clone(), _random(4, readable=True, **fields)).token_ids
    sorted_ = verify_and_sample(logits.clone(), _random(4, readable=False, **fields)).token_ids
    assert looked.tolist() == sorted_.tolist()


def test_top_p_next_to_nothing_is_greedy() -> None:
    logits = _logits(3, 50)
    tokens = verify_and_sample(logits.clone(), _random(50, top_p=torch.full((50,), 1e-6))).token_ids[:, 0]
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_filters_of_one_row_leave_the_others_alone() -> None:
    logits = _logits(4, 3)
    plain = _random(3)
    mixed = _random(
        3,
        top_k=torch.tensor([0, 2, 0]),
        top_p=torch.tensor([1.0, 0.5, 1.0]),
        min_p=torch.tensor([0.0, 0.3, 0.0]),
        max_top_k=2,
    )
    without = verify_and_sample(logits.clone(), plain).token_ids[:, 0].tolist()
    with_filters = verify_and_sample(logits.clone(), mixed).token_ids[:, 0].tolist()
    assert [without[0], without[2]] == [with_filters[0], with_filters[2]]


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = _logits(5, 4)
    together = SamplingBatch(
        num_random=2,
        random=torch.tensor([1, 3]),
        temperature=torch.tensor([0.7, 1.5]),
        uniform=torch.tensor([0.2, 0.9]),
        readable=True,
    )
    tokens = verify_and_sample(logits.clone(), together).token_ids[:, 0].tolist()
    alone = verify_and_sample(
        logits[[1, 3]].clone(), _random(2, temperature=together.temperature, uniform=together.uniform)
    ).token_ids[:, 0]
    assert [tokens[1], tokens[3]] == alone.tolist()
    assert [tokens[0], tokens[2]] == logits[[0, 2]].argmax(-1).tolist()


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 7), min_size=1, max_size=12),  # prompt
            st.lists(st.integers(0, 7), max_size=12),  # output
            st.sampled_from([0.5, 1.0, 1.3]),
            st.sampled_from([-1.0, 0.0, 0.6]),
            st.sampled_from([-0.5, 0.0, 0.4]),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_penalties_are_those_of_a_token_by_token_reference(rows: list[Any], seed: int) -> None:
    logits = torch.randn(len(rows), 8, generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(len(rows), 8, dtype=torch.int32)
    expected = logits.double().clone()
    for row, (prompt, output, repetition, presence, frequency) in enumerate(rows):
        for token in range(8):
            count = output.count(token)
            seen[row, token] = count + (PROMPT_BIT if token in prompt else 0)
            value = float(expected[row, token])
            if token in prompt or count:
                value = value / repetition if value > 0 else value * repetition
            expected[row, token] = value - frequency * count - (presence if count else 0.0)
    columns = torch.tensor([list(row[2:]) for row in rows])
    penalties = Penalties(
        rows=torch.arange(len(rows)),
        state=torch.arange(len(rows)),
        seen=seen,
        repetition=columns[:, 0],
        presence=columns[:, 1],
        frequency=columns[:, 2],
    )
    changed = logits.clone()
    before = seen.clone()
    verify_and_sample(changed, SamplingBatch(num_random=0, penalties=penalties))
    torch.testing.assert_close(changed.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen, before), "looking at the counts must not change them"


def test_biases_and_token_masks_decide_what_can_be_drawn() -> None:
    logits = torch.zeros(3, VOCAB)
    batch = SamplingBatch(
        num_random=0,
        bias_rows=torch.tensor([0, 1, 1]),
        bias_tokens=torch.tensor([7, 2, 3]),
        bias_values=torch.tensor([5.0, 1.0, -torch.inf]),
        allowed=torch.arange(VOCAB).expand(3, -1) != 0,
    )
    assert verify_and_sample(logits, batch).token_ids[:, 0].tolist() == [7, 2, 1]


@pytest.mark.parametrize("kind", ["greedy", "random", "filtered"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_with_nan_or_infinite_logits_fail_and_others_do_not(kind: str, value: float) -> None:
    logits = _logits(6, 3)
    logits[1, 4] = value
    filters = {"top_p": torch.full((3,), 0.9), "top_k": torch.full((3,), 4), "max_top_k": 4}
    batch = SamplingBatch(num_random=0) if kind == "greedy" else _random(3, **(filters if kind == "filtered" else {}))
    tokens = verify_and_sample(logits, batch).token_ids[:, 0].tolist()
    assert tokens[1] == FAILED
    assert min(tokens[0], tokens[2]) >= 0


def test_a_row_in_which_no_token_is_allowed_fails() -> None:
    allowed = torch.ones(2, VOCAB, dtype=torch.bool)
    allowed[0] = False
    for batch in (SamplingBatch(num_random=0, allowed=allowed), _random(2, allowed=allowed)):
        tokens = verify_and_sample(_logits(7, 2), batch).token_ids[:, 0].tolist()
        assert tokens[0] == FAILED
        assert tokens[1] >= 0


def test_drafts_are_accepted_as_long_as_greedy_agrees() -> None:
    logits = _logits(8, 7)
    best = logits.argmax(-1).tolist()
    wrong = (best[5] + 1) % VOCAB
    # Requests with 3, 0 and 2 drafts: all accepted; none to accept; the second one wrong.
    drafts = torch.tensor([best[0:3], [-1, -1, -1], [wrong, best[6], -1]], dtype=torch.int32)
    rows = torch.tensor([[0, 1, 2, 3], [4, 4, 4, 4], [5, 6, 6, 6]])
    sampled = verify_and_sample(logits, SamplingBatch(num_random=0, drafts=drafts, draft_rows=rows))
    assert sampled.num_accepted is not None
    assert sampled.num_accepted.tolist() == [3, 0, 0]
    assert sampled.token_ids.tolist() == [best[0:4], [best[4], -1, -1, -1], [best[5], -1, -1, -1]]


def test_a_failure_behind_a_rejected_draft_is_no_failure() -> None:
    logits = _logits(9, 2)
    logits[1, 0] = torch.nan
    best = int(logits[0].argmax())
    rows = torch.tensor([[0, 1]])
    rejected = torch.tensor([[(best + 1) % VOCAB]], dtype=torch.int32)
    accepted = torch.tensor([[best]], dtype=torch.int32)
    fine = verify_and_sample(logits.clone(), SamplingBatch(num_random=0, drafts=rejected, draft_rows=rows))
    assert fine.token_ids.tolist() == [[best, -1]]
    failed = verify_and_sample(logits.clone(), SamplingBatch(num_random=0, drafts=accepted, draft_rows=rows))
    assert failed.token_ids.tolist() == [[FAILED, FAILED]]


def test_verified_drafts_leave_the_distribution_as_it_is() -> None:
    """First token of a row with a draft, and the token after an accepted one, follow the model's own distributions."""
    draws, vocab = 12000, 5
    generator = torch.Generator().manual_seed(12)
    first, second = torch.randn(vocab, generator=generator), torch.randn(vocab, generator=generator)
    draft = int(first.argsort()[-2])
    logits = torch.stack([first, second]).repeat(draws, 1)
    rows = torch.arange(2 * draws).view(draws, 2)
    drafts = torch.full((draws, 1), draft, dtype=torch.int32)
    sampled = verify_and_sample(logits, _random(2 * draws, drafts=drafts, draft_rows=rows))
    assert sampled.num_accepted is not None
    tokens = sampled.token_ids.numpy()
    probs = first.double().softmax(-1).numpy()
    _assert_follows(np.bincount(tokens[:, 0], minlength=vocab), probs)
    accepted = sampled.num_accepted.numpy() == 1
    assert (tokens[accepted, 0] == draft).all()
    assert abs(accepted.mean() - probs[draft]) < 4 * (probs[draft] * (1 - probs[draft]) / draws) ** 0.5
    _assert_follows(np.bincount(tokens[accepted, 1], minlength=vocab), second.double().softmax(-1).numpy())


def test_penalties_count_the_drafts_before_a_position() -> None:
    logits = torch.zeros(3, 4)
    logits[:, 1] = 1.0
    penalties = Penalties(
        rows=torch.arange(3),
        state=torch.zeros(3, dtype=torch.int64),
        seen=torch.zeros(1, 4, dtype=torch.int32),
        repetition=torch.ones(3),
        presence=torch.zeros(3),
        frequency=torch.full((3,), 0.6),
        earlier=torch.tensor([[-1, -1], [1, -1], [1, 1]]),
    )
    verify_and_sample(logits, SamplingBatch(num_random=0, penalties=penalties))
    torch.testing.assert_close(logits[:, 1], torch.tensor([1.0, 0.4, -0.2]))


def test_nothing_makes_the_host_wait(without_host_reads: Callable[[], Any]) -> None:
    penalties = Penalties(
        rows=torch.tensor([1]),
        state=torch.tensor([0]),
        seen=torch.zeros(1, VOCAB, dtype=torch.int32),
        repetition=torch.tensor([1.2]),
        presence=torch.tensor([0.1]),
        frequency=torch.tensor([0.1]),
    )
    batch = SamplingBatch(
        num_random=2,
        random=torch.tensor([0, 2]),
        temperature=torch.ones(2),
        uniform=torch.tensor([0.1, 0.8]),
        top_k=torch.tensor([3, 0]),
        top_p=torch.tensor([0.9, 0.5]),
        min_p=torch.tensor([0.0, 0.1]),
        max_top_k=3,
        bias_rows=torch.tensor([0]),
        bias_tokens=torch.tensor([1]),
        bias_values=torch.tensor([0.5]),
        penalties=penalties,
        drafts=torch.tensor([[4], [-1]], dtype=torch.int32),
        draft_rows=torch.tensor([[0, 1], [2, 2]]),
    )
    logits = _logits(10, 3)
    with without_host_reads():
        sampled = verify_and_sample(logits, batch)
    assert sampled.token_ids.shape == (2, 2)
