"""A right kernel passes the tolerance whatever its order of summation; kernels with one known fault each fail it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.api.attention import AttentionSpec
from octavo.api.manifest import Numerics
from octavo.conformance.baseline import EXACT, baseline_attentions
from octavo.conformance.cases import Case, RowLengths, make_case
from octavo.conformance.dtypes import TORCH_DTYPES
from octavo.conformance.oracle import AttentionInput
from octavo.conformance.tolerance import Deviation, check, check_lse

FLOATS = ["float32", "bfloat16", "float16"]
RAGGED = [RowLengths(query_len=1, context_len=130), RowLengths(query_len=1), RowLengths(query_len=13, context_len=40)]


def spec(dtype: str, **changes: object) -> AttentionSpec:
    base: dict[str, object] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "head_dim_v": 32,
        "scale": 32**-0.5,
        "dtype": dtype,
        "kv_dtype": dtype,
    }
    return AttentionSpec(**(base | changes))  # type: ignore[arg-type]


class Kernel:
    """Blockwise attention with an online softmax, in float32; a subclass overrides one step to be wrong there."""

    tile = 24

    def run(self, case: Case) -> tuple[Tensor, Tensor]:
        parts = [self.request(case, request) for request in case.inputs]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def request(self, case: Case, request: AttentionInput) -> tuple[Tensor, Tensor]:
        asked, dtype = case.spec, TORCH_DTYPES[case.spec.dtype]
        repeat = asked.num_heads // asked.num_kv_heads
        q = request.q.float().transpose(0, 1)  # [h, t, d]
        k = self.keys(request.k.float() * case.params.k_scale).transpose(0, 1).repeat_interleave(repeat, 0)
        v = request.k[..., : asked.head_dim_v].float() * case.params.k_scale if request.v is None else request.v.float()
        v = (v if request.v is None else v * case.params.v_scale).transpose(0, 1).repeat_interleave(repeat, 0)
        query = (request.num_computed_tokens + torch.arange(request.query_len))[:, None]
        key = torch.arange(request.seq_len)[None]
        scores = self.mask(asked, self.scores(case, q, k, query, key), query, key)
        return self.accumulate(case, scores, v, dtype)

    def keys(self, k: Tensor) -> Tensor:
        return k

    def scores(self, case: Case, q: Tensor, k: Tensor, query: Tensor, key: Tensor) -> Tensor:
        scores = self.cap(case.spec, q @ k.transpose(1, 2) * case.spec.scale)
        if case.params.alibi_slopes is not None:
            scores = scores + case.params.alibi_slopes[:, None, None] * (key - query)
        return scores

    def cap(self, asked: AttentionSpec, scores: Tensor) -> Tensor:
        return scores if asked.soft_cap is None else asked.soft_cap * torch.tanh(scores / asked.soft_cap)

    def mask(self, asked: AttentionSpec, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return scores.masked_fill(~self.legal(asked, query, key), -torch.inf)

    def legal(self, asked: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        legal = key <= query if asked.causal else torch.ones_like(key - query, dtype=torch.bool)
        return legal if asked.window is None else legal & (key > query - asked.window)

    def accumulate(self, case: Case, scores: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        heads, tokens, keys = scores.shape
        top = torch.full((heads, tokens, 1), -1e30)
        total = torch.zeros(heads, tokens, 1)
        out = torch.zeros(heads, tokens, v.shape[2])
        if case.params.sinks is not None:
            top, total = case.params.sinks[:, None, None].expand(heads, tokens, 1), torch.ones(heads, tokens, 1)
        for start in range(0, keys, self.tile):
            part = scores[:, :, start : start + self.tile]
            higher = torch.maximum(top, part.amax(2, keepdim=True))
            weights, shrink = torch.exp(part - higher), torch.exp(top - higher)
            total = total * shrink + weights.sum(2, keepdim=True)
            out = self.add(out * shrink, weights.to(dtype).float() @ v[:, start : start + self.tile], dtype)
            top = higher
        return (out / total).transpose(0, 1).to(dtype), (top + torch.log(total))[:, :, 0].transpose(0, 1)

    def add(self, out: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
        return out + part


def judge(kernel: Kernel, case: Case, numerics: Numerics = EXACT) -> Deviation:
    return check(kernel.run(case)[0], case.expected, case.baselines(numerics), case.spec, numerics)


def cases(dtype: str) -> dict[str, Case]:
    def make(name: str, rows: Sequence[RowLengths] = RAGGED, seed: int = 7, **changes: object) -> Case:
        options = {key: changes.pop(key) for key in ("q_gain", "needle", "k_scale", "v_scale") if key in changes}
        return make_case(name, spec(dtype, **changes), rows, seed=seed, **options)  # type: ignore[arg-type]

    long = [RowLengths(query_len=1, context_len=2000), RowLengths(query_len=3, context_len=700)]
    listed = [
        make("plain"),
        make("long", long),
        make("non_causal", causal=False),
        make("mha", num_kv_heads=4),
        make("window", window=9),
        make("window_needle", window=40, needle="behind_window"),
        make("oldest_needle", window=40, needle="oldest"),
        make("future_needle", needle="future"),
        make("last_needle", needle="own"),
        make("soft_cap", soft_cap=2.0, q_gain=4.0),
        make("alibi", alibi=True),
        make("sinks", sinks=True),
        make("huge_logits", q_gain=60.0),
        make("scales", k_scale=0.5, v_scale=4.0),
        make("mla", kind="mla", num_kv_heads=1, head_dim=48, head_dim_v=32, scale=48**-0.5),
        make("head_80", head_dim=80, head_dim_v=80, scale=80**-0.5),
    ]
    return {case.name: case for case in listed}


CASES = {dtype: cases(dtype) for dtype in FLOATS}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CASES["float32"])
def test_a_right_kernel_passes(dtype: str, name: str) -> None:
    case = CASES[dtype][name]
    deviation = judge(Kernel(), case)
    assert deviation.passed, str(deviation)
    lse = check_lse(Kernel().run(case)[1], case.expected, case.spec)
    assert lse.passed, str(lse)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CASES["float32"])
def test_the_baseline_itself_passes(dtype: str, name: str) -> None:
    case = CASES[dtype][name]
    deviation = check(case.baselines()[0], case.expected, case.baselines(), case.spec)
    assert deviation.passed, str(deviation)


class ScaleTwice(Kernel):
    def scores(self, case: Case, q: Tensor, k: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return super().scores(case, q * case.spec.scale, k, query, key)


class WindowOneWider(Kernel):
    def legal(self, asked: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        return super().legal(replace(asked, window=(asked.window or 0) + 1), query, key)


class WindowOneNarrower(Kernel):
    def legal(self, asked: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        return super().legal(replace(asked, window=(asked.window or 2) - 1), query, key)


class SoftCapAfterMask(Kernel):
    def cap(self, asked: AttentionSpec, scores: Tensor) -> Tensor:
        return scores

    def mask(self, asked: AttentionSpec, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return super().cap(asked, super().mask(asked, scores, query, key))


class NoSoftCap(Kernel):
    def cap(self, asked: AttentionSpec, scores: Tensor) -> Tensor:
        return scores


class DropsOwnKey(Kernel):
    def legal(self, asked: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        return super().legal(asked, query, key) & ((key < query) | (query == 0))


class SeesOneAhead(Kernel):
    def legal(self, asked: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + 1


class TopLeftMask(Kernel):
    def legal(self, asked: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        return key <= query - query.min()


class ZeroTimesNaN(Kernel):
    def request(self, case: Case, request: AttentionInput) -> tuple[Tensor, Tensor]:
        def padded(stored: Tensor) -> Tensor:
            return torch.cat([stored, torch.full((1, *stored.shape[1:]), float("nan")).to(stored.dtype)])

        assert request.v is not None
        return super().request(case, replace(request, k=padded(request.k), v=padded(request.v)))


class NarrowAccumulation(Kernel):
    def add(self, out: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
        return (out.to(dtype) + part.to(dtype)).float()


class ReversedAlibi(Kernel):
    def scores(self, case: Case, q: Tensor, k: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return super().scores(case, q, k, key, query)


class NoSinks(Kernel):
    def accumulate(self, case: Case, scores: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().accumulate(replace(case, params=replace(case.params, sinks=None)), scores, v, dtype)


class NoScales(Kernel):
    def request(self, case: Case, request: AttentionInput) -> tuple[Tensor, Tensor]:
        return super().request(replace(case, params=replace(case.params, k_scale=1.0, v_scale=1.0)), request)


class TruncatedHead(Kernel):
    def keys(self, k: Tensor) -> Tensor:
        return torch.where(torch.arange(k.shape[2]) < 64, k, torch.zeros(()))


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (ScaleTwice, "plain"),
        (WindowOneWider, "window"),
        (WindowOneWider, "window_needle"),
        (WindowOneNarrower, "window"),
        (WindowOneNarrower, "oldest_needle"),
        (SoftCapAfterMask, "soft_cap"),
        (NoSoftCap, "soft_cap"),
        (DropsOwnKey, "plain"),
        (DropsOwnKey, "last_needle"),
        (SeesOneAhead, "future_needle"),
        (TopLeftMask, "plain"),
        (ZeroTimesNaN, "plain"),
        (ReversedAlibi, "alibi"),
        (NoSinks, "sinks"),
        (NoScales, "scales"),
        (TruncatedHead, "head_80"),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_wrong_kernel_fails(kernel: Callable[[], Kernel], name: str, dtype: str) -> None:
    deviation = judge(kernel(), CASES[dtype][name])
    assert not deviation.passed, str(deviation)
    assert deviation.worst > 1, "its elements alone give it away"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_accumulating_in_the_dtype_fails_by_its_rms_error(dtype: str) -> None:
    deviation = judge(NarrowAccumulation(), CASES[dtype]["long"])
    assert not deviation.passed, str(deviation)
    assert deviation.rms_ratio > 1, str(deviation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prescaled_queries_pass_where_they_are_declared(dtype: str) -> None:
    class Prescaled(Kernel):
        def scores(self, case: Case, q: Tensor, k: Tensor, query: Tensor, key: Tensor) -> Tensor:
            rounded = (q * case.spec.scale).to(TORCH_DTYPES[dtype]).float()
            return rounded @ k.transpose(1, 2)

    case = make_case("prescaled", spec(dtype, scale=0.3), RAGGED, seed=3)
    deviation = judge(Prescaled(), case, Numerics(q_prescaled=True))
    assert deviation.passed, str(deviation)
    assert judge(Prescaled(), case).rms_ratio > deviation.rms_ratio


def test_an_approximate_soft_cap_passes_only_where_it_is_declared() -> None:
    class Approximate(Kernel):
        def cap(self, asked: AttentionSpec, scores: Tensor) -> Tensor:
            assert asked.soft_cap is not None
            bent = torch.tanh(scores / asked.soft_cap)
            return asked.soft_cap * bent * (1 + 2.0**-11 * torch.sin(1000 * bent))

    case = make_case("approximate", spec("float32", soft_cap=20.0), RAGGED, seed=3, q_gain=8.0)
    assert judge(Approximate(), case, Numerics(soft_cap_approximate=True)).passed
    assert not judge(Approximate(), case).passed


def test_the_message_carries_the_values() -> None:
    case = CASES["float32"]["plain"]
    got = Kernel().run(case)[0]
    got[3, 2, 5] = 17.0
    deviation = check(got, case.expected, case.baselines(), case.spec)
    assert deviation.where == (3, 2, 5)
    assert "[3, 2, 5] got 17" in str(deviation)
    assert f"{case.expected.out[3, 2, 5]:.9g}" in str(deviation)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_isnt_finite_fails(value: float) -> None:
    case = CASES["bfloat16"]["plain"]
    got = Kernel().run(case)[0]
    got[0, 0, 0] = value
    assert not check(got, case.expected, case.baselines(), case.spec)


def test_a_wrong_shape_or_dtype_fails_and_says_so() -> None:
    case = CASES["bfloat16"]["plain"]
    got, baselines = Kernel().run(case)[0], case.baselines()
    assert "shape [14, 4, 32], expected [15, 4, 32]" in str(check(got[1:], case.expected, baselines, case.spec))
    wider = check(got.float(), case.expected, baselines, case.spec)
    assert not wider
    assert "dtype torch.float32, expected torch.bfloat16" in str(wider)


def test_lse_without_the_sink_fails() -> None:
    case = CASES["float32"]["sinks"]
    assert not check_lse(NoSinks().run(case)[1], case.expected, case.spec)


def test_the_baseline_rounds_its_weights_to_the_dtype() -> None:
    case = CASES["float32"]["plain"]
    narrow = replace(case.spec, dtype="bfloat16")
    wide, _ = baseline_attentions(case.spec, case.inputs, case.params)
    rounded, _ = baseline_attentions(narrow, case.inputs, case.params)
    assert 0 < (rounded.float() - wide).abs().max() < 0.05


def test_a_tolerance_ten_times_looser_would_let_faults_escape() -> None:
    narrow = judge(NarrowAccumulation(), CASES["bfloat16"]["long"])
    assert narrow.worst < 10
    assert narrow.rms_ratio < 10
    late_cap = judge(SoftCapAfterMask(), CASES["bfloat16"]["soft_cap"])
    assert late_cap.worst < 10
    assert late_cap.rms_ratio < 10
