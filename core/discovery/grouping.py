"""Layers with equal specs form a group: one backend instance, one plan a step, one KV group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from octavo.core.api.attention import AttentionGroup, AttentionSpec


def attention_groups(specs: Sequence[AttentionSpec]) -> tuple[AttentionGroup, ...]:
    """Groups in the order of their first layer; ``specs`` is by layer index.

    A group is named after its layers' kind; where several specs share a kind, ``kind.1``, ``kind.2``, … ``block_size`` is 0 and
    ``kv_group`` numbers distinct KV needs until `resolved` settles both.
    """
    layers: dict[AttentionSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec, []).append(index)
    shared = Counter(spec.kind for spec in layers)
    seen: Counter[str] = Counter()
    groups = []
    for spec, indices in layers.items():
        seen[spec.kind] += 1
        name = spec.kind if shared[spec.kind] == 1 else f"{spec.kind}.{seen[spec.kind]}"
        groups.append(AttentionGroup(name=name, spec=spec, layers=tuple(indices), block_size=0, kv_group=0))
    return _numbered(groups, [_kv_need(group.spec) for group in groups])


def resolved(groups: Sequence[AttentionGroup], backends: Sequence[str], block_size: int) -> tuple[AttentionGroup, ...]:
    """The groups with their block size, and a KV group for each distinct pair of KV need and backend."""
    sized = [replace(group, block_size=block_size) for group in groups]
    return _numbered(sized, [(backend, _kv_need(group.spec)) for group, backend in zip(groups, backends, strict=True)])


def kind_of(group_name: str) -> str:
    """``"sliding_window.2"`` → ``"sliding_window"``."""
    return group_name.partition(".")[0]


def _kv_need(spec: AttentionSpec) -> Hashable:
    """What decides the shape and the life of a layer's cache."""
    managed_as = spec.kind if spec.kind in ("mla", "recurrent", "cross", "chunked_local") else "tokens"
    return managed_as, spec.num_kv_heads, spec.head_dim, spec.head_dim_v, spec.kv_dtype, spec.window


def _numbered(groups: Sequence[AttentionGroup], needs: Sequence[Hashable]) -> tuple[AttentionGroup, ...]:
    numbers = {need: number for number, need in enumerate(dict.fromkeys(needs))}
    return tuple(replace(group, kv_group=numbers[need]) for group, need in zip(groups, needs, strict=True))
