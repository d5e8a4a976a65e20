"""The most blocks that one request holds at once: for a manager, which holds them, and for a worker, which sets them aside."""

from __future__ import annotations

from octavo.core.api.kv_cache import AnyKVSpec, CustomSpec, RecurrentState, SlidingWindow

__all__ = ["peak_of", "state_peak", "whole_peak", "window_peak"]


def whole_peak(num_tokens: int, block_size: int) -> int:
    """Of a request whose ``num_tokens`` are all kept."""
    return -(-num_tokens // block_size)


def window_peak(num_tokens: int, max_chunk: int, kept_tokens: int, block_size: int) -> int:
    """Of a request that keeps ``kept_tokens`` behind a step's first token. Neither end need fall on a block's edge."""
    return min(whole_peak(num_tokens, block_size), whole_peak(kept_tokens + max_chunk, block_size) + 1)


def state_peak(num_tokens: int, block_size: int) -> int:
    """At an edge: the state, the one left at the edge before (till its key is known), and the one that goes on."""
    return min(whole_peak(num_tokens, block_size), 3)


def peak_of(spec: AnyKVSpec, num_tokens: int, max_chunk: int) -> int:
    """What `KVManager.peak_blocks` of core's manager for ``spec`` says; for a plugin's, what its spec promises."""
    if isinstance(spec, RecurrentState):
        return state_peak(num_tokens, spec.block_size)
    if isinstance(spec, SlidingWindow):
        return window_peak(num_tokens, max_chunk, spec.window - 1, spec.block_size)
    if isinstance(spec, CustomSpec) and spec.kept_tokens is not None:
        return window_peak(num_tokens, max_chunk, spec.kept_tokens, spec.block_size)
    return whole_peak(num_tokens, spec.block_size)
