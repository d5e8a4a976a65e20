"""How many KV blocks a device's memory allows, and what each KV group is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.api.attention import AttentionBackend, AttentionGroup, LayerParams
from octavo.core.api.errors import OutOfMemory, Unsupported
from octavo.core.api.kv_cache import (
    MLA,
    AnyKVSpec,
    CustomSpec,
    FullAttention,
    KVGroupInfo,
    KVSpec,
    RecurrentState,
    SlidingWindow,
)
from octavo.core.api.platform import MemoryInfo
from octavo.core.config import EngineConfig
from octavo.core.config.model_spec import ModelSpec
from octavo.core.kv_cache.peak import peak_of

__all__ = ["activation_bytes", "cache_allowance_bytes", "kv_specs", "logits_bytes", "settle_blocks"]

_MIB = 2**20


def kv_specs(
    groups: Sequence[AttentionGroup], backends: Sequence[AttentionBackend], params: Sequence[LayerParams]
) -> tuple[AnyKVSpec, ...]:
    """A spec for each KV group, by its number; bytes are what the backends say, over all layers with a cache of their own."""
    by_kv_group: dict[int, list[tuple[AttentionGroup, AttentionBackend]]] = {}
    for group, backend in zip(groups, backends, strict=True):
        by_kv_group.setdefault(group.kv_group, []).append((group, backend))
    assert sorted(by_kv_group) == list(range(len(by_kv_group))), "KV groups are numbered from 0 without gaps"
    return tuple(_kv_spec(by_kv_group[number], params) for number in range(len(by_kv_group)))


def _kv_spec(members: Sequence[tuple[AttentionGroup, AttentionBackend]], params: Sequence[LayerParams]) -> AnyKVSpec:
    first = members[0][0]
    sizes = {group.block_size for group, _ in members}
    units = {backend.kv_format().unit for _, backend in members}
    if len(sizes) > 1 or len(units) > 1:
        raise Unsupported(
            f"the backends of KV group {first.kv_group} ({', '.join(group.name for group, _ in members)}) disagree: "
            f"block sizes {sorted(sizes)}, units {sorted(units)}",
            hint="choose backends that agree with --attention-backend",
        )
    size_bytes = sum(
        backend.kv_format().bytes_per_unit * sum(params[index].kv_source_layer is None for index in group.layers)
        for group, backend in members
    )
    own = [backend.kv_spec(size_bytes) for _, backend in members]
    if any(spec is not None for spec in own):
        return _own_spec(first, own)
    size = first.block_size
    if units == {"request"}:
        return RecurrentState(block_size=size, bytes_per_block=size_bytes)
    if first.spec.kind == "mla":
        return MLA(block_size=size, bytes_per_block=size_bytes)
    if first.spec.window is not None:
        return SlidingWindow(block_size=size, bytes_per_block=size_bytes, window=first.spec.window)
    return FullAttention(block_size=size, bytes_per_block=size_bytes)


def _own_spec(first: AttentionGroup, own: Sequence[KVSpec | None]) -> AnyKVSpec:
    """The spec that the backends of a KV group give themselves, all the same one."""
    spec = own[0]
    if not isinstance(spec, AnyKVSpec) or any(other != spec for other in own):
        raise Unsupported(
            f"the backends of KV group {first.kv_group} ({first.name}, …) give {own} as its KV spec",
            hint="all must give the same one of octavo.api.kv_cache's: report this to their vendor",
        )
    return spec


def activation_bytes(spec: ModelSpec, config: EngineConfig, dtype_bytes: int) -> int:
    """A generous estimate of what a step needs beside weights and cache: the widest layer's activations, and the logits."""
    scheduler = config.scheduler
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    widest = 4 * spec.hidden_size + 3 * spec.intermediate_size + 3 * heads
    speculative = scheduler.num_speculative_tokens if scheduler.speculative else 0
    seen = scheduler.max_num_seqs * spec.vocab_size * 4  # int32 counts, for penalties
    logits = logits_bytes(scheduler.max_num_seqs, speculative, spec.vocab_size)
    return scheduler.max_num_batched_tokens * widest * dtype_bytes + logits + seen


_LEAST_LOGIT_ROWS = 8
"""So that log probabilities of one prompt token over the whole vocabulary fit however few requests may run."""
_LOGIT_WORDS = 8
"""The float32 logits, those that are drawn from, their probabilities, the sorted copy with its int64 places, and the log
probabilities asked for are six or seven at once.
"""


