"""`Sampler`: from logits to tokens and log probabilities, for the requests of a worker.

It keeps the requests' parameters by slot, says what each step has to send to the device, calls the op ``verify_and_sample``
(`octavo.core.worker.sampling_op`, or a platform's own) and says what has to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.api.scheduling import IntArray, NewRequest
from octavo.core.worker.input_batch import InputBatch, StepLayout
from octavo.core.worker.logprobs import TokenLogprobs, token_logprobs
from octavo.core.worker.penalties import PenaltyState
from octavo.core.worker.pending import LogprobRequest
from octavo.core.worker.sampling_op import FAILED, Penalties, Sampled, SamplingBatch, verify_and_sample
from octavo.core.worker.sampling_state import HostSampling, SamplingState
from octavo.core.worker.transfers import Transfers

__all__ = ["FAILED", "Penalties", "Sampled", "Sampler", "SamplingBatch", "StepSampling", "verify_and_sample"]

_MOST_ROWS = 256
"""Tokens whose log probabilities are made at once: more make nothing faster."""
_LOGPROB_BYTES = 12
"""Of one token of the vocabulary, in one row: its logit, its log probability, a comparison."""
_ALTERNATIVE_BYTES = 40
"""Of one alternative while it is found: value and int64 place, sorted and joined to the token's own, and the result."""
_RESULT_BYTES = 8
"""Of one alternative that was found: its int32 id, its float32 log probability."""

_Arrays = Sequence[NDArray[Any]]

Logits = Callable[[Tensor], Tensor]
"""Token rows [r] int64 of the step → their logits [r, vocab] float32."""


@dataclass(frozen=True, kw_only=True)
class StepSampling:
    """One step's sampling on the host. ``arrays`` go to the device; the requests describe what comes back."""

    host: HostSampling
    reuses: bool  # the parameters of the step before are on the device and still hold
    arrays: Mapping[str, NDArray[Any]]
    logprobs: LogprobRequest | None = None
    prompt_logprobs: LogprobRequest | None = None


