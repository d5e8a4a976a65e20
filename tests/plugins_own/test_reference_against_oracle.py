"""`reference` does what its manifest declares: right within the oracle's tolerance, on cases drawn from that manifest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from octavo.api.attention import AttentionBackend, AttentionGroup
from octavo.api.errors import Unsupported
from octavo.api.platform import Platform
from octavo.conformance.cases import Case, RowLengths, make_case
from octavo.conformance.declared import declared_cases, needed_features
from octavo.conformance.driver import compare, run_backend, same_bits, same_stored
from octavo.core.discovery import installed


@pytest.fixture(scope="module")
def platform() -> Platform:
    cpu: Platform = installed().load("platform", "cpu")()
    cpu.bind(0)
    return cpu


REFERENCE: type[AttentionBackend] = installed().load("attention", "reference")
CASES = list(declared_cases(REFERENCE.manifest, seed=2024))


def names_once() -> list[str]:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    return names


@pytest.mark.parametrize("case", CASES, ids=names_once())
def test_a_declared_case_is_right(case: Case, platform: Platform) -> None:
    run = run_backend(REFERENCE, platform, case, lse=True)
    for deviation in compare(run, case, REFERENCE.manifest.numerics):
        assert deviation.passed, f"{case.name}, seed {case.seed}: {deviation}"
    assert run.inputs_kept, "q, k or v was changed"
    for name, blocks in case.blocks_after().items():
        assert same_stored(run.blocks[name][1:], blocks[1:]), f"{name} holds something else than was written"


def test_every_feature_that_is_declared_has_a_case() -> None:
    exercised = frozenset().union(*map(needed_features, CASES)) | {"lse", "deterministic"}
    assert frozenset(REFERENCE.manifest.features) <= exercised


def test_every_dtype_and_kind_that_is_declared_has_a_case() -> None:
    assert {case.spec.dtype for case in CASES} == set(REFERENCE.manifest.dtypes)
    pairs = set(product(REFERENCE.manifest.dtypes, REFERENCE.manifest.kv_dtypes))
    assert {(case.spec.dtype, case.spec.kv_dtype) for case in CASES} == pairs
    assert {case.spec.kind for case in CASES} == set(REFERENCE.manifest.kinds)


def test_a_second_run_gives_the_same_bits(platform: Platform) -> None:
    for case in CASES[:12]:
        first, second = (run_backend(REFERENCE, platform, case, lse=True) for _ in range(2))
        assert same_bits(first.out, second.out)


def test_an_upper_bound_on_the_host_is_enough(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """While sampled tokens are still on the device, the host knows only how long a sequence may at most be."""
    spec = replace(next(case for case in CASES if case.name.startswith("window-")).spec, num_kv_heads=2)
    case = make_case("bounds", spec, [RowLengths(query_len=1, context_len=40), RowLengths(query_len=4, context_len=9)], seed=5)
    host_batch = case.host_batch()
    bounds = replace(
        host_batch, seq_lens=host_batch.seq_lens + 2, num_computed_tokens=host_batch.num_computed_tokens + 2, exact=False
    )
    batch = case.batch(platform)
    monkeypatch.setattr(Case, "batch", lambda self, platform: replace(batch, host=bounds))
    for deviation in compare(run_backend(REFERENCE, platform, case), case):
        assert deviation.passed, str(deviation)


def test_copied_blocks_are_bitwise_equal_and_leave_the_source(platform: Platform) -> None:
    case = next(case for case in CASES if case.name.startswith("kv_fp8_e4m3"))
    backend = REFERENCE(case.group(), platform)
    (kv,) = backend.allocate_kv(case.num_blocks)
    ids = torch.arange(case.num_blocks, dtype=torch.int32).numpy()
    kv = backend.write_blocks(kv, ids, case.blocks_after())
    kv = backend.copy_blocks(kv, torch.tensor([[2, 1], [4, 3]], dtype=torch.int32).numpy())
    after = backend.read_blocks(kv, ids)
    for name, blocks in case.blocks_after().items():
        expected = blocks.clone().view(torch.uint8)
        expected[1], expected[3] = expected[2].clone(), expected[4].clone()
        assert torch.equal(after[name].view(torch.uint8), expected)


def test_what_isnt_declared_is_refused(platform: Platform) -> None:
    spec = replace(CASES[0].spec, head_dim=1024, head_dim_v=1024)
    group = AttentionGroup(name="full_attention", spec=spec, layers=(0,), block_size=16, kv_group=0)
    with pytest.raises(Unsupported, match="1024"):
        REFERENCE(group, platform)