def logits_bytes(max_num_seqs: int, num_speculative_tokens: int, vocab_size: int) -> int:
    """What is set aside for logits and what is made of them; `Sampler` computes log probabilities in parts that fit."""
    rows = max(max_num_seqs * (1 + num_speculative_tokens), _LEAST_LOGIT_ROWS)
    return rows * vocab_size * 4 * _LOGIT_WORDS


def cache_allowance_bytes(config: EngineConfig, memory: MemoryInfo, activations_bytes: int) -> int:
    """Bytes that the caches may take: what was asked for, or what the weights and a step leave of the device's share.

    Raises `OutOfMemory` when more was asked for than is free.
    """
    asked = config.cache.kv_cache_memory_bytes
    if asked is not None:
        if asked > memory.free_bytes:
            raise OutOfMemory(
                f"the KV cache needs {_size(asked)}, {_size(memory.free_bytes)} is available",
                hint="lower --kv-cache-memory-bytes",
            )
        return asked
    used = memory.total_bytes - memory.free_bytes
    return int(memory.total_bytes * config.cache.gpu_memory_utilization) - used - activations_bytes


def settle_blocks(specs: Sequence[AnyKVSpec], config: EngineConfig, allowance_bytes: int) -> tuple[KVGroupInfo, ...]:
    """Share the allowance among the groups: blocks enough for one request of full length each, then equally many of each.

    A group that can't use more gets no more (a window's blocks for every request that may run). Raises `OutOfMemory` when one
    request doesn't fit.
    """
    max_model_len = config.model.max_model_len
    assert max_model_len is not None, "a resolved configuration says how long a request may be"
    if config.cache.num_blocks is not None:
        return tuple(_info(number, spec, config.cache.num_blocks) for number, spec in enumerate(specs))
    needs = [_need(spec, config, max_model_len) for spec in specs]
    least_bytes = _least_bytes(specs, config, max_model_len)
    if least_bytes > allowance_bytes:
        fits = _largest(lambda length: _least_bytes(specs, config, length) <= allowance_bytes, max_model_len)
        shorter = f" or lower --max-model-len to {fits} or less" if fits else ""
        raise OutOfMemory(
            f"one request of {max_model_len} tokens needs {_size(least_bytes)} of KV cache, "
            f"{_size(max(allowance_bytes, 0))} is available",
            hint=f"raise --kv-cache-memory-bytes (or --gpu-memory-utilization){shorter}",
        )

    def shares(level: int) -> list[int]:
        return [min(max(level, need.least), need.most) for need in needs]

    def fits_in(level: int) -> bool:
        used = sum(count * spec.bytes_per_block for count, spec in zip(shares(level), specs, strict=True))
        return used <= allowance_bytes

    smallest = min(spec.bytes_per_block for spec in specs)
    counts = shares(_largest(fits_in, min(_MOST_BLOCKS, allowance_bytes // smallest)))
    return tuple(_info(number, spec, count) for number, (spec, count) in enumerate(zip(specs, counts, strict=True)))


_MOST_BLOCKS = 2**31 - 1
"""Block ids are int32."""


@dataclass(frozen=True)
class _Need:
    least: int  # blocks, the null block included, that one request of full length needs
    most: int  # blocks that can be of any use


def _need(spec: AnyKVSpec, config: EngineConfig, length: int) -> _Need:
    scheduler = config.scheduler
    speculative = scheduler.num_speculative_tokens if scheduler.speculative else 0
    one = peak_of(spec, length + speculative, scheduler.max_num_batched_tokens)
    if config.cache.enable_prefix_caching and not isinstance(spec, SlidingWindow):
        return _Need(one + 1, _MOST_BLOCKS)  # what no request holds serves as prefix cache
    return _Need(one + 1, scheduler.max_num_seqs * one + 1)


def _least_bytes(specs: Sequence[AnyKVSpec], config: EngineConfig, length: int) -> int:
    return sum(_need(spec, config, length).least * spec.bytes_per_block for spec in specs)


def _info(number: int, spec: AnyKVSpec, num_blocks: int) -> KVGroupInfo:
    manager = spec.manager if isinstance(spec, CustomSpec) else None
    return KVGroupInfo(spec=spec, num_blocks=num_blocks, pool_id=number, manager=manager)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 0 to ``limit`` that fits, for a property that ends at some number; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _size(size_bytes: int) -> str:
    for unit, name, digits in ((2**30, "GiB", 2), (_MIB, "MiB", 1), (2**10, "KiB", 1)):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.{digits}f} {name}"
    return f"{size_bytes} bytes"
