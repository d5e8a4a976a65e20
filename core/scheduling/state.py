"""What the scheduler knows of a request: `RequestState` for what is said once, `SlotArrays` for what changes every step."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import IntArray, Request
from octavo.core.kv_cache.hashing import Prefix

NO_SLOT = -1


class RequestView(Protocol):
    """One completion, as a `SchedulingPolicy` sees it."""

    @property
    def request_id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def arrival_time_s(self) -> float: ...
    @property
    def arrival(self) -> int:
        """Order of arrival: requests added later have higher numbers; the completions of one request share it."""

    @property
    def priority(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Prompt and output known so far."""

    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...


class Status(Enum):
    PENDING = auto()  # a further completion, until the prompt of completion 0 is computed
    WAITING = auto()
    RUNNING = auto()
    LEAVING = auto()  # preempted; a step in flight may still give it tokens
    FINISHED = auto()


class RequestState:
    """One completion of a request (``n`` > 1 has one state each). Implements `RequestView`."""

    __slots__ = (
        "arrival",
        "forks",
        "index",
        "known",
        "num_prompt_tokens",
        "parked",
        "prefix",
        "prompt_logprobs",
        "prompt_logprobs_given",
        "prompt_logprobs_seen",
        "request",
        "slot",
        "slots",
        "status",
        "stepped_back_at",
        "stop_ids",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        arrival: int,
        slots: SlotArrays,
        prefix: Prefix,
        status: Status = Status.WAITING,
    ) -> None:
        self.request = request
        self.index = index
        self.arrival = arrival
        self.slots = slots
        self.slot = NO_SLOT
        self.known: IntArray = request.prompt_token_ids  # every token known, while there is no slot
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.prefix = prefix
        self.status = status
        self.forks: list[RequestState] = []  # completions that wait for this one's prompt
        self.parked = False  # keeps slot and blocks, but isn't scheduled
        self.stepped_back_at = -1  # cached tokens when it last let another request fill the cache for it
        self.prompt_logprobs = index == request.index and request.sampling.prompt_logprobs is not None  # still to be reported
        self.prompt_logprobs_given = self.prompt_logprobs_seen = 0  # positions, at all and in this slot
        sampling = request.sampling
        eos = () if sampling.ignore_eos else request.eos_token_ids
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos, *(sampling.stop_token_ids or ()))))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def arrival_time_s(self) -> float:
        return self.request.arrival_time_s

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def max_tokens(self) -> int:
        return self.request.max_tokens

    def bequeath(self) -> RequestState:
        """Hand the completions that wait for this one's prompt, and its prompt log probabilities, on to the first of them."""
        heir, *heir_forks = self.forks
        heir.forks, self.forks = heir_forks, []
        heir.prompt_logprobs, heir.prompt_logprobs_given = self.prompt_logprobs, self.prompt_logprobs_given
        return heir

    def sampling(self) -> SamplingParams:
        """What the worker is told: prompt log probabilities are asked for once a request."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs is None or self.prompt_logprobs:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=None)

    def take_prompt_logprob(self) -> bool:
        """The worker gave the next prompt position's log probabilities: whether they are new and wanted."""
        self.prompt_logprobs_seen += 1
        new = self.prompt_logprobs_seen > self.prompt_logprobs_given
        self.prompt_logprobs_given = max(self.prompt_logprobs_given, self.prompt_logprobs_seen)
        return new and self.prompt_logprobs and self.status is not Status.FINISHED

    def leave_slot(self) -> None:
        """Take the tokens along; the prompt is computed again in the next slot."""
        self.known = self.tokens.copy()
        self.slot = NO_SLOT
        self.prompt_logprobs_seen = 0
        if len(self.known) > self.num_prompt_tokens:  # all of them were given
            self.prompt_logprobs = False

    @property
    def tokens(self) -> IntArray:
        """[num_tokens] int32, every token known (a view while in a slot)."""
        if self.slot == NO_SLOT:
            return self.known
        return self.slots.tokens[self.slot, : self.slots.num_known[self.slot]]

    @property
    def num_tokens(self) -> int:
        return len(self.known) if self.slot == NO_SLOT else int(self.slots.num_known[self.slot])

    @property
    def num_planned_tokens(self) -> int:
        """`num_tokens` and those that steps in flight will give."""
        return len(self.known) if self.slot == NO_SLOT else int(self.slots.num_tokens[self.slot])

    @property
    def num_computed_tokens(self) -> int:
        return 0 if self.slot == NO_SLOT else int(self.slots.num_computed[self.slot])


