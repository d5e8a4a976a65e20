"""`SamplingState`: the sampling parameters of every running request, in NumPy arrays by slot, and what a step needs of them.

No torch: `HostSampling` holds NumPy arrays that travel to the device with the rest of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.scheduling import IntArray, NewRequest
from octavo.core.worker.input_batch import StepLayout
from octavo.core.worker.random_numbers import request_seed, uniforms

__all__ = ["HostSampling", "SamplingState"]

_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: logits divided by it would overflow."""
_STEPS_AHEAD = 32
_FOREVER = np.iinfo(np.int32).max

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class HostSampling:
    """What the sampler needs in one step. ``fixed`` arrays are the same as in the step before when ``layout.same_requests``."""

    num_random: int
    max_top_k: int
    fixed: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    fresh: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    penalised: IntArray | None = None  # [p] logits rows with penalties
    logprob_rows: IntArray | None = None  # [q] logits rows whose log probabilities are wanted
    num_logprobs: IntArray | None = None  # [q] how many alternatives each wants


class SamplingState:
    """Sampling parameters by slot."""

    def __init__(self, max_num_seqs: int, vocab_size: int, engine_seed: int) -> None:
        self.vocab_size = vocab_size
        self._engine_seed = engine_seed
        self._temperature = np.zeros(max_num_seqs, np.float32)  # 0: greedy
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self.penalties = np.zeros((max_num_seqs, 3), np.float32)  # repetition, presence, frequency
        self.has_penalties = np.zeros(max_num_seqs, np.bool_)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._indices = np.zeros(max_num_seqs, np.int32)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._biases = _Biases()
        self._first_logit = np.zeros(max_num_seqs, np.int64)
        self._num_logits = np.zeros(max_num_seqs, np.int64)
        self._last: HostSampling | None = None
        self._last_random: IntArray | None = None
        self._ahead: FloatArray = np.zeros((0, 0), np.float32)  # [s, steps] uniform numbers of the steps to come
        self._num_used = 0  # columns of it

    def enter(self, request: NewRequest) -> None:
        """Note the parameters of a request that enters a slot."""
        slot, sampling = request.slot, request.sampling
        self._temperature[slot] = sampling.temperature if sampling.temperature >= _GREEDY_BELOW else 0
        self._top_k[slot] = 0 if not 0 < sampling.top_k < self.vocab_size else sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self.penalties[slot] = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        self.has_penalties[slot] = bool((self.penalties[slot] != (1, 0, 0)).any())
        self._seeds[slot] = request_seed(sampling, request.request_id, self._engine_seed)
        self._indices[slot] = request.index
        self._num_logprobs[slot] = _alternatives(sampling.logprobs, self.vocab_size)
        self.num_prompt_logprobs[slot] = _alternatives(sampling.prompt_logprobs, self.vocab_size)
        self._biases.enter(request, self.vocab_size)

    def leave(self, slots: IntArray) -> None:
        """Forget what the owners of ``slots`` asked for."""
        self._biases.leave(slots)
        self.has_penalties[slots] = False
        self.num_prompt_logprobs[slots] = -1

    def step(self, layout: StepLayout) -> HostSampling:
        """What the sampler needs for the step laid out."""
        owners = layout.slots[layout.sampled][layout.logit_owners]  # the slot of each logits row
        if layout.same_requests and self._last is not None:
            last, random = self._last, self._last_random
        else:
            last, random = self._shape(owners)
            self._ahead = self._ahead[:, :0]
        self._last, self._last_random = last, random
        fresh: dict[str, NDArray[np.generic]] = dict(self._bias_arrays(layout, owners))
        if last.num_random:
            rows = slice(None) if random is None else random
            fresh["uniform"] = self._uniforms(owners[rows], layout.logit_positions[rows], layout.same_requests)
        if not fresh:
            return last
        return HostSampling(
            num_random=last.num_random,
            max_top_k=last.max_top_k,
            fixed=last.fixed,
            fresh=fresh,
            penalised=last.penalised,
            logprob_rows=last.logprob_rows,
            num_logprobs=last.num_logprobs,
        )

    def _uniforms(self, slots: IntArray, positions: IntArray, steady: bool) -> FloatArray:
        """The rows' numbers [s]; in steady decoding those of several steps are made at once."""
        if self._num_used >= self._ahead.shape[1]:
            steps = np.arange(_STEPS_AHEAD if steady else 1, dtype=np.int32)
            seeds, indices = np.repeat(self._seeds[slots], len(steps)), np.repeat(self._indices[slots], len(steps))
            self._ahead = uniforms(seeds, indices, (positions[:, None] + steps).reshape(-1)).reshape(-1, len(steps))
            self._num_used = 0
        self._num_used += 1
        return np.ascontiguousarray(self._ahead[:, self._num_used - 1])

    def _shape(self, owners: IntArray) -> tuple[HostSampling, IntArray | None]:
        """What only depends on which requests are sampled, and the rows drawn at random (None = all of them)."""
        random = np.flatnonzero(self._temperature[owners] > 0).astype(np.int32)
        slots = owners[random]
        fixed: dict[str, NDArray[np.generic]] = {}
        max_top_k = 0
        if len(random):
            fixed["temperature"] = self._temperature[slots]
            top_k, top_p, min_p = self._top_k[slots], self._top_p[slots], self._min_p[slots]
            max_top_k = int(top_k.max())
            if max_top_k > 0:
                fixed["top_k"] = top_k
            if (top_p < 1).any():
                fixed["top_p"] = top_p
            if (min_p > 0).any():
                fixed["min_p"] = min_p
            if len(random) < len(owners):
                fixed["random"] = random.astype(np.int64)
        penalised = np.flatnonzero(self.has_penalties[owners]).astype(np.int32)
        wanted = self._num_logprobs[owners]
        logprob_rows = np.flatnonzero(wanted >= 0).astype(np.int32)
        shape = HostSampling(
            num_random=len(random),
            max_top_k=max_top_k,
            fixed=fixed,
            penalised=penalised if len(penalised) else None,
            logprob_rows=logprob_rows if len(logprob_rows) else None,
            num_logprobs=wanted[logprob_rows] if len(logprob_rows) else None,
        )
        return shape, None if len(random) == len(owners) else random

    def _bias_arrays(self, layout: StepLayout, owners: IntArray) -> Mapping[str, NDArray[np.generic]]:
        """Logit biases and forbidden tokens of the step, as entries of the logits; empty when there are none."""
        if not len(self._biases.slots) or not len(owners):
            return {}
        entries = self._biases
        self._num_logits[:] = 0
        np.add.at(self._num_logits, owners, 1)
        starts = np.flatnonzero(np.diff(layout.logit_owners, prepend=-1))
        self._first_logit[owners[starts]] = starts
        counts = self._num_logits[entries.slots]
        entry = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._first_logit[entries.slots[entry]] + offset
        active = layout.logit_positions[rows] < entries.until[entry]
        if not active.any():
            return {}
        rows, entry = rows[active], entry[active]
        return {"bias_rows": rows, "bias_tokens": entries.tokens[entry], "bias_values": entries.values[entry]}


