"""`NgramProposer`: what followed the last tokens when they came up before, follows again. Needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from octavo.core.api.scheduling import IntArray, Proposer

LONGEST, SHORTEST = 4, 2
WINDOW = 8192


class NgramProposer(Proposer):
    """Looks for the latest earlier place where the last four, else three, else two tokens stand, within the last ``WINDOW``
    tokens, and guesses the tokens that followed there. (The idea is known as prompt lookup decoding.)
    """

    location: ClassVar[Literal["engine", "worker"]] = "engine"

    def propose(self, tokens: Sequence[IntArray], num_speculative_tokens: int) -> Sequence[IntArray]:
        return [_continuation(sequence[-WINDOW:], num_speculative_tokens) for sequence in tokens]


def _continuation(tokens: IntArray, count: int) -> IntArray:
    places = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the last token stood before
    best = places[:0]
    for back in range(1, LONGEST):
        places = places[places >= back]
        places = places[tokens[places - back] == tokens[-1 - back]] if back < len(tokens) else places[:0]
        if not len(places):
            break
        if back + 1 >= SHORTEST:
            best = places
    if not len(best):
        return tokens[:0]
    # The latest place that has enough tokens after it; in a loop shorter than ``count`` an earlier one has more to say.
    enough = best[best + count < len(tokens)]
    place = int(enough[-1]) if len(enough) else int(best[0])
    return tokens[place + 1 : place + 1 + count].copy()
