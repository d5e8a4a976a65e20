"""`PenaltyState`: which tokens each request with penalties has seen, on the device, brought up to date as tokens are sampled.

Nothing is allocated until some request asks for a penalty; counts never travel to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.api.scheduling import IntArray, NewRequest
from octavo.core.worker.input_batch import StepLayout
from octavo.core.worker.sampling_op import PROMPT_BIT, Penalties, Sampled
from octavo.core.worker.sampling_state import SamplingState
from octavo.core.worker.transfers import Transfers

__all__ = ["PenaltyState"]

_FIRST_ROWS = 4


class PenaltyState:
    """One row of ``seen`` [rows, vocab] int32 for each request with penalties; rows are added by doubling."""

    def __init__(self, transfers: Transfers, max_num_seqs: int, vocab_size: int) -> None:
        self._transfers = transfers
        self._vocab_size = vocab_size
        self._row_of_slot = np.full(max_num_seqs, -1, np.int64)
        self._free: list[int] = []
        self._seen: Tensor | None = None

    def enter(self, request: NewRequest) -> None:
        """Count the tokens of a request that enters a slot and has penalties."""
        prompt, output = np.split(request.token_ids, [request.num_prompt_tokens])
        prompt_ids = np.unique(prompt)
        output_ids, counts = np.unique(output, return_counts=True)
        sent = self._transfers.upload(
            {
                "tokens": np.concatenate([prompt_ids, output_ids]).astype(np.int64),
                "values": np.concatenate([np.full(len(prompt_ids), PROMPT_BIT), counts]).astype(np.int32),
            }
        )
        row = self._take_row(sent["tokens"].device)
        self._row_of_slot[request.slot] = row
        assert self._seen is not None
        self._seen[row].zero_()
        self._seen[row].scatter_add_(0, sent["tokens"], sent["values"])

    def leave(self, slots: IntArray) -> None:
        """Free the rows of ``slots``, where they have one."""
        rows = self._row_of_slot[slots]
        self._free.extend(rows[rows >= 0].tolist())
        self._row_of_slot[slots] = -1

    def arrays(
        self, layout: StepLayout, state: SamplingState, penalised: IntArray, drafts: IntArray | None
    ) -> Mapping[str, NDArray[Any]]:
        """What `batch` and `count` need on the device. ``penalised`` [p] are logits rows; ``drafts`` [m, k] padded with -1."""
        slots = layout.slots[layout.sampled]
        owners = layout.logit_owners[penalised]
        counted = np.flatnonzero(state.has_penalties[slots])
        repetition, presence, frequency = np.ascontiguousarray(state.penalties[slots[owners]].T)
        arrays = {
            "penalty_rows": penalised.astype(np.int64),
            "penalty_state": self._row_of_slot[slots[owners]],
            "penalty_repetition": repetition,
            "penalty_presence": presence,
            "penalty_frequency": frequency,
            "counted": counted,
            "counted_state": self._row_of_slot[slots[counted]],
        }
        if drafts is not None:
            offsets = layout.logit_positions[penalised] - layout.logit_positions[np.searchsorted(layout.logit_owners, owners)]
            before = np.arange(drafts.shape[1]) < offsets[:, None]
            arrays["penalty_earlier"] = np.where(before, drafts[owners], -1).astype(np.int64)
        return arrays

    def batch(self, sent: Mapping[str, Tensor]) -> Penalties:
        """The penalties of the step whose `arrays` are on the device."""
        assert self._seen is not None
        return Penalties(
            rows=sent["penalty_rows"],
            state=sent["penalty_state"],
            seen=self._seen,
            repetition=sent["penalty_repetition"],
            presence=sent["penalty_presence"],
            frequency=sent["penalty_frequency"],
            earlier=sent.get("penalty_earlier"),
        )

    def count(self, sampled: Sampled, sent: Mapping[str, Tensor]) -> None:
        """Count the tokens just sampled, without looking at them."""
        assert self._seen is not None
        for tokens in _columns(sampled.token_ids.index_select(0, sent["counted"])):
            real = (tokens >= 0).to(torch.int32)
            self._seen.index_put_((sent["counted_state"], tokens.clamp(min=0).to(torch.int64)), real, accumulate=True)

    def _take_row(self, device: torch.device) -> int:
        if not self._free:
            held = 0 if self._seen is None else self._seen.shape[0]
            rows = max(_FIRST_ROWS, 2 * held)
            grown = torch.zeros((rows, self._vocab_size), dtype=torch.int32, device=device)
            if self._seen is not None:
                grown[:held].copy_(self._seen)
            self._seen = grown
            self._free = list(range(held, rows))
        return self._free.pop()


def _columns(tokens: Tensor) -> Iterator[Tensor]:
    for column in range(tokens.shape[1]):
        yield tokens[:, column]
