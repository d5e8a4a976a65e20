"""The reference backend keeps its manifest's promises on a device that isn't a CPU, with no read that wasn't planned."""

from __future__ import annotations

from collections.abc import Iterator

import pyaccel
import pytest
import torch
from pyaccel.plugin.platform import PyaccelPlatform

from octavo.api.attention import AttentionBackend
from octavo.api.platform import Platform
from octavo.conformance.cases import Case
from octavo.conformance.declared import declared_cases
from octavo.conformance.driver import compare, run_backend, same_stored
from octavo.core.discovery import installed

REFERENCE: type[AttentionBackend] = installed().load("attention", "reference")
CASES = list(declared_cases(REFERENCE.manifest, seed=77))


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    pyaccel.install()
    made = PyaccelPlatform()
    made.bind(1)
    yield made
    torch.pyaccel.set_device(0)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_declared_case_is_right_on_the_device(case: Case, platform: Platform) -> None:
    held = torch.pyaccel.memory_allocated(0)
    torch.pyaccel.reset_peak_memory_stats(0)
    with pyaccel.strict(copies=True):
        run = run_backend(REFERENCE, platform, case, lse=True)
    for deviation in compare(run, case, REFERENCE.manifest.numerics):
        assert deviation.passed, f"{case.name}, seed {case.seed}: {deviation}"
    assert run.inputs_kept, "q, k or v was changed"
    for name, blocks in case.blocks_after().items():
        assert same_stored(run.blocks[name][1:], blocks[1:]), f"{name} holds something else than was written"
    assert torch.pyaccel.max_memory_allocated(0) == held, "something was put on device 0"
