from __future__ import annotations

from dataclasses import dataclass

from octavo.core.config._field import option


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much runs at once, and in which order."""

    max_num_seqs: int = option(256, help="requests that run at once")
    max_num_batched_tokens: int = option(2048, help="token budget of a step")
    enable_chunked_prefill: bool = option(True, help="cut long prompts into chunks that fit the step's budget")
    long_prefill_token_threshold: int = option(0, help="most tokens of one prompt a step; 0 = no cap")
    scheduling_policy: str = option("fcfs", help="order of service: fcfs, priority or a plugin's")
    async_scheduling: bool | None = option(None, help="plan a step while the last one runs (default: where the executor can)")
    speculative: str | None = option(None, help="proposer of speculative tokens: ngram or a plugin's")
    num_speculative_tokens: int = option(4, help="most tokens a proposer may guess ahead")
