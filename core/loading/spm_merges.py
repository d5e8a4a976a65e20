"""The merge list that a SentencePiece BPE vocabulary implies.

SentencePiece stores no merges: at each step it joins the neighbouring pair whose union is the piece with the best score.
Listing, best piece first, every way to cut a piece into two pieces gives a merge list with the same effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["spm_merges"]


def spm_merges(tokens: Sequence[str], scores: np.ndarray[Any, Any], mergeable: np.ndarray[Any, Any]) -> list[tuple[str, str]]:
    """Merges of ``tokens`` in the order of their ``scores`` [n]; only those ``mergeable`` [n] bool take part.

    Among the cuts of one piece the longest left part comes first.
    """
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    pieces = [tokens[index] for index in order[mergeable[order]].tolist()]
    known = set(pieces)
    # A vocabulary of 262144 tokens has 1.4 million cuts: this is half the time that its tokenizer takes to build.
    return [
        (left, right)
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in known and (right := piece[cut:]) in known
    ]
