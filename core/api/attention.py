"""`AttentionBackend`: KV writes and attention for the layers of one group.

Arrays are opaque (`Array`); where one is declared, its comment gives shape and dtype. Whatever returns ``KVBuffers`` is rebound
by the caller, always, so functional (JAX) and in-place (torch) backends fit alike. Order within a step: block copies, then
writes, then attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.core.api.manifest import AttentionManifest, LayerKind, Verdict
from octavo.core.api.platform import Array, Platform

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.core.api.kv_cache import KVSpec

__all__ = [
    "DTYPE_BYTES",
    "AttentionBackend",
    "AttentionGroup",
    "AttentionResult",
    "AttentionSpec",
    "BufferSpec",
    "CacheBackend",
    "GroupBatch",
    "HostBatch",
    "Int32Array",
    "Int64Array",
    "KVBuffers",
    "KVFormat",
    "LayerParams",
    "Plan",
    "StepBatch",
    "SupportVerdict",
]

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
KVBuffers: TypeAlias = Mapping[str, Array]
"""One layer's cache: the arrays that `KVFormat.buffers` names, each ``[num_units, *shape]``."""
Plan: TypeAlias = Any
"""What `CacheBackend.plan` returns: opaque to core, passed to every layer of the group for one step."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a layer asks of its backend. Layers with equal specs form one `AttentionGroup`."""

    kind: LayerKind = "full_attention"
    num_heads: int  # per rank
    num_kv_heads: int  # per rank; divides num_heads
    head_dim: int  # of q and k
    head_dim_v: int
    scale: float  # multiplies q·k
    dtype: str  # of q, k, v and the output
    kv_dtype: str  # of the cache
    causal: bool = True
    window: int | None = None  # keys that a query sees, its own included: positions (i - window, i]
    soft_cap: float | None = None  # logits become cap * tanh(logits / cap), before the mask
    alibi: bool = False
    sinks: bool = False

    def features(self) -> frozenset[str]:
        """The manifest features that this spec needs on its own (how it is batched may ask for more)."""
        named = {
            "causal": self.causal,
            "non_causal": not self.causal,
            "gqa": self.num_heads != self.num_kv_heads and self.kind != "mla",
            "sliding_window": self.window is not None,
            "soft_cap": self.soft_cap is not None,
            "alibi": self.alibi,
            "sinks": self.sinks,
            "mla": self.kind == "mla",
            "cross": self.kind == "cross",
        }
        return frozenset(name for name, needed in named.items() if needed)


@dataclass(frozen=True, kw_only=True)
class AttentionGroup:
    """Layers with one spec, hence one backend instance, one plan a step and one KV group."""

    name: str  # the layer kind, with a suffix where several specs share it: "full_attention", "sliding_window", …
    spec: AttentionSpec
    layers: tuple[int, ...]
    block_size: int
    kv_group: int


@dataclass(frozen=True, kw_only=True)
class LayerParams:
    """What differs between the layers of a group."""

    index: int
    q_scale: float = 1.0
    k_scale: float = 1.0  # a cached k stands for k * k_scale
    v_scale: float = 1.0
    sinks: Array | None = None  # [num_heads] float32, natural-log units: an extra key with this logit and no value
    alibi_slopes: Array | None = None  # [num_heads] float32: adds slope * (key position - query position)
    kv_source_layer: int | None = None  # share the cache of that layer: this one writes nothing (k = v = None)


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """The step's lengths on the host. ``exact`` False = upper bounds, while sampled tokens are still on the device."""

    query_start_loc: Int32Array  # [num_reqs + 1]
    seq_lens: Int32Array  # [num_reqs]
    num_computed_tokens: Int32Array  # [num_reqs]
    exact: bool = True


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What one step runs, as device arrays with host views. Rows of at most ``decode_query_len`` tokens come first.

    Padded rows have ``seq_lens`` 0 and a flat ``query_start_loc``; padded tokens have slot -1. Their outputs are undefined.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: Array  # [num_reqs + 1] int32
    seq_lens: Array  # [num_reqs] int32, tokens in the cache after this step
    num_computed_tokens: Array  # [num_reqs] int32, tokens in the cache before it
    positions: Array  # [num_tokens] int64
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    decode_query_len: int
    host: HostBatch


@dataclass(frozen=True, kw_only=True)
class GroupBatch(StepBatch):
    """A `StepBatch` with one KV group's tables.

    Where a request has one state (`KVFormat.unit` "request"), the table's one column is the state's block, and so is a token's
    slot.
    """

    block_table: Array  # [num_reqs, max_blocks] int32; entries beyond a request's blocks, or behind its window, are 0
    slot_mapping: Array  # [num_tokens] int64, block * block_size + offset; -1 = don't write


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """One named cache array: ``shape`` of one unit, and its dtype word."""

    shape: tuple[int, ...]
    dtype: str


DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """A layer's cache: named buffers of ``unit``s (a block of tokens, or a request). The only source of byte counts."""

    buffers: Mapping[str, BufferSpec]
    unit: Literal["block", "request"] = "block"

    @property
    def bytes_per_unit(self) -> int:
        return sum(prod(buffer.shape) * DTYPE_BYTES[buffer.dtype] for buffer in self.buffers.values())


