"""A model in hand: steps built by hand, over the reference backend, with permuted block tables and a poisoned null block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.backends.cpu.platform import CpuPlatform
from octavo.core.api.attention import AttentionGroup, GroupBatch, HostBatch, LayerParams
from octavo.core.api.models import BuildContext, CausalLM, WeightSource
from octavo.core.api.ops import ParallelContext
from octavo.core.api.platform import Platform
from octavo.core.config.model_spec import ModelSpec
from octavo.core.layers.context import LayerCache, StepContext
from octavo.core.layers.ops import Ops
from octavo.plugins.attention.reference.backend import ReferenceAttention

NUM_BLOCKS = 96


class HandRunner:
    """Runs a model step by step. Each request has a row of the block table; blocks are dealt in a shuffled order."""

    def __init__(
        self,
        model_class: type[CausalLM],
        spec: ModelSpec,
        weights: WeightSource,
        *,
        dtype: str = "float32",
        block_size: int = 5,
        overrides: Mapping[str, Any] | None = None,
        max_model_len: int = 256,
        platform: Platform | None = None,
    ) -> None:
        self.platform = platform or CpuPlatform()
        self.ops = Ops(overrides, platform=self.platform)
        self.block_size = block_size
        build = BuildContext(
            ops=self.ops, platform=self.platform, dtype=dtype, parallel=ParallelContext(), max_model_len=max_model_len
        )
        self.model = model_class(spec, weights, build)
        self.caches = self._caches(model_class.attention(spec, dtype, dtype), self.model.layer_params())
        free = np.random.default_rng(7).permutation(np.arange(1, NUM_BLOCKS)).tolist()
        self._free: list[int] = free
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}

    def _caches(self, specs: Sequence[Any], params: Sequence[LayerParams]) -> list[LayerCache]:
        caches: dict[int, LayerCache] = {}
        for number, spec in enumerate(dict.fromkeys(specs)):
            layers = tuple(index for index, other in enumerate(specs) if other == spec)
            group = AttentionGroup(name=str(number), spec=spec, layers=layers, block_size=self.block_size, kv_group=number)
            backend = ReferenceAttention(group, self.platform, enforce=False)
            for layer, kv in zip(layers, backend.allocate_kv(NUM_BLOCKS), strict=True):
                for buffer in kv.values():
                    buffer[0] = torch.nan
                caches[layer] = LayerCache(backend=backend, params=params[layer], kv=kv)
        return [caches[index] for index in range(len(specs))]

    @torch.inference_mode()
    def step(self, new: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Run the new tokens of each request; logits [tokens, vocab] of every one of them."""
        batch = self._batch(new)
        for backend in {id(cache.backend): cache.backend for cache in self.caches}.values():
            plan = backend.plan(batch)
            for cache in self.caches:
                if cache.backend is backend:
                    cache.plan = plan
        context = StepContext(ops=self.ops, positions=batch.positions, layers=self.caches)
        token_ids = self.platform.from_host(torch.tensor([token for tokens in new.values() for token in tokens]))
        x, residual = self.model.forward(token_ids, context)
        rows = self.platform.from_host(torch.arange(batch.num_tokens))
        logits = self.platform.to_host(self.model.logits(x, residual, rows, context))
        return dict(zip(new, logits.split([len(tokens) for tokens in new.values()]), strict=True))

    def greedy(self, request: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy continuation of a prompt, one token a step."""
        tokens: list[int] = []
        feed = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.step({request: feed})[request][-1].argmax()))
            feed = tokens[-1:]
        return tokens

    def _batch(self, new: Mapping[str, Sequence[int]]) -> GroupBatch:
        computed = np.array([len(self._tokens.setdefault(name, [])) for name in new], np.int32)
        for name, tokens in new.items():
            self._tokens[name] += tokens
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self.block_size < len(self._tokens[name]):
                blocks.append(self._free.pop())
        lengths = np.array([len(tokens) for tokens in new.values()], np.int32)
        seq_lens = computed + lengths
        positions = np.concatenate([np.arange(start, end) for start, end in zip(computed, seq_lens, strict=True)])
        table = np.zeros((len(new), max(len(self._blocks[name]) for name in new)), np.int32)
        for row, name in enumerate(new):
            table[row, : len(self._blocks[name])] = self._blocks[name]
        rows = np.repeat(np.arange(len(new)), lengths)
        slots = table[rows, positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

        def device(array: np.ndarray[Any, Any]) -> Any:
            return self.platform.from_host(torch.from_numpy(array))

        return GroupBatch(
            num_reqs=len(new),
            num_tokens=int(lengths.sum()),
            query_start_loc=device(starts),
            seq_lens=device(seq_lens),
            num_computed_tokens=device(computed),
            positions=device(positions),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            num_decodes=int((lengths == 1).sum()),
            decode_query_len=1,
            host=HostBatch(query_start_loc=starts, seq_lens=seq_lens, num_computed_tokens=computed),
            block_table=device(table),
            slot_mapping=device(slots),
        )


@pytest.fixture(scope="session")
def hand_runner() -> type[HandRunner]:
    return HandRunner
