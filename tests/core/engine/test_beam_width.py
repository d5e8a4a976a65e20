"""How wide a beam search may be: its beams' log probabilities have a limit."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.core.api.errors import UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import Request
from octavo.core.engine.beam_search import BeamSearchParams, beam_search


class Core:
    """Keeps the first request, and refuses to go on."""

    def __init__(self, vocab_size: int) -> None:
        self.info = SimpleNamespace(vocab_size=vocab_size)
        self.added: list[Request] = []

    def add(self, request: Request) -> None:
        self.added.append(request)
        raise InterruptedError

    def abort(self, request_id: str) -> None:
        pass


def search(width: int, *, vocab_size: int = 50_000, num_eos: int = 1, **more: Any) -> Core:
    """Start a search; the core that it reached."""
    request = Request(
        request_id="0",
        prompt_token_ids=np.array([1], np.int32),
        sampling=SamplingParams(),
        eos_token_ids=tuple(range(num_eos)),
        max_tokens=4,
    )
    core: Any = Core(vocab_size)
    params = BeamSearchParams(beam_width=width, max_tokens=4, **more)
    with suppress(InterruptedError):
        next(beam_search(core, [request], params, max_num_seqs=100_000))
    return core  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("num_eos", "ignore_eos", "most"), [(1, False, 512), (2, False, 341), (3, True, 1024), (0, False, 1024)]
)
def test_a_beam_width_beyond_the_limit_is_refused_with_the_limit(num_eos: int, ignore_eos: bool, most: int) -> None:
    core = search(most, num_eos=num_eos, ignore_eos=ignore_eos)
    assert core.added[0].sampling.logprobs == most * (1 if ignore_eos else 1 + num_eos)
    with pytest.raises(UsageError, match=f"beam_width must be at most {most} for this model, not {most + 1}"):
        search(most + 1, num_eos=num_eos, ignore_eos=ignore_eos)


def test_a_small_vocabulary_is_reported_whole_however_wide_the_search() -> None:
    assert search(5000, vocab_size=257).added[0].sampling.logprobs == 257