@dataclass(kw_only=True)
class _Kept:
    """Arrays that stay on the device while the sampled requests stay the same."""

    names: frozenset[str] = frozenset()
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Sampler:
    """Sampling state of up to ``max_num_seqs`` requests."""

    def __init__(
        self,
        op: Callable[[Tensor, SamplingBatch], Sampled],
        transfers: Transfers,
        *,
        max_num_seqs: int,
        vocab_size: int,
        workspace_bytes: int,
        seed: int,
        readable: bool,
    ) -> None:
        """``op`` is ``verify_and_sample``; ``readable`` = looking at a device value costs nothing (the device is the host).
        ``workspace_bytes`` is what a step may take on the device for logits and what is made of them.
        """
        self._op = op
        self._transfers = transfers
        self._vocab_size = vocab_size
        # A quarter is kept for the sampled tokens' log probabilities, which stay while the prompt's are made. Half of the rest
        # is for making some, half for holding those that are made.
        self._part_bytes = workspace_bytes * 3 // 8
        self._readable = readable
        self._state = SamplingState(max_num_seqs, vocab_size, seed)
        self._penalties = PenaltyState(transfers, max_num_seqs, vocab_size)
        self._kept = _Kept()

    def change(self, released: IntArray | None, new: Sequence[NewRequest]) -> None:
        """Forget the owners of ``released`` slots, and note the parameters of new ones."""
        gone = np.array([request.slot for request in new], np.int32)
        if released is not None:
            gone = np.union1d(released, gone)  # a slot may be released and taken again in one step
        if len(gone):
            self._state.leave(gone)
            self._penalties.leave(gone)
        for request in new:
            self._state.enter(request)
            if self._state.has_penalties[request.slot]:
                self._penalties.enter(request)

    def prepare(self, layout: StepLayout, batch: InputBatch) -> StepSampling:
        """What the step needs on the device and will bring back; before `InputBatch.advance`."""
        host = self._state.step(layout)
        reuses = layout.same_requests and bool(self._kept.names)
        arrays: dict[str, NDArray[Any]] = dict(host.fresh)
        fixed: dict[str, NDArray[Any]] = {}
        drafts = _draft_matrix(layout, batch)
        if drafts is not None:
            arrays["drafts"] = drafts
            arrays["draft_rows"] = _draft_rows(layout, drafts.shape[1])
        logprobs = None if host.logprob_rows is None else _logprob_request(layout, host)
        if not reuses:
            fixed.update(host.fixed)
            if host.penalised is not None:
                fixed.update(self._penalties.arrays(layout, self._state, host.penalised, drafts))
            if logprobs is not None and host.logprob_rows is not None:
                width = 1 if drafts is None else 1 + drafts.shape[1]
                fixed["logprob_rows"] = host.logprob_rows.astype(np.int64)
                fixed["logprob_tokens"] = logprobs.flat(width)
            self._kept = _Kept(names=frozenset(fixed))
        prompt = _prompt_tokens(layout, batch, self._state.num_prompt_logprobs)
        if prompt is not None:
            arrays["prompt_tokens"], arrays["prompt_targets"] = prompt.tokens, prompt.targets
        return StepSampling(
            host=host,
            reuses=reuses,
            arrays=arrays | fixed,
            logprobs=logprobs,
            prompt_logprobs=None if prompt is None else prompt.request,
        )

    def sample(self, logits: Tensor, step: StepSampling, sent: Mapping[str, Tensor]) -> tuple[Sampled, list[Tensor]]:
        """Tokens for ``logits``, which are overwritten; and the tensors that `PendingStep` expects on the host."""
        if step.reuses:
            sent = {**self._kept.tensors, **sent}
        else:
            self._kept.tensors = {name: sent[name] for name in self._kept.names}
        raw = None
        if step.logprobs is not None:
            raw = logits.index_select(0, sent["logprob_rows"]).log_softmax(-1)
        sampled = self._op(logits, self._batch(step.host, sent))
        if step.host.penalised is not None:
            self._penalties.count(sampled, sent)
        found = [sampled.token_ids]
        if sampled.num_accepted is not None:
            found.append(sampled.num_accepted)
        if raw is not None and step.logprobs is not None:
            tokens = sampled.token_ids.reshape(-1).index_select(0, sent["logprob_tokens"])
            num_alternatives = int(step.logprobs.wanted.max())
            parts = [
                _parts(token_logprobs(raw[rows], tokens[rows], num_alternatives))
                for rows in self._rows_at_once(len(tokens), num_alternatives)
            ]
            found += _joined(parts)
        return sampled, found

    def prompt_logprobs(
        self, logits: Logits, step: StepSampling, sent: Mapping[str, Tensor]
    ) -> tuple[list[_Arrays], list[Tensor]]:
        """Log probabilities of the prompt tokens asked about, as `PendingStep` expects them: those that are on the host
        already, because the device couldn't hold all, and the tensors of the rest.
        """
        if step.prompt_logprobs is None:
            return [], []
        num_alternatives = int(step.prompt_logprobs.wanted.max())
        # Each result is held twice when the parts are joined, and again when they are packed for the copy.
        most_held = self._part_bytes // (2 * _RESULT_BYTES * (1 + num_alternatives))
        early: list[_Arrays] = []
        parts: list[list[Tensor]] = []
        held = 0
        for rows in self._rows_at_once(len(step.prompt_logprobs.rows), num_alternatives):
            count = rows.stop - rows.start
            if parts and held + count > most_held:
                early.append(self._transfers.download(_joined(parts)).wait())
                parts, held = [], 0
            logprobs = logits(sent["prompt_tokens"][rows]).log_softmax(-1)
            parts.append(_parts(token_logprobs(logprobs, sent["prompt_targets"][rows], num_alternatives)))
            held += count
        return early, _joined(parts)

    def _rows_at_once(self, num_rows: int, num_alternatives: int) -> Iterator[slice]:
        """Cuts rows of log probabilities into parts that can be made within `_part_bytes`."""
        row_bytes = _LOGPROB_BYTES * self._vocab_size + _ALTERNATIVE_BYTES * (1 + num_alternatives)
        size = min(max(self._part_bytes // row_bytes, 1), _MOST_ROWS)
        return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))

    def _batch(self, host: HostSampling, sent: Mapping[str, Tensor]) -> SamplingBatch:
        return SamplingBatch(
            num_random=host.num_random,
            random=sent.get("random"),
            uniform=sent.get("uniform"),
            temperature=sent.get("temperature"),
            top_k=sent.get("top_k"),
            top_p=sent.get("top_p"),
            min_p=sent.get("min_p"),
            max_top_k=host.max_top_k,
            bias_rows=sent.get("bias_rows"),
            bias_tokens=sent.get("bias_tokens"),
            bias_values=sent.get("bias_values"),
            penalties=None if host.penalised is None else self._penalties.batch(sent),
            drafts=sent.get("drafts"),
            draft_rows=sent.get("draft_rows"),
            readable=self._readable,
        )


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return list(parts[0]) if len(parts) == 1 else [torch.cat(column) for column in zip(*parts, strict=True)]


