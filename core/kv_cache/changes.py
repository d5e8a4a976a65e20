"""`GroupChanges`: what one step changes in one KV group, collected for the `StepPlan`."""

from __future__ import annotations

import numpy as np

from octavo.core.api.scheduling import IntArray, TableUpdate


class GroupChanges:
    """Implements `octavo.core.api.kv_cache.TableChanges`."""

    def __init__(self) -> None:
        self._entries: list[tuple[IntArray, IntArray, IntArray]] = []
        self._copies: dict[int, int] = {}  # target → source

    def set_entries(self, slots: IntArray, columns: IntArray, block_ids: IntArray) -> None:
        self._entries.append((slots, columns, block_ids))

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            # A copy of a copy reads the original, so that a worker may do all copies of a step at once.
            self._copies[target] = self._copies.get(source, source)

    def drop(self, slot: int) -> None:
        """Forget table entries of a slot that won't run after all."""
        self._entries = [
            (slots[kept], columns[kept], blocks[kept])
            for slots, columns, blocks in self._entries
            if len(kept := np.flatnonzero(slots != slot))
        ]

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def cancel_copies(self, targets: IntArray) -> None:
        """These blocks are about to come free and may be given to others: nothing is to be copied into them."""
        for target in targets.tolist():
            self._copies.pop(target, None)

    def take_update(self) -> TableUpdate | None:
        """The table entries so far, which are then forgotten."""
        if not self._entries:
            return None
        if len(self._entries) == 1:
            slots, columns, blocks = self._entries[0]
        else:
            slots, columns, blocks = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        self._entries = []
        return TableUpdate(slots=slots, columns=columns, block_ids=blocks)

    def take_copies(self) -> IntArray | None:
        """The block copies so far ([n, 2] int32: source, target), which are then forgotten."""
        if not self._copies:
            return None
        copies, self._copies = self._copies, {}
        return np.array([(source, target) for target, source in copies.items()], np.int32)
