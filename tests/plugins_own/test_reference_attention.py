"""The reference backend on any mixture of features, and on what `test_reference_against_oracle` leaves out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.cpu.platform import CpuPlatform
from octavo.conformance.cases import Case, RowLengths, make_case
from octavo.conformance.driver import compare, run_backend, same_bits
from octavo.core.api.attention import AttentionGroup, AttentionSpec, LayerParams
from octavo.core.api.errors import Unsupported
from octavo.core.discovery import installed
from octavo.plugins.attention.reference.backend import ReferenceAttention

PLATFORM = CpuPlatform()
MANIFEST = installed().load("attention", "reference").manifest


def spec(**changes: object) -> AttentionSpec:
    values = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24, "head_dim_v": 24, "scale": 0.3, "dtype": "float32"}
    values |= {"kv_dtype": "float32"} | changes
    return AttentionSpec(**values)  # type: ignore[arg-type]


def check(case: Case) -> None:
    run = run_backend(ReferenceAttention, PLATFORM, case, lse=True)
    for deviation in compare(run, case, MANIFEST.numerics):
        assert deviation, f"{case.name}: {deviation}"
    assert run.inputs_kept
    for name, wanted in case.blocks_after().items():
        assert same_bits(run.blocks[name][1:], wanted[1:]), f"{case.name}: cache {name}"


lengths = st.builds(RowLengths, query_len=st.integers(1, 40), context_len=st.integers(0, 90))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(lengths, min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (5, 1), (3, 3)]),
    head_dim=st.sampled_from([1, 2, 7, 33]),
    head_dim_v=st.sampled_from([1, 5, 33]),
    block_size=st.integers(1, 40),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 60),
    soft_cap=st.none() | st.just(2.5),
    alibi=st.booleans(),
    sinks=st.booleans(),
    pad=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_any_combination_of_features_agrees_with_the_oracle(
    rows, heads, head_dim, head_dim_v, block_size, causal, window, soft_cap, alibi, sinks, pad, seed
) -> None:
    drawn = spec(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, head_dim_v=head_dim_v, causal=causal, window=window,
        soft_cap=soft_cap, alibi=alibi, sinks=sinks, kind="full_attention" if window is None else "sliding_window",
    )  # fmt: skip
    check(make_case("drawn", drawn, rows, seed=seed, block_size=block_size, pad_reqs=pad, pad_tokens=2 * pad))


def test_a_long_row_is_cut_and_agrees_with_the_oracle() -> None:
    rows = [RowLengths(query_len=700, context_len=40), RowLengths(query_len=1, context_len=900)]
    for changes in ({}, {"window": 100, "kind": "sliding_window"}, {"causal": False}, {"causal": False, "window": 50}):
        check(make_case("long", spec(num_heads=2, num_kv_heads=1, **changes), rows, seed=3, block_size=16))


def test_upper_bounds_on_the_host_are_enough() -> None:
    """While sampled tokens are still on the device, the host knows lengths only as bounds."""
    for changes in ({}, {"window": 13, "kind": "sliding_window"}, {"causal": False}):
        rows = [RowLengths(query_len=3, context_len=50), RowLengths(query_len=1, context_len=8), RowLengths(query_len=20)]
        case = make_case("bounds", spec(**changes), rows, seed=5, decode_query_len=3)
        exact = run_backend(ReferenceAttention, PLATFORM, case)
        backend = ReferenceAttention(case.group(), PLATFORM)
        (kv,) = backend.allocate_kv(case.num_blocks)
        kv = backend.write_blocks(kv, np.arange(case.num_blocks, dtype=np.int32), case.cache_blocks())
        batch = case.batch(PLATFORM)
        loose = replace(
            batch.host,
            seq_lens=batch.host.seq_lens + np.int32(7),
            num_computed_tokens=batch.host.num_computed_tokens + np.int32(7),
            exact=False,
        )
        plan = backend.plan(replace(batch, host=loose))
        out = torch.full((case.num_tokens, 4, 24), torch.nan)
        q, k, v = case.step_tensors()
        result = backend.forward(q, k, v, kv, plan, case.params, out)
        assert torch.allclose(result.out, exact.out, atol=1e-6)


def test_a_token_without_a_slot_is_written_nowhere_but_the_null_block() -> None:
    case = make_case("prefix hit", spec(), [RowLengths(query_len=1, context_len=31)], seed=2)
    backend = ReferenceAttention(case.group(), PLATFORM)
    (kv,) = backend.allocate_kv(case.num_blocks)
    batch = replace(case.batch(PLATFORM), slot_mapping=torch.tensor([-1]))
    backend.write_kv(kv, torch.ones(1, 2, 24), torch.ones(1, 2, 24), backend.plan(batch), case.params)
    assert all(buffer[1:].abs().max() == 0 for buffer in kv.values())


@pytest.mark.parametrize("kv_dtype", MANIFEST.kv_dtypes)
def test_blocks_are_copied_read_and_written_whole(kv_dtype: str) -> None:
    group = AttentionGroup(name="g", spec=spec(kv_dtype=kv_dtype), layers=(0, 3), block_size=3, kv_group=0)
    backend = ReferenceAttention(group, PLATFORM)
    first, second = backend.allocate_kv(9)
    assert sum(buffer.nbytes for buffer in first.values()) == 9 * backend.kv_format().bytes_per_unit
    generator = torch.Generator().manual_seed(1)
    data = {
        name: torch.randint(0, 120, (3, *buffer.shape[1:]), generator=generator).to(buffer.dtype)
        for name, buffer in first.items()
    }
    kv = backend.write_blocks(first, np.array([7, 2, 4], np.int32), data)
    kv = backend.copy_blocks(kv, np.array([[7, 1], [4, 8]], np.int32))
    read = backend.read_blocks(kv, np.array([1, 2, 8, 7, 3], np.int32))
    for name, wanted in data.items():
        assert same_bits(read[name][:4], wanted[[0, 1, 2, 0]])
        assert not read[name][4].to(torch.float32).any()
        assert not second[name].to(torch.float32).any()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 513}, "513"),
        ({"kind": "recurrent"}, "recurrent"),
        ({"kv_dtype": "uint8"}, "uint8"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    group = AttentionGroup(name="g", spec=spec(**changes), layers=(0,), block_size=16, kv_group=0)
    with pytest.raises(Unsupported, match=named):
        ReferenceAttention(group, PLATFORM)


@pytest.mark.parametrize(("feature", "field"), [("sinks", "sinks"), ("alibi", "alibi_slopes")])
def test_missing_layer_parameters_are_named(feature: str, field: str) -> None:
    case = make_case("missing", spec(**{feature: True}), [RowLengths(query_len=1, context_len=3)], seed=1)
    with pytest.raises(Unsupported, match=field):
        run_backend(ReferenceAttention, PLATFORM, replace(case, params=LayerParams(index=4)))
