"""Seeded attention steps that catch what tolerances don't, and the way to run a backend on one.

A `Case` is a ragged batch on the host: permuted block tables, NaN in the null block, in unused blocks, in the tails of partial
blocks and in the output, decode rows first, chunks with context, padding when asked for, blocks behind a window already given
back. It crosses to a device through `Platform.from_host` and `CacheBackend.write_blocks` only, so that any array library can be
driven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from octavo.api.attention import AttentionGroup, AttentionSpec, GroupBatch, HostBatch, Int32Array, Int64Array, LayerParams
from octavo.api.kv_cache import NULL_BLOCK
from octavo.api.manifest import Numerics
from octavo.api.platform import Platform
from octavo.conformance.baseline import EXACT, baseline_attentions
from octavo.conformance.dtypes import TORCH_DTYPES, poison_value
from octavo.conformance.oracle import AttentionInput, Expected, expected_attention, visible_keys

__all__ = ["Case", "Needle", "RowLengths", "make_case"]

Needle = Literal["future", "behind_window", "own", "oldest"]
"""Where each query's loudest key lies: one past it, one behind its window, at its own position, or the oldest that it sees."""
_NEEDLE_LOGIT = 12.0
_NEEDLE_VALUE = 8.0


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """One row of a batch: tokens that it runs in the step, and tokens that were in its cache before."""

    query_len: int
    context_len: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one layer. Tensors are on the host; ``inputs`` hold each request's whole history."""

    name: str
    seed: int
    spec: AttentionSpec
    block_size: int
    inputs: tuple[AttentionInput, ...]
    params: LayerParams
    block_table: Int32Array  # [rows, max_blocks], padded rows included
    num_blocks: int  # the null block and a few unused ones included
    decode_query_len: int = 1
    pad_tokens: int = 0
    shared_kv: bool = False  # the cache is another layer's: filled beforehand, and the step brings no k and v
    strided: bool = False  # q, k and v are slices of wider rows, as out of a fused projection

    @property
    def num_tokens(self) -> int:
        """Real ones; padded tokens come after them."""
        return sum(request.query_len for request in self.inputs)

    @cached_property
    def expected(self) -> Expected:
        return expected_attention(self.spec, self.inputs, self.params)

    def baselines(self, numerics: Numerics = EXACT) -> tuple[Tensor, ...]:
        return baseline_attentions(self.spec, self.inputs, self.params, numerics)

    def group(self) -> AttentionGroup:
        return AttentionGroup(
            name=self.spec.kind, spec=self.spec, layers=(self.params.index,), block_size=self.block_size, kv_group=0
        )

    def device_params(self, platform: Platform) -> LayerParams:
        """``params`` with its arrays on the device."""
        sinks, slopes = self.params.sinks, self.params.alibi_slopes
        return replace(
            self.params,
            sinks=None if sinks is None else platform.from_host(sinks),
            alibi_slopes=None if slopes is None else platform.from_host(slopes),
        )

    def step_tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``q``, ``k`` and ``v`` of the step's tokens, padded tokens NaN; k and v None where the layer writes nothing."""
        q = self._rows([request.q for request in self.inputs])
        if self.shared_kv:
            return q, None, None
        new = [request.num_computed_tokens for request in self.inputs]
        k = self._rows([self._unscaled(r.k[start:], self.params.k_scale) for r, start in zip(self.inputs, new, strict=True)])
        values = [
            (request.k[..., : self.spec.head_dim_v] if request.v is None else request.v)[start:]
            for request, start in zip(self.inputs, new, strict=True)
        ]
        v_scale = self.params.k_scale if self.spec.kind == "mla" else self.params.v_scale
        return q, k, self._rows([self._unscaled(v, v_scale) for v in values])

    def cache_blocks(self) -> Mapping[str, Tensor]:
        """Every block of the cache before the step, in its stored dtype: poison except where the step's context lies."""
        return self._blocks(lambda request: request.seq_len if self.shared_kv else request.num_computed_tokens)

    def blocks_after(self) -> Mapping[str, Tensor]:
        """Every block as the step should leave it; only the null block may differ (a device may send slot -1 there)."""
        return self._blocks(lambda request: request.seq_len)

    def batch(self, platform: Platform) -> GroupBatch:
        """The step as a backend gets it, on ``platform``'s bound device. Row and token counts include padding."""
        host = self.host_batch()
        lengths = [request.query_len for request in self.inputs]

        def device(array: Int32Array | Int64Array) -> object:
            return platform.from_host(torch.from_numpy(array.copy()))

        return GroupBatch(
            num_reqs=len(self.block_table),
            num_tokens=self.num_tokens + self.pad_tokens,
            query_start_loc=device(host.query_start_loc),
            seq_lens=device(host.seq_lens),
            num_computed_tokens=device(host.num_computed_tokens),
            positions=device(self._positions()),
            max_query_len=max(lengths),
            max_seq_len=max(request.seq_len for request in self.inputs),
            num_decodes=sum(length <= self.decode_query_len for length in lengths),
            decode_query_len=self.decode_query_len,
            host=host,
            block_table=device(self.block_table),
            slot_mapping=device(self.slot_mapping()),
        )

    def host_batch(self) -> HostBatch:
        padded = [0] * (len(self.block_table) - len(self.inputs))
        starts = np.cumsum([0, *(request.query_len for request in self.inputs), *padded])
        return HostBatch(
            query_start_loc=starts.astype(np.int32),
            seq_lens=np.array([*(request.seq_len for request in self.inputs), *padded], np.int32),
            num_computed_tokens=np.array([*(request.num_computed_tokens for request in self.inputs), *padded], np.int32),
        )

    def slot_mapping(self) -> Int64Array:
        """[tokens, padded ones included]: where each token's k and v go; -1 = nowhere."""
        slots = np.full(self.num_tokens + self.pad_tokens, -1, np.int64)
        if self.spec.kind == "cross":
            return slots
        positions = self._positions()
        token = 0
        for row, request in enumerate(self.inputs):
            for _ in range(request.query_len):
                block, offset = divmod(int(positions[token]), self.block_size)
                slots[token] = int(self.block_table[row, block]) * self.block_size + offset
                token += 1
        return slots

    def _positions(self) -> Int64Array:
        ranges = [request.num_computed_tokens + np.arange(request.query_len) for request in self.inputs]
        return np.concatenate([*ranges, np.zeros(self.pad_tokens)]).astype(np.int64)

    def _unscaled(self, stored: Tensor, scale: float) -> Tensor:
        return (stored.float() * scale).to(TORCH_DTYPES[self.spec.dtype])

    def _rows(self, parts: Sequence[Tensor]) -> Tensor:
        real = torch.cat(list(parts))
        padding = torch.full((self.pad_tokens, *real.shape[1:]), float("nan"), dtype=real.dtype)
        rows = torch.cat([real, padding])
        if not self.strided:
            return rows
        width = rows[0].numel()
        wide = torch.full((len(rows), width + 24), float("nan"), dtype=rows.dtype)
        wide[:, 8 : 8 + width] = rows.flatten(1)
        return wide[:, 8 : 8 + width].view(-1, *rows.shape[1:])

    def _blocks(self, filled: Callable[[AttentionInput], int]) -> Mapping[str, Tensor]:
        spec, dtype = self.spec, TORCH_DTYPES[self.spec.kv_dtype]
        widths = {"k": spec.head_dim} if spec.kind == "mla" else {"k": spec.head_dim, "v": spec.head_dim_v}
        blocks = {}
        for name, width in widths.items():
            shape = (self.num_blocks, self.block_size, spec.num_kv_heads, width)
            cache = torch.full(shape, poison_value(spec.kv_dtype)).to(dtype)
            for row, request in enumerate(self.inputs):
                stored = request.k if name == "k" or request.v is None else request.v
                for position in range(filled(request)):
                    block, offset = divmod(position, self.block_size)
                    if self.block_table[row, block] != NULL_BLOCK:
                        cache[self.block_table[row, block], offset] = stored[position]
            blocks[name] = cache
        return blocks