def _parts(found: TokenLogprobs) -> list[Tensor]:
    return [found.token_ids, found.logprobs, found.ranks]


def _logprob_request(layout: StepLayout, host: HostSampling) -> LogprobRequest:
    assert host.logprob_rows is not None
    assert host.num_logprobs is not None
    owners = layout.logit_owners[host.logprob_rows]
    columns = host.logprob_rows - np.searchsorted(layout.logit_owners, owners).astype(np.int32)
    return LogprobRequest(rows=layout.sampled[owners], wanted=host.num_logprobs, owners=owners, columns=columns)


def _draft_matrix(layout: StepLayout, batch: InputBatch) -> IntArray | None:
    """Drafts of the sampled rows [m, k] int32, padded with -1; None without drafts."""
    counts = layout.draft_counts
    if counts is None:
        return None
    slots = layout.slots[layout.sampled]
    columns = np.arange(int(counts.max(initial=0)))
    behind = batch.token_ids[slots[:, None], batch.num_tokens[slots][:, None] + columns]
    return np.where(columns < counts[:, None], behind, np.int32(-1))


def _draft_rows(layout: StepLayout, num_drafts: int) -> NDArray[np.int64]:
    """For each sampled row and column, the logits row that judges it [m, 1 + k]; the row's last one beyond its drafts."""
    assert layout.draft_counts is not None
    ends = np.cumsum(layout.draft_counts + 1, dtype=np.int64)
    starts = ends - layout.draft_counts - 1
    rows: NDArray[np.int64] = np.minimum(starts[:, None] + np.arange(num_drafts + 1), ends[:, None] - 1)
    return rows


@dataclass(frozen=True)
class _PromptTokens:
    tokens: NDArray[np.int64]  # [r] token rows of the step
    targets: NDArray[np.int64]  # [r] the prompt token after each
    request: LogprobRequest


def _prompt_tokens(layout: StepLayout, batch: InputBatch, wanted: IntArray) -> _PromptTokens | None:
    """The prompt tokens of this step whose successor, a prompt token too, is asked about; None when there are none."""
    if int(wanted[layout.slots].max()) < 0:
        return None
    slots = layout.token_slots
    tokens = np.flatnonzero((wanted[slots] >= 0) & (layout.positions + 1 < batch.num_prompt_tokens[slots]))
    if not len(tokens):
        return None
    rows = (np.searchsorted(layout.query_start_loc, tokens, side="right") - 1).astype(np.int32)
    targets = batch.token_ids[slots[tokens], layout.positions[tokens] + 1].astype(np.int64)
    request = LogprobRequest(rows=rows, wanted=wanted[layout.slots[rows]])
    return _PromptTokens(tokens.astype(np.int64), targets, request)
