"""Speculative tokens of an engine-side proposer, from the guess to the plan."""

from __future__ import annotations

import numpy as np

from octavo.core.api.errors import Unsupported
from octavo.core.api.scheduling import Drafts, IntArray, Proposer
from octavo.core.scheduling.state import SlotArrays


class Drafter:
    """Asks a `Proposer` for guesses that follow each decode row's last known token."""

    def __init__(self, proposer: Proposer, num_speculative_tokens: int, arrays: SlotArrays) -> None:
        if proposer.location != "engine":
            raise Unsupported(
                f"proposers that run in the {proposer.location} aren't supported yet; use an engine-side one (ngram)"
            )
        self._proposer = proposer
        self._most = num_speculative_tokens
        self._arrays = arrays
        self._guesses: dict[int, IntArray] = {}  # slot → guesses for the step being planned

    def propose(self, slots: IntArray, wanted: IntArray) -> IntArray:
        """``wanted`` with the guesses added, for rows that want just their last token."""
        arrays = self._arrays
        self._guesses = {}
        rows = np.flatnonzero((wanted == 1) & (arrays.num_computed[slots] + 1 == arrays.num_known[slots]))
        room = np.minimum(arrays.limit[slots[rows]] - arrays.num_known[slots[rows]] - 1, self._most)
        rows, room = rows[room > 0], room[room > 0]
        if not len(rows):
            return wanted
        chosen = slots[rows].tolist()
        sequences = [arrays.tokens[slot, : arrays.num_known[slot]] for slot in chosen]
        for view in sequences:
            view.flags.writeable = False  # a proposer that wrote here would change what others find in the prefix cache
        wanted = wanted.copy()
        guesses = self._proposer.propose(sequences, self._most)
        for row, slot, most, guess in zip(rows.tolist(), chosen, room.tolist(), guesses, strict=True):
            if len(guess):
                self._guesses[slot] = np.asarray(guess, np.int32)[:most]
                wanted[row] += len(self._guesses[slot])
        return wanted

    def counts(self, slots: IntArray, granted: IntArray) -> IntArray:
        """[n] int32: how many of each row's granted tokens are guesses."""
        return np.array(
            [g - 1 if s in self._guesses else 0 for s, g in zip(slots.tolist(), granted.tolist(), strict=True)], np.int32
        )

    def forget(self) -> None:
        """Drop the guesses: there is no room for them."""
        self._guesses = {}

    def message(self, slots: IntArray, counts: IntArray) -> Drafts | None:
        """The guesses of the step's rows, ``counts`` ([n]) of each."""
        rows = np.flatnonzero(counts).astype(np.int32)
        if not len(rows):
            return None
        tokens = [self._guesses[slot][:count] for slot, count in zip(slots[rows].tolist(), counts[rows].tolist(), strict=True)]
        return Drafts(rows=rows, counts=counts[rows], token_ids=np.concatenate(tokens))
