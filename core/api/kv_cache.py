"""KV specs: what a group of layers keeps for each request, how it is cut into blocks, and what may be freed early.

Messages (msgspec), so that a worker in another process can send them to the engine. No torch.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "MLA",
    "NULL_BLOCK",
    "AnyKVSpec",
    "FullAttention",
    "KVGroupInfo",
    "KVSpec",
    "RecurrentState",
    "SlidingWindow",
]

NULL_BLOCK = 0
"""Block 0 is never allocated: unused table entries, and blocks freed behind a window, point to it. Its content is undefined."""


class KVSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="spec", tag=lambda name: name):
    """Base: ``block_size`` tokens a block, ``bytes_per_block`` over all layers of the group."""

    block_size: int
    bytes_per_block: int


class FullAttention(KVSpec, frozen=True, kw_only=True):
    """Every token's K and V are kept until the request ends."""


class SlidingWindow(KVSpec, frozen=True, kw_only=True):
    """A query sees the last ``window`` tokens, its own included; blocks wholly behind the window are freed early."""

    window: int


class MLA(KVSpec, frozen=True, kw_only=True):
    """One latent vector a token instead of K and V; managed like full attention."""


class RecurrentState(KVSpec, frozen=True, kw_only=True):
    """One state a request instead of one entry a token; ``block_size`` is the distance between checkpoints, in tokens.

    A state lives in one block; a checkpoint at a block edge is a block of its own that a prefix hit can start from.
    """


AnyKVSpec: TypeAlias = FullAttention | SlidingWindow | MLA | RecurrentState


class KVGroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A KV group after allocation: its spec and the pool it draws from.

    Groups with one ``pool_id`` draw block ids from one pool (their buffers overlay each other); otherwise each has its own.
    ``num_blocks`` counts the null block.
    """

    spec: AnyKVSpec
    num_blocks: int
    pool_id: int
    manager: str | None = None  # a `kv_manager` plugin, or None for core's manager of that spec

    @property
    def block_size(self) -> int:
        return self.spec.block_size
