"""What a request gives back: `RequestOutput`, one `CompletionOutput` a completion. Names as vLLM users know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from octavo.core.api.scheduling import FinishReason

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "TokenLogprobs"]


class Logprob(NamedTuple):
    """A token's log probability at one position, its rank there (from 1), and its text on its own."""

    logprob: float
    rank: int | None
    decoded_token: str | None


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""One position: the token itself first, then the alternatives asked for, best first."""


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of the monotonic clock that ``arrival_s`` was read from."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def latency_s(self) -> float | None:
        """Arrival to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class CompletionOutput:
    """One completion. ``token_ids`` includes the stop token; ``text`` doesn't, nor a stop string unless asked for."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request as far as it has come; with ``finished`` nothing more follows.

    ``num_cached_tokens`` counts prompt tokens whose KV came from the prefix cache. ``prompt_logprobs`` has one entry a prompt
    token, the first of them None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
