"""What the reference backend prepares once a step: parts of the batch that are computed together, their blocks and masks.

Rows of few tokens are batched with rows of like length; longer ones are cut into runs of queries, one part each, so that the
scores stay small. Shapes come from the host's lengths; masks from the device's, so upper bounds on the host are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.api.attention import AttentionSpec, GroupBatch, Int64Array
from octavo.api.platform import Platform

__all__ = ["Part", "ReferencePlan", "make_plan"]

_BATCHED_QUERY_LEN = 16  # rows of at most so many tokens share parts
_QUERY_RUN = 256  # queries a part of a long row: causality lets earlier runs read fewer keys
_SCORES = 2**23  # elements of a part's score matrix that are worth staying below


@dataclass(frozen=True, kw_only=True)
class Part:
    """``num_rows`` requests with ``query_len`` queries each, and the ``num_keys`` cache slots (whole blocks) they may see."""

    num_rows: int
    query_len: int
    tokens: slice | Tensor  # of the step, num_rows * query_len of them
    blocks: Tensor  # [num_rows * num_blocks] int64
    hidden: Tensor  # [num_rows, 1, 1, query_len, num_keys] bool, keys that a query doesn't see
    dead: Tensor  # [num_rows, 1, num_keys, 1] bool, keys that no query of the part sees: they may hold anything
    distance: Tensor | None  # [num_rows, 1, 1, query_len, num_keys] float32, key position - query position, for ALiBi


@dataclass(frozen=True, kw_only=True)
class ReferencePlan:
    """``slots`` [num_tokens] int64: where k and v go; tokens that aren't written go to the null block."""

    slots: Tensor
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A part as the host knows it. ``first_blocks`` [num_rows]: the first column of the block table that is read."""

    rows: Int64Array  # [num_rows] rows of the batch
    starts: Int64Array  # [num_rows] first token of each
    query_offset: int  # tokens of the row before the part's first query
    query_len: int
    first_blocks: Int64Array
    num_blocks: int


def make_plan(spec: AttentionSpec, block_size: int, batch: GroupBatch, platform: Platform) -> ReferencePlan:
    """One upload of indices for the whole step, and no read of the device."""
    shapes = list(_shapes(spec, block_size, batch))
    upload = _Upload()
    pending = [_enqueue(shape, batch, upload) for shape in shapes]
    upload.send(platform)
    parts = [_part(spec, block_size, batch, shape, upload, places) for shape, places in zip(shapes, pending, strict=True)]
    return ReferencePlan(slots=batch.slot_mapping.clamp(min=0), parts=tuple(parts))


def _shapes(spec: AttentionSpec, block_size: int, batch: GroupBatch) -> Iterator[_Shape]:
    starts = batch.host.query_start_loc.astype(np.int64)
    query_lens = np.diff(starts)
    first, last = _key_range(spec, batch, query_lens)
    first_blocks = first // block_size
    num_blocks = np.maximum(-(-last // block_size) - first_blocks, 1)
    short = (query_lens > 0) & (query_lens <= _BATCHED_QUERY_LEN)
    size_class = np.ceil(np.log2(num_blocks)).astype(np.int64)
    for query_len, size in sorted(set(zip(query_lens[short].tolist(), size_class[short].tolist(), strict=True))):
        rows = np.flatnonzero(short & (query_lens == query_len) & (size_class == size))
        most = int(num_blocks[rows].max())
        at_once = max(1, _SCORES // (spec.num_heads * query_len * most * block_size))
        for some in (rows[at : at + at_once] for at in range(0, len(rows), at_once)):
            yield _Shape(
                rows=some, starts=starts[some], query_offset=0, query_len=query_len, first_blocks=first_blocks[some],
                num_blocks=int(num_blocks[some].max()),
            )  # fmt: skip
    for row in np.flatnonzero(query_lens > _BATCHED_QUERY_LEN):
        yield from _runs(spec, block_size, batch, int(row))


def _key_range(spec: AttentionSpec, batch: GroupBatch, query_lens: Int64Array) -> tuple[Int64Array, Int64Array]:
    """For each row the first key position that any of its queries may see, and the end of those."""
    last = batch.host.seq_lens.astype(np.int64)
    first = np.zeros_like(last)
    if spec.window is not None and batch.host.exact:
        computed = batch.host.num_computed_tokens.astype(np.int64)
        first = np.maximum(computed - spec.window + 1, 0)
        if not spec.causal:
            last = np.minimum(last, computed + query_lens + spec.window - 1)
    return np.minimum(first, last), last


def _runs(spec: AttentionSpec, block_size: int, batch: GroupBatch, row: int) -> Iterator[_Shape]:
    """A long row, cut into runs of queries."""
    start, end = (int(at) for at in batch.host.query_start_loc[row : row + 2])
    seq_len, computed = int(batch.host.seq_lens[row]), int(batch.host.num_computed_tokens[row])
    run = max(16, min(_QUERY_RUN, _SCORES // (spec.num_heads * max(seq_len, 1))))
    for offset in range(0, end - start, run):
        query_len = min(run, end - start - offset)
        first, last = 0, seq_len
        if batch.host.exact:
            position = computed + offset
            ahead = 0 if spec.causal else seq_len if spec.window is None else spec.window - 1
            last = min(seq_len, position + query_len + ahead)
            first = 0 if spec.window is None else min(max(0, position - spec.window + 1), last)
        first_block = first // block_size
        yield _Shape(
            rows=np.array([row]), starts=np.array([start]), query_offset=offset, query_len=query_len,
            first_blocks=np.array([first_block]), num_blocks=max(1, -(-last // block_size) - first_block),
        )  # fmt: skip


class _Upload:
    """Collects host indices and moves them to the device in one array."""

    def __init__(self) -> None:
        self._arrays: list[Int64Array] = []
        self._size = 0
        self._device: Tensor | None = None

    def add(self, values: Int64Array) -> slice:
        place = slice(self._size, self._size + values.size)
        self._arrays.append(values.reshape(-1))
        self._size = place.stop
        return place

    def send(self, platform: Platform) -> None:
        if self._arrays:
            self._device = platform.from_host(torch.from_numpy(np.concatenate(self._arrays)), non_blocking=True)

    def get(self, place: slice) -> Tensor:
        assert self._device is not None
        return self._device[place]


@dataclass(frozen=True, kw_only=True)
class _Places:
    rows: slice
    columns: slice
    first_blocks: slice
    tokens: slice | None  # None: the tokens are contiguous


def _enqueue(shape: _Shape, batch: GroupBatch, upload: _Upload) -> _Places:
    columns = shape.first_blocks[:, None] + np.arange(shape.num_blocks)
    widest = batch.block_table.shape[1] - 1  # columns beyond the table lie beyond seq_lens, where nothing is seen
    tokens = shape.starts[:, None] + shape.query_offset + np.arange(shape.query_len)
    contiguous = bool((np.diff(shape.starts) == shape.query_len).all())
    return _Places(
        rows=upload.add(shape.rows),
        columns=upload.add(np.minimum(columns, widest)),
        first_blocks=upload.add(shape.first_blocks),
        tokens=None if contiguous else upload.add(tokens),
    )


def _part(spec: AttentionSpec, block_size: int, batch: GroupBatch, shape: _Shape, upload: _Upload, places: _Places) -> Part:
    rows = upload.get(places.rows)
    num_rows, query_len = len(shape.rows), shape.query_len
    table = batch.block_table.index_select(0, rows)
    blocks = table.gather(1, upload.get(places.columns).view(num_rows, shape.num_blocks)).flatten().long()
    slots = torch.arange(shape.num_blocks * block_size, device=rows.device)
    keys = upload.get(places.first_blocks).unsqueeze(1) * block_size + slots  # [num_rows, num_keys] positions
    offsets = shape.query_offset + torch.arange(query_len, device=rows.device)
    queries = batch.num_computed_tokens.index_select(0, rows).unsqueeze(1) + offsets  # [num_rows, query_len] positions
    distance = keys.unsqueeze(1) - queries.unsqueeze(2)  # [num_rows, query_len, num_keys]
    hidden = (keys >= batch.seq_lens.index_select(0, rows).unsqueeze(1)).unsqueeze(1)
    if spec.causal:
        hidden = hidden | (distance > 0)
    if spec.window is not None:
        hidden = hidden | (distance <= -spec.window) | (distance >= spec.window)
    hidden = hidden.expand(distance.shape)
    first_token = int(shape.starts[0]) + shape.query_offset
    return Part(
        num_rows=num_rows,
        query_len=query_len,
        tokens=slice(first_token, first_token + num_rows * query_len) if places.tokens is None else upload.get(places.tokens),
        blocks=blocks,
        hidden=hidden[:, None, None],
        dead=hidden.all(dim=1)[:, None, :, None],
        distance=distance[:, None, None].float() if spec.alibi else None,
    )
