"""`ModelRunner`: one step on one device, from a plan to a result: block copies, plans, forward, logits, sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.api.attention import GroupBatch, HostBatch
from octavo.core.api.kv_cache import KVGroupInfo
from octavo.core.api.models import CausalLM
from octavo.core.api.platform import Platform
from octavo.core.api.scheduling import IntArray, StepPlan
from octavo.core.layers.context import LayerCache, StepContext
from octavo.core.layers.ops import Ops
from octavo.core.worker.caches import GroupCaches
from octavo.core.worker.input_batch import ON_DEVICE, InputBatch, StepLayout
from octavo.core.worker.memory import logits_bytes
from octavo.core.worker.pending import PendingStep
from octavo.core.worker.sampler import Sampled, Sampler, StepSampling
from octavo.core.worker.transfers import Transfers

__all__ = ["ModelRunner", "RunnerLimits"]


@dataclass(frozen=True, kw_only=True)
class RunnerLimits:
    """The sizes that a runner's state is made for, and the engine's seed."""

    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int = 0
    seed: int = 0


class ModelRunner:
    """Runs steps of one model. Not thread-safe; a `PendingStep` it returns is.

    Steps may be launched before the results of earlier ones are read: on a platform with streams the tokens sampled last stay
    in a buffer on the device, by slot, from which the next step takes what the host doesn't know yet.
    """

    def __init__(
        self,
        model: CausalLM,
        groups: Sequence[GroupCaches],
        kv: Sequence[KVGroupInfo],
        ops: Ops,
        platform: Platform,
        limits: RunnerLimits,
    ) -> None:
        self._model = model
        self._groups = groups
        self._ops = ops
        self._limits = limits
        self._streams = platform.capabilities.streams
        self.transfers = Transfers(platform)
        self._batch = InputBatch(
            kv,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            num_speculative_tokens=limits.num_speculative_tokens,
        )
        self._sampler = Sampler(
            ops.verify_and_sample,
            self.transfers,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=limits.vocab_size,
            workspace_bytes=logits_bytes(limits.max_num_seqs, limits.num_speculative_tokens, limits.vocab_size),
            seed=limits.seed,
            readable=not self._streams,
        )
        self._layers = _by_layer(groups)
        self._tables: dict[str, Tensor] = {}  # block tables on the device, by their name in `_step_arrays`
        self._pending: deque[PendingStep] = deque()
        self._last_tokens: Tensor | None = None  # [max_num_seqs] int32 on the device, by slot; with streams only

    def launch(self, plan: StepPlan) -> PendingStep:
        """Run ``plan``; without streams the result is there when this returns."""
        with torch.inference_mode():
            self._settle()
            self._sampler.change(plan.released, plan.new)
            layout = self._batch.apply(plan)
            self._copy_blocks(plan.block_copies)
            pending = self._run(layout)
        if not self._streams:
            pending.result()
        self._pending.append(pending)
        return pending

    def _settle(self) -> None:
        """Take over the tokens of earlier steps, as far as they are on the host or can't be done without."""
        while self._pending and (self._pending[0].done or self._pending[-1].has_drafts):
            pending = self._pending.popleft()
            self._batch.settle(pending.advanced, *pending.sampled())

    def _copy_blocks(self, copies: Sequence[IntArray | None]) -> None:
        for kv_group, pairs in enumerate(copies):
            if pairs is not None and len(pairs):
                for group in self._groups:
                    if group.group.kv_group == kv_group:
                        group.copy_blocks(pairs)

    def _run(self, layout: StepLayout) -> PendingStep:
        sampling = self._sampler.prepare(layout, self._batch)
        sent = self.transfers.upload(self._step_arrays(layout, sampling))
        self._tables |= {name: tensor for name, tensor in sent.items() if name.startswith("table_")}
        self._plan_groups(layout, sent)
        step = StepContext(ops=self._ops, positions=sent["positions"], layers=self._layers)
        x, residual = self._model.forward(self._input_ids(layout, sent), step)

        found: list[Tensor] = []
        if len(layout.sampled):
            # No name is given to the logits: their memory is needed for what follows.
            sampled, found = self._sampler.sample(self._model.logits(x, residual, sent["logit_tokens"], step), sampling, sent)
            self._remember(sampled, sent)
        early, rest = self._sampler.prompt_logprobs(lambda rows: self._model.logits(x, residual, rows, step), sampling, sent)
        found += rest
        return PendingStep(
            layout,
            self._batch.advance(layout),
            self.transfers.download(found) if found else None,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            early=early,
        )

    def _step_arrays(self, layout: StepLayout, sampling: StepSampling) -> Mapping[str, NDArray[Any]]:
        """Everything that the device needs for this step and doesn't have yet, by name."""
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": layout.token_ids,
            "positions": layout.positions,
            "query_start_loc": layout.query_start_loc,
            "seq_lens": layout.seq_lens,
            "num_computed_tokens": layout.num_computed_tokens,
            "logit_tokens": layout.logit_tokens,
            **sampling.arrays,
        }
        if layout.has_unknown_tokens:
            arrays["token_slots"] = layout.token_slots
        if self._streams:
            arrays["sampled_slots"] = layout.slots[layout.sampled].astype(np.int64)
        for group, mapping in enumerate(layout.slot_mappings):
            name = f"table_{group}"
            arrays[f"slot_mapping_{group}"] = mapping
            table = self._batch.block_table(group, layout.slots, layout.max_seq_len)
            if self._batch.tables_changed[group] or self._tables[name].shape[1] < table.shape[1]:
                arrays[name] = table
                self._batch.tables_changed[group] = False
        return arrays

    def _plan_groups(self, layout: StepLayout, sent: Mapping[str, Tensor]) -> None:
        host = HostBatch(
            query_start_loc=layout.query_start_loc,
            seq_lens=layout.seq_lens,
            num_computed_tokens=layout.num_computed_tokens,
            exact=True,  # a step after one with drafts waits for it, and without drafts the host knows every length
        )
        for group in self._groups:
            kv_group = group.group.kv_group
            batch = GroupBatch(
                num_reqs=layout.num_reqs,
                num_tokens=layout.num_tokens,
                query_start_loc=sent["query_start_loc"],
                seq_lens=sent["seq_lens"],
                num_computed_tokens=sent["num_computed_tokens"],
                positions=sent["positions"],
                max_query_len=layout.max_query_len,
                max_seq_len=layout.max_seq_len,
                num_decodes=layout.num_decodes,
                decode_query_len=1 + self._limits.num_speculative_tokens,
                host=host,
                block_table=self._tables[f"table_{kv_group}"],
                slot_mapping=sent[f"slot_mapping_{kv_group}"],
            )
            group.plan(batch)

    def _input_ids(self, layout: StepLayout, sent: Mapping[str, Tensor]) -> Tensor:
        token_ids = sent["token_ids"]
        if not layout.has_unknown_tokens:
            return token_ids
        assert self._last_tokens is not None, "only a platform with streams leaves tokens on the device"
        last = self._last_tokens.index_select(0, sent["token_slots"])
        return torch.where(token_ids == ON_DEVICE, last, token_ids)

    def _remember(self, sampled: Sampled, sent: Mapping[str, Tensor]) -> None:
        """Keep the last token of each sampled slot on the device for the next step."""
        if not self._streams:
            return
        if self._last_tokens is None:
            self._last_tokens = torch.zeros(self._limits.max_num_seqs, dtype=torch.int32, device=sampled.token_ids.device)
        last = sampled.token_ids[:, 0]
        if sampled.num_accepted is not None:
            last = sampled.token_ids.gather(1, sampled.num_accepted.to(torch.int64).unsqueeze(1)).squeeze(1)
        # A failed row's token is no token; its request ends, and until then any token will do.
        self._last_tokens.index_copy_(0, sent["sampled_slots"], last.clamp(min=0))


def _by_layer(groups: Sequence[GroupCaches]) -> list[LayerCache]:
    layers = {cache.params.index: cache for group in groups for cache in group.layers}
    assert sorted(layers) == list(range(len(layers))), "every layer is in one group"
    return [layers[index] for index in sorted(layers)]