class _Biases:
    """Values added to single logits: of ``logit_bias`` for ever, −inf of ``min_tokens`` until enough tokens are out."""

    def __init__(self) -> None:
        self.slots = np.zeros(0, np.int32)
        self.tokens = np.zeros(0, np.int64)
        self.values: FloatArray = np.zeros(0, np.float32)
        self.until = np.zeros(0, np.int32)  # positions below it are biased

    def enter(self, request: NewRequest, vocab_size: int) -> None:
        sampling = request.sampling
        entries = [(token, bias, _FOREVER) for token, bias in (sampling.logit_bias or {}).items() if token < vocab_size]
        if sampling.min_tokens:
            until = min(request.num_prompt_tokens + sampling.min_tokens, _FOREVER)
            stops = {*request.eos_token_ids, *(sampling.stop_token_ids or ())}
            entries += [(token, -np.inf, until) for token in sorted(stops) if token < vocab_size]
        if not entries:
            return
        tokens, values, until_positions = zip(*entries, strict=True)
        self.slots = np.append(self.slots, np.full(len(entries), request.slot, np.int32))
        self.tokens = np.append(self.tokens, np.array(tokens, np.int64))
        self.values = np.append(self.values, np.array(values, np.float32))
        self.until = np.append(self.until, np.array(until_positions, np.int32))

    def leave(self, slots: IntArray) -> None:
        if not len(self.slots):
            return
        stay = ~np.isin(self.slots, slots)
        self.slots, self.tokens = self.slots[stay], self.tokens[stay]
        self.values, self.until = self.values[stay], self.until[stay]


def _alternatives(asked: int | None, vocab_size: int) -> int:
    """How many alternatives a request's ``logprobs`` stand for: -1 none at all, where it says -1 the whole vocabulary."""
    if asked is None:
        return -1
    return vocab_size if asked == -1 else min(asked, vocab_size)