def make_case(
    name: str,
    spec: AttentionSpec,
    rows: Sequence[RowLengths],
    *,
    seed: int,
    block_size: int = 16,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_gain: float = 1.0,
    needle: Needle | None = None,
    decode_query_len: int = 1,
    pad_reqs: int = 0,
    pad_tokens: int = 0,
    shared_kv: bool = False,
    strided: bool = False,
) -> Case:
    """Draw a case. ``rows`` are put in decode-first order; the same arguments always give the same case.

    ``q_gain`` multiplies q (to make a soft cap bind, or logits huge). Scales other than powers of two need a ``kv_dtype``
    of 8 bits, or storing k / k_scale again wouldn't give back the stored value. Cross-attention rows have
    ``context_len`` keys and write none.
    """
    generator = torch.Generator().manual_seed(seed)
    ordered = sorted(rows, key=lambda row: row.query_len > decode_query_len)
    shared_kv = shared_kv or spec.kind == "cross"
    scales = (k_scale, k_scale if spec.kind == "mla" else v_scale)
    inputs = tuple(_draw_input(spec, row, scales, q_gain, needle, generator) for row in ordered)
    block_table, num_blocks = _draw_block_table(spec, inputs, block_size, pad_reqs, generator)
    return Case(
        name=name,
        seed=seed,
        spec=spec,
        block_size=block_size,
        inputs=inputs,
        params=LayerParams(
            index=0,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=2 * torch.randn(spec.num_heads, generator=generator) if spec.sinks else None,
            alibi_slopes=_slopes(spec.num_heads) if spec.alibi else None,
            kv_source_layer=1 if shared_kv and spec.kind != "cross" else None,
        ),
        block_table=block_table,
        num_blocks=num_blocks,
        decode_query_len=decode_query_len,
        pad_tokens=pad_tokens,
        shared_kv=shared_kv,
        strided=strided,
    )


