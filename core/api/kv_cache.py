"""KV specs: what a group of layers keeps for each request, how it is cut into blocks, and what may be freed early.

Messages (msgspec), so that a worker in another process can send them to the engine; and `KVManager`, the seam behind which the
block tables of one group are kept. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MLA",
    "NULL_BLOCK",
    "AnyKVSpec",
    "Blocks",
    "CustomSpec",
    "FullAttention",
    "KVGroupInfo",
    "KVManager",
    "KVSpec",
    "RecurrentState",
    "SlidingWindow",
    "TableChanges",
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


class CustomSpec(KVSpec, frozen=True, kw_only=True):
    """A spec that core doesn't know. `CacheBackend.kv_spec` gives it, and a `kv_manager` plugin keeps the tables.

    ``kind`` is the word that the manager's manifest lists in ``specs``; ``parameters`` reach the manager unread.
    """

    kind: str
    manager: str  # name of the `kv_manager` plugin
    parameters: dict[str, int] = {}
    kept_tokens: int | None = None  # the most tokens behind a step's first one that it still needs; None = all of them


AnyKVSpec: TypeAlias = FullAttention | SlidingWindow | MLA | RecurrentState | CustomSpec


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


class TableChanges(Protocol):
    """What a `KVManager` did to its tables and blocks, for the next `StepPlan`."""

    def set_entries(self, slots: NDArray[np.int32], columns: NDArray[np.int32], block_ids: NDArray[np.int32]) -> None:
        """``table[slots[i], columns[i]]`` became ``block_ids[i]``; each [n] int32."""

    def copy(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """The worker copies block ``sources[i]`` to ``targets[i]`` before any write of the step; each [n] int32."""


class Blocks(Protocol):
    """The block pool as a `KVManager` uses it. A block may have several references; without any, it can be allocated again.

    A block that comes free keeps what it carries, and its place in the prefix indexes, until it is allocated.
    """

    ref_count: NDArray[np.int32]  # [num_blocks] int32, read only
    indexes: tuple[dict[bytes, int], ...]  # one a KV group: key → the block that carries it; read only

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give."""

    def allocate(self, count: int) -> NDArray[np.int32]:
        """[count] int32 the least recently used free blocks, now with one reference each."""

    def acquire(self, blocks: NDArray[np.int32]) -> None:
        """One more reference to each of these (distinct) blocks."""

    def release(self, blocks: NDArray[np.int32]) -> None:
        """One reference less to each of these (distinct) blocks; those without any come free in the order given."""

    def idle_count(self, blocks: NDArray[np.int32]) -> int:
        """How many of these blocks no one holds: acquiring them takes them from the free ones."""

    def register(self, index: int, keys: Sequence[bytes], blocks: NDArray[np.int32]) -> None:
        """From now on ``blocks[i]`` can be found under ``keys[i]``. A key that another block carries stays with that block."""

    def key_of(self, block: int) -> tuple[int, bytes] | None:
        """The index and key under which a block can be found, if it can."""


class KVManager(ABC):
    """The block tables of one KV group. A plugin of kind ``kv_manager``; core has one for each `KVSpec`.

    A manager works on *slots* (rows of its ``table``), many at a time: a step in which nothing happens never calls it, thanks
    to `next_change`. Positions count tokens from 0; "write [start, end)" is what a row will write in the step being planned.
    A manager never decides who runs: the scheduler asks for the `demand`, and calls `extend` only when the pool can meet it.
    """

    full_hit: ClassVar[bool] = True
    """A request of which every token is in the cache can run its last token again from there (for its logits), writing nothing.
    False: at least that token stays out of a hit, and completions of one prompt don't fork from its end.
    """

    chunk_edge: ClassVar[bool] = False
    """True: no row may cross a multiple of ``block_size`` (it ends there, and goes on in the next step)."""

    table: NDArray[np.int32]  # [max_num_seqs, columns] int32, 0 where there is no block

    def __init__(self, info: KVGroupInfo, pool: Blocks, index: int, *, max_num_seqs: int, max_model_len: int) -> None:
        """``index`` is the group's own prefix index within the pool."""
        self.info = info
        self.pool = pool
        self.index = index
        self.block_size = info.block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len

    @abstractmethod
    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """The most blocks that one request of ``num_tokens`` holds at once if each step computes at most ``max_chunk``."""

    @abstractmethod
    def next_change(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """[n] int32: a row of one token may end at or below this position without `trim`, `demand` or `extend` being called."""

    def trim(self, slots: NDArray[np.int32], starts: NDArray[np.int32], changes: TableChanges) -> None:  # noqa: B027 (a default)
        """Give back what no query at ``starts[i]`` or later sees. Default: everything is seen for ever."""

    @abstractmethod
    def demand(self, slots: NDArray[np.int32], starts: NDArray[np.int32], ends: NDArray[np.int32]) -> NDArray[np.int32]:
        """[n] int32: how many blocks `extend` will take for each row (an upper bound). Changes nothing."""

    @abstractmethod
    def extend(
        self, slots: NDArray[np.int32], starts: NDArray[np.int32], ends: NDArray[np.int32], changes: TableChanges
    ) -> None:
        """Make positions [starts[i], ends[i]) writable: allocate blocks, replace a shared block that is written by a copy."""

    @abstractmethod
    def match(self, keys: Sequence[bytes], limit: int, last_query: int) -> tuple[int, NDArray[np.int32]]:
        """The longest cached prefix of at most ``limit`` tokens: its length, and the table entries that hold it.

        ``keys`` are those of the full blocks. The first query runs at the lesser of the prefix's length and ``last_query``.
        """

    def cost(self, hit: NDArray[np.int32], num_tokens: int, max_chunk: int) -> int:
        """How many of the pool's free blocks a request of ``num_tokens`` takes at its peak, ``hit`` being its cached
        entries.
        """
        held = hit[hit != NULL_BLOCK]
        return max(self.peak_blocks(num_tokens, max_chunk) - len(held), 0) + self.pool.idle_count(held)

    @abstractmethod
    def adopt(self, slot: int, hit: NDArray[np.int32], num_cached_tokens: int, changes: TableChanges) -> None:
        """Start an empty slot with what `match` found (one more reference to each block)."""

    @abstractmethod
    def commit(self, slots: NDArray[np.int32], columns: NDArray[np.int32], keys: Sequence[bytes]) -> None:
        """The sequence in ``slots[i]`` has filled block ``columns[i]``: it can be found under ``keys[i]`` from now on."""

    @abstractmethod
    def fork(self, parent: int, child: int, num_tokens: int, changes: TableChanges) -> None:
        """Give an empty slot the parent's first ``num_tokens`` tokens, sharing every block that can be shared."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """Give back all blocks of a slot, its last one first (so that the start of a sequence is evicted last)."""

    @abstractmethod
    def entries(self, slot: int) -> NDArray[np.int32]:
        """A copy of the slot's table entries that are in use, as `NewRequest` carries them."""
