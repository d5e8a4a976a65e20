"""`check_request`: what could never run is refused when it is added, with the numbers."""

from __future__ import annotations

import numpy as np

from octavo.core.api.errors import UsageError
from octavo.core.api.scheduling import Request
from octavo.core.config.scheduler import SchedulerConfig
from octavo.core.kv_cache.manager import KVCacheManager


def check_request(request: Request, config: SchedulerConfig, kv: KVCacheManager, max_model_len: int) -> None:
    """Raises `UsageError` when the request couldn't run to its ``max_tokens`` even with the whole cache to itself."""
    prompt, new = len(request.prompt_token_ids), request.max_tokens
    if request.prompt_token_ids.dtype != np.int32:
        raise UsageError(f"prompt_token_ids must be int32, not {request.prompt_token_ids.dtype}")
    if prompt == 0:
        raise UsageError("the prompt is empty; it must have at least one token")
    if prompt >= max_model_len:
        raise UsageError(
            f"the prompt has {prompt} tokens, the context has room for {max_model_len - 1} and an answer; shorten the prompt"
        )
    if new < 1:
        raise UsageError(f"max_tokens must be at least 1, not {new}")
    if not isinstance(request.priority, int):
        raise UsageError(f"priority must be a whole number, not {request.priority!r}")
    total = min(prompt + new, max_model_len) - 1  # the last token is never written
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and total > budget:
        raise UsageError(
            f"the request may grow to {total} tokens, a step takes {budget} and chunked prefill is off; "
            f"raise max_num_batched_tokens or lower max_tokens"
        )
    if total <= kv.always_fits(budget):
        return
    for pool, needed in zip(kv.pools, kv.peak_blocks(total, budget).tolist(), strict=True):
        if needed > pool.num_blocks - 1:
            raise UsageError(
                f"the request needs up to {needed} KV blocks ({prompt} prompt tokens, at most {new} new ones), "
                f"the cache has {pool.num_blocks - 1}; lower max_tokens, shorten the prompt or give the KV cache more memory"
            )