def _draw_input(
    spec: AttentionSpec,
    row: RowLengths,
    scales: tuple[float, float],
    q_gain: float,
    needle: Needle | None,
    generator: torch.Generator,
) -> AttentionInput:
    cross = spec.kind == "cross"
    seq_len = row.context_len if cross else row.context_len + row.query_len
    dtype = TORCH_DTYPES[spec.dtype]
    q = (q_gain * torch.randn(row.query_len, spec.num_heads, spec.head_dim, generator=generator)).to(dtype)
    k = torch.randn(seq_len, spec.num_kv_heads, spec.head_dim, generator=generator)
    v = torch.randn(seq_len, spec.num_kv_heads, spec.head_dim_v, generator=generator)
    first = 0 if cross else row.context_len
    if needle is not None:
        _plant(spec, q, k, v, first, needle)
    return AttentionInput(
        q=q,
        k=_store(k.to(dtype), scales[0], spec.kv_dtype),
        v=None if spec.kind == "mla" else _store(v.to(dtype), scales[1], spec.kv_dtype),
        num_computed_tokens=first,
    )


def _plant(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, first: int, needle: Needle) -> None:
    """Point one key at each query, so that seeing it or missing it changes everything; in place."""
    group = spec.num_heads // spec.num_kv_heads
    for row, query in enumerate(q.float()[:, ::group]):
        position = first + row
        seen = visible_keys(spec, position, len(k))
        target = {"future": position + 1, "behind_window": seen.start - 1, "own": position, "oldest": seen.start}[needle]
        if 0 <= target < len(k):
            k[target] = query * (_NEEDLE_LOGIT / (abs(spec.scale) * query.square().sum(-1, keepdim=True)))
            v[target] = _NEEDLE_VALUE


def _store(values: Tensor, scale: float, kv_dtype: str) -> Tensor:
    """``values / scale`` in the cache's dtype, saturated."""
    dtype = TORCH_DTYPES[kv_dtype]
    scaled = values.float() / scale
    if dtype is torch.int8:
        return scaled.round().clamp(-127, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype)


def _draw_block_table(
    spec: AttentionSpec, inputs: Sequence[AttentionInput], block_size: int, pad_reqs: int, generator: torch.Generator
) -> tuple[Int32Array, int]:
    """Blocks in random order from a pool with spare ones; 0 beyond a request's blocks and wholly behind its window."""
    needed = [-(-request.seq_len // block_size) for request in inputs]
    spare = 3
    ids = 1 + torch.randperm(sum(needed) + spare, generator=generator).numpy().astype(np.int32)
    table = np.full((len(inputs) + pad_reqs, max(needed, default=0) + 1), NULL_BLOCK, np.int32)
    taken = 0
    for row, (request, count) in enumerate(zip(inputs, needed, strict=True)):
        table[row, :count] = ids[taken : taken + count]
        taken += count
        freed = visible_keys(spec, request.num_computed_tokens, request.seq_len).start // block_size
        table[row, :freed] = NULL_BLOCK
    return table, 1 + len(ids)


def _slopes(num_heads: int) -> Tensor:
    """A geometric series from 2^(-8 / num_heads) down to 2^-8, as in the ALiBi paper."""
    return torch.tensor([2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)])