class AttentionResult(NamedTuple):
    """``out`` [num_tokens, num_heads, head_dim_v] and the cache, to be rebound; ``lse`` where it was asked for.

    A backend whose arrays can't be written in place overrides `AttentionBackend.forward` to return its log-sum-exp here.
    """

    out: Array
    kv: KVBuffers
    lse: Array | None = None  # [num_tokens, num_heads] float32


class CacheBackend(ABC):
    """What owns the cache of one group's layers. Attention and recurrent backends derive from it."""

    manifest: ClassVar[AttentionManifest]  # set by core when the class is loaded, from its octavo-plugin.toml

    def __init__(self, group: AttentionGroup, platform: Platform, *, enforce: bool = True) -> None:
        """Raises `Unsupported` when the group isn't supported; ``enforce=False`` lets conformance try what isn't declared."""
        self.group = group
        self.platform = platform
        if enforce:
            self.supports(group.spec, block_size=group.block_size).require(type(self))

    @classmethod
    def supports(cls, spec: AttentionSpec, *, block_size: int | None = None, arch: str | None = None) -> SupportVerdict:
        """Whether the backend takes this spec; the default asks the manifest and nothing else."""
        from octavo.core.discovery.capability import check_attention

        return SupportVerdict(reasons=check_attention(cls.manifest, spec, block_size=block_size, arch=arch))

    @abstractmethod
    def kv_format(self) -> KVFormat:
        """The cache of one layer of this group."""

    def kv_spec(self, bytes_per_block: int) -> KVSpec | None:
        """What the group's cache is to the KV manager; ``bytes_per_block`` counts all layers of its KV group.

        Default: None, core derives it from the attention spec. A backend whose cache lives otherwise gives a `CustomSpec`.
        """
        return None

    def allocate_kv(self, num_units: int) -> Sequence[KVBuffers]:
        """Zeroed caches, one for each layer of the group that doesn't share another's. Default: the platform's zeros."""

        def zeros(buffer: BufferSpec) -> Array:
            return self.platform.zeros((num_units, *buffer.shape), buffer.dtype)

        return [{name: zeros(buffer) for name, buffer in self.kv_format().buffers.items()} for _ in self.group.layers]

    @abstractmethod
    def copy_blocks(self, kv: KVBuffers, pairs: Int32Array) -> KVBuffers:
        """Copy whole blocks, ``pairs`` [n, 2] = (source, target); sources and targets are disjoint."""

    @abstractmethod
    def read_blocks(self, kv: KVBuffers, ids: Int32Array) -> Mapping[str, Tensor]:
        """Blocks on the host in their stored dtype.

        ``k`` [n, block_size, num_kv_heads, head_dim], ``v`` [n, block_size, num_kv_heads, head_dim_v] (absent for MLA),
        scales by name. For offload, transfer and tests.
        """

    @abstractmethod
    def write_blocks(self, kv: KVBuffers, ids: Int32Array, data: Mapping[str, Tensor]) -> KVBuffers:
        """The inverse of `read_blocks`."""

    @abstractmethod
    def plan(self, batch: GroupBatch) -> Plan:
        """Prepare one step, once for all layers of the group."""


class SupportVerdict(Verdict):
    """A `Verdict` about a backend, that can be made an error."""

    def require(self, backend: type[CacheBackend]) -> None:
        from octavo.core.api.errors import Unsupported

        if self.reasons:
            raise Unsupported(f"attention backend {backend.manifest.name!r}: " + "; ".join(map(str, self.reasons)))


class AttentionBackend(CacheBackend):
    """Attention over a block cache."""

    @abstractmethod
    def write_kv(self, kv: KVBuffers, k: Array, v: Array, plan: Plan, layer: LayerParams) -> KVBuffers:
        """Store ``k`` [num_tokens, num_kv_heads, head_dim] and ``v`` [.., head_dim_v] at the plan's slots."""

    @abstractmethod
    def attend(
        self, q: Array, kv: KVBuffers, plan: Plan, layer: LayerParams, out: Array, *, lse_out: Array | None = None
    ) -> Array:
        """Attention of ``q`` [num_tokens, num_heads, head_dim] into ``out`` [num_tokens, num_heads, head_dim_v].

        ``lse_out`` [num_tokens, num_heads] float32 receives the natural-log sum of exponentials. Returns ``out`` (in-place
        backends) or a new array (functional ones).
        """

    def forward(
        self,
        q: Array,
        k: Array | None,
        v: Array | None,
        kv: KVBuffers,
        plan: Plan,
        layer: LayerParams,
        out: Array,
        *,
        lse_out: Array | None = None,
    ) -> AttentionResult:
        """Write, then attend; override to fuse. ``k`` and ``v`` are None for a layer that shares another's cache."""
        if k is not None and v is not None:
            kv = self.write_kv(kv, k, v, plan, layer)
        return AttentionResult(self.attend(q, kv, plan, layer, out, lse_out=lse_out), kv, lse_out)