STOP_COLUMNS = 8
"""A request's stop tokens are compared as vectors up to this many; longer lists are looked up row by row."""


class SlotArrays:
    """The running requests' numbers, by slot.

    ``num_tokens`` counts a token as soon as the step that samples it is planned; ``num_known`` once its value is known.
    ``num_computed`` counts positions of planned steps. A decode row has ``num_tokens`` = ``num_computed`` + 1.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.tokens: IntArray = np.zeros((max_num_seqs, _round_up(min(max_model_len, 2048))), np.int32)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, np.int32)
        self.num_known: IntArray = np.zeros(max_num_seqs, np.int32)
        self.num_computed: IntArray = np.zeros(max_num_seqs, np.int32)
        self.num_cached: IntArray = np.zeros(max_num_seqs, np.int32)
        self.limit: IntArray = np.zeros(max_num_seqs, np.int32)  # tokens at which the completion ends for its length
        self.stops_from: IntArray = np.zeros(max_num_seqs, np.int32)  # with fewer tokens, no stop token ends it
        self.stop_ids: IntArray = np.full((1, max_num_seqs), -1, np.int32)  # [up to STOP_COLUMNS, slots]
        self.stop_sets: dict[int, frozenset[int]] = {}  # slot → its stop tokens, where they are more than STOP_COLUMNS
        self.ignored: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)  # ended; rows still in flight are dropped
        self.special: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)  # has forks to start, or goes step by step
        self.parked: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)  # it runs, but has no row until it is woken

    def enter(self, state: RequestState, slot: int, tokens: IntArray, num_computed: int, num_cached: int) -> None:
        """Put a completion into a free slot, with these tokens known."""
        count, sampling = len(tokens), state.request.sampling
        self.make_room(min(state.num_prompt_tokens + state.max_tokens, self.max_model_len))
        self.tokens[slot, :count] = tokens
        self.num_tokens[slot] = self.num_known[slot] = count
        self.num_computed[slot] = num_computed
        self.num_cached[slot] = num_cached
        self.limit[slot] = min(state.num_prompt_tokens + state.max_tokens, self.max_model_len)
        self.stops_from[slot] = min(state.num_prompt_tokens + sampling.min_tokens, self.max_model_len)
        self._set_stop_ids(slot, state.stop_ids)
        self.special[slot] = bool(state.forks) or state.request.stepwise
        self.parked[slot] = state.parked
        state.slot = slot

    def make_room(self, num_tokens: int) -> None:
        """Widen the token matrix (doubling) so that sequences of this length fit."""
        width = self.tokens.shape[1]
        if num_tokens > width:
            wanted = min(self.max_model_len, max(num_tokens, 2 * width))
            wider = np.zeros((len(self.tokens), _round_up(wanted)), np.int32)
            wider[:, :width] = self.tokens
            self.tokens = wider

    def leave(self, slot: int) -> None:
        """The slot is empty from now on."""
        self.ignored[slot] = False
        self.stop_sets.pop(slot, None)

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        if len(ids) > STOP_COLUMNS:
            self.stop_sets[slot] = frozenset(ids)
            ids = ()
        if len(ids) > len(self.stop_ids):
            wider = np.full((len(ids), self.stop_ids.shape[1]), -1, np.int32)
            wider[: len(self.stop_ids)] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[:, slot] = -1
        self.stop_ids[: len(ids), slot] = ids


def _round_up(num_tokens: int) -> int:
    """A width that common block sizes divide, so that whole blocks can be gathered."""
    return -(-num_tokens // 256) * 256
