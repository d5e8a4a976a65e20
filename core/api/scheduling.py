"""What travels between scheduler, engine and workers; and the seams of scheduling: `SchedulingPolicy` and `Proposer`.

Messages are msgspec structs with NumPy arrays in them (`octavo.core.engine.wire` encodes both; nothing is pickled). They carry
differences: a decode step in which nothing happens is a `StepPlan` with nothing but its number. No torch.

**Slots.** A running request owns a slot, an integer below ``max_num_seqs``, from its `NewRequest` until the plan that lists the
slot in ``released``. Scheduler and worker both keep their state in arrays indexed by it. The worker keeps each slot's tokens
(prompt, sampled tokens appended as they are sampled), its ``num_computed_tokens`` and its block tables; the plan never repeats
what the worker can know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.api.sampling import SamplingParams

if TYPE_CHECKING:
    from octavo.core.scheduling.state import RequestView

__all__ = [
    "Drafts",
    "FinishReason",
    "FinishedRequest",
    "IntArray",
    "Logprobs",
    "NewRequest",
    "Proposer",
    "Request",
    "SchedulerStats",
    "SchedulingPolicy",
    "StartedRequest",
    "StepOutput",
    "StepPlan",
    "StepResult",
    "TableUpdate",
]

IntArray: TypeAlias = NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, kw_only=True):
    """A tokenised request, as the front hands it to the engine core.

    ``sampling.n`` > 1 asks for that many completions (``index`` 0 … n-1) from one copy of the prompt's blocks.
    """

    request_id: str
    prompt_token_ids: IntArray  # [num_prompt_tokens] int32
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int  # already clipped to what the context leaves
    arrival_time_s: float = 0.0
    priority: int = 0  # lower is served first (policy "priority")
    cache_salt: str | None = None  # requests share cached prefixes only under one salt
    extra_keys: Any = None  # reserved for LoRA and multimodal content: hashed with every block
    index: int = 0
    stepwise: bool = False  # after each token a completion waits for `Scheduler.fork` or `advance` (beam search)


class NewRequest(msgspec.Struct, kw_only=True):
    """A request enters a slot: new, forked, or resumed after preemption."""

    slot: int
    request_id: str
    index: int
    token_ids: IntArray  # [n] int32: every token known so far (prompt, and output when resumed or forked)
    num_prompt_tokens: int
    num_computed_tokens: int  # the first position to run
    num_cached_tokens: int  # positions below it are in the cache already, maybe shared: never written again (slot -1)
    block_ids: tuple[IntArray, ...]  # for each KV group, the table's first entries
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()  # for min_tokens: the worker forbids these and stop_token_ids before it


class TableUpdate(msgspec.Struct, kw_only=True):
    """Entries of one KV group's block tables that change: ``table[slots[i], columns[i]] = block_ids[i]``."""

    slots: IntArray  # [n] int32
    columns: IntArray  # [n] int32
    block_ids: IntArray  # [n] int32; 0 where a block was freed behind a window


class Drafts(msgspec.Struct, kw_only=True):
    """Speculative tokens of an engine-side proposer, for the rows given. Each follows the row's last known token."""

    rows: IntArray  # [d] int32, indices into this step's rows
    counts: IntArray  # [d] int32
    token_ids: IntArray  # [sum(counts)] int32


class StepPlan(msgspec.Struct, kw_only=True):
    """One step. Applied by the worker in the order of the fields; all sources of ``block_copies`` are read before any target
    is written, since a block that was given back may be a source and a target.

    ``rows`` None = the previous step's rows, each with one token. Rows of at most ``decode_query_len`` tokens come first
    (``num_decodes`` of them). A row is sampled when it reaches the last token known of its slot.
    """

    step: int
    released: IntArray | None = None  # [k] int32 slots that are free from now on
    new: Sequence[NewRequest] = ()
    tables: tuple[TableUpdate | None, ...] = ()  # one a KV group, or empty when no table changes
    block_copies: tuple[IntArray | None, ...] = ()  # one a KV group: [n, 2] int32 (source, target), before any write
    rows: IntArray | None = None  # [num_reqs] int32 slots, in batch order
    num_scheduled_tokens: IntArray | None = None  # [num_reqs] int32, drafts included
    num_decodes: int = 0
    drafts: Drafts | None = None


class Logprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of the rows that asked for them: the token itself first, then the alternatives, best first."""

    rows: IntArray  # [m] int32, index of the row in the step; a row may come several times (several tokens)
    token_ids: IntArray  # [m, 1 + k] int32, padded with -1
    logprobs: NDArray[np.float32]  # [m, 1 + k]
    ranks: IntArray  # [m] int32, rank of the token itself, from 1


class StepResult(msgspec.Struct, kw_only=True):
    """What a step gave, rows as in its plan."""

    step: int
    sampled: IntArray  # [num_reqs, 1 + k] int32, padded with -1; all -1 for a row that wasn't sampled
    num_accepted: IntArray | None = None  # [num_reqs] int32 drafts accepted; None = no drafts in this step
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # rows with prompt positions computed in this step, in order
    failed: dict[int, str] = {}  # row → why it has no token (its logits were NaN, …): the request ends with reason "error"


class StartedRequest(msgspec.Struct, kw_only=True):
    """A completion got a slot: for the first time, or again (then perhaps another one) after it had been preempted."""

    slot: int
    request_id: str
    index: int
    num_cached_tokens: int


class FinishedRequest(msgspec.Struct, kw_only=True):
    """A completion ended; its last tokens are in the same `StepOutput` (its row is still listed there)."""

    slot: int  # -1 if it never had one
    request_id: str
    index: int
    reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id or string
    message: str = ""  # why, for reason "error"


class StepOutput(msgspec.Struct, kw_only=True):
    """What the scheduler learned from one `StepResult`, in arrays; the output processor keeps the slot → request map.

    Order of application: ``started``, then tokens, then ``finished``. A slot's owner in ``started`` replaces the former one.
    """

    slots: IntArray  # [n] int32, rows that produced tokens
    token_ids: IntArray  # [n, 1 + k] int32, padded with -1
    started: Sequence[StartedRequest] = ()
    finished: Sequence[FinishedRequest] = ()
    logprobs: Logprobs | None = None  # ``rows`` index into ``slots`` here
    prompt_logprobs: Logprobs | None = None  # ``rows`` are slots here


class SchedulerStats(msgspec.Struct, kw_only=True):
    """Counters and gauges of one scheduler, cumulative where named ``…_total``."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # 0 … 1: blocks that requests hold
    prefix_queries_total: int = 0  # tokens looked up
    prefix_hits_total: int = 0  # tokens found
    preemptions_total: int = 0
    evictions_total: int = 0
    scheduled_tokens_total: int = 0
    steps_total: int = 0
    draft_tokens_total: int = 0  # guesses of the proposer that were verified …
    accepted_tokens_total: int = 0  # … and those that were right

    @property
    def prefix_hit_rate(self) -> float:
        """0 … 1: the share of the tokens looked up that was found, since the start."""
        return self.prefix_hits_total / max(1, self.prefix_queries_total)


class SchedulingPolicy(ABC):
    """The order in which requests wait, and who is preempted. A plugin of kind ``scheduling_policy``."""

    name: ClassVar[str]

    @abstractmethod
    def key(self, request: RequestView) -> tuple[float, ...]:
        """Sort key of a waiting request, lowest first. Must not change while the request waits."""

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        """Sort key among running requests when blocks run out: the highest is preempted. Default: `key`."""
        return self.key(request)


class Proposer(ABC):
    """Guesses tokens ahead (speculative decoding). A plugin of kind ``proposer``."""

    location: ClassVar[Literal["engine", "worker"]] = "engine"

    @abstractmethod
    def propose(self, tokens: Sequence[IntArray], num_speculative_tokens: int) -> Sequence[IntArray]:
        """For each sequence (every token known, int32), up to that many guesses for what follows; may be empty."""
