"""Whether an attention backend's manifest covers a spec. Pure: the manifest and the request decide, nothing else."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from octavo.core.api.manifest import AttentionManifest, Condition, Reason

if TYPE_CHECKING:
    from octavo.core.api.attention import AttentionSpec

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "": operator.eq,
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as conditions see it. None and empty mean: not asked yet, conditions on it don't apply."""

    dtype: str | None = None
    kv_dtype: str | None = None
    head_size: int | None = None
    block_size: int | None = None
    features: frozenset[str] = frozenset()
    kind: str | None = None
    platform: str | None = None
    arch: str | None = None
    archs: tuple[str, ...] = ()  # the platform's order


def check_attention(
    manifest: AttentionManifest,
    spec: AttentionSpec,
    *,
    block_size: int | None = None,
    arch: str | None = None,
    platform: str | None = None,
    archs: Sequence[str] = (),
    features: Iterable[str] = (),
) -> tuple[Reason, ...]:
    """Every reason why the backend doesn't take ``spec``; empty when it does.

    ``features`` are needed beyond the spec's own (how the engine batches). ``archs`` is the platform's order, that ``except``
    rules compare ``arch`` in; a device whose arch isn't in it falls under every rule about archs.
    """
    needed = spec.features() | frozenset(features)
    asked = Asked(
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype,
        head_size=spec.head_dim,
        block_size=block_size,
        features=needed,
        kind=spec.kind,
        platform=platform,
        arch=arch,
        archs=tuple(archs),
    )
    return (
        *_newer_fields(manifest, spec),
        *_outside_lists(manifest, spec, block_size),
        *(
            Reason(field="features", wanted=feature, supported=_listed(manifest.features))
            for feature in sorted(needed - set(manifest.features))
        ),
        *_restricted(manifest, asked),
    )


def applies(condition: Condition, asked: Asked) -> bool:
    """Whether every field that the condition sets holds."""
    return (
        _among(asked.dtype, condition.dtypes)
        and _among(asked.kv_dtype, condition.kv_dtypes)
        and _among(asked.kind, condition.kinds)
        and (condition.head_sizes is None or asked.head_size in condition.head_sizes)
        and (condition.block_sizes is None or asked.block_size in condition.block_sizes)
        and set(condition.features) <= asked.features
        and (condition.platform is None or condition.platform == asked.platform)
        and (condition.arch is None or _arch_matches(condition.arch, asked))
    )


def _among(value: str | None, allowed: tuple[str, ...]) -> bool:
    return not allowed or value in allowed


def _arch_matches(rule: str, asked: Asked) -> bool:
    if asked.arch is None:
        return False
    found = re.match(r"(<=|>=|==|!=|<|>|)(.*)", rule)
    assert found is not None, "the pattern matches any text"
    sign, name = found.groups()
    if sign in ("", "==", "!="):
        return _COMPARE[sign](asked.arch, name)
    order = asked.archs
    if asked.arch not in order or name not in order:
        return True  # it can't be compared: the rule's refusal is the safe side
    return _COMPARE[sign](order.index(asked.arch), order.index(name))


def _newer_fields(manifest: AttentionManifest, spec: AttentionSpec) -> tuple[Reason, ...]:
    """Fields that came after the plugin's API level, at a value that isn't their default."""
    return tuple(
        Reason(
            field=field.name,
            wanted=f"{getattr(spec, field.name)!r}, since octavo.api {'.'.join(map(str, since))}",
            supported="octavo.api " + ".".join(map(str, manifest.api)),
        )
        for field in fields(spec)
        if (since := field.metadata.get("since", (1, 0))) > manifest.api and getattr(spec, field.name) != field.default
    )


def _outside_lists(manifest: AttentionManifest, spec: AttentionSpec, block_size: int | None) -> tuple[Reason, ...]:
    reasons = []
    if spec.kind not in manifest.kinds:
        reasons.append(Reason(field="kind", wanted=spec.kind, supported=_listed(manifest.kinds)))
    if spec.dtype not in manifest.dtypes:
        reasons.append(Reason(field="dtype", wanted=spec.dtype, supported=_listed(manifest.dtypes)))
    if spec.kv_dtype not in manifest.kv_dtypes:
        reasons.append(Reason(field="kv_dtype", wanted=spec.kv_dtype, supported=_listed(manifest.kv_dtypes)))
    for name, size in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if size not in manifest.head_sizes and not (name == "head_dim_v" and size == spec.head_dim):
            reasons.append(Reason(field=name, wanted=str(size), supported=str(manifest.head_sizes)))
    if block_size is not None and block_size not in manifest.block_sizes:
        reasons.append(Reason(field="block_size", wanted=str(block_size), supported=str(manifest.block_sizes)))
    return tuple(reasons)


def _restricted(manifest: AttentionManifest, asked: Asked) -> tuple[Reason, ...]:
    rules = [("except", rule) for rule in manifest.excepts] + [("withheld", rule) for rule in manifest.withheld]
    return tuple(
        Reason(field=word, wanted=describe(rule.when), supported=rule.reason)
        for word, rule in rules
        if applies(rule.when, asked)
    )


def describe(condition: Condition) -> str:
    """The condition on one line: ``kv_dtypes fp8_e4m3, features sinks, arch <acme3``."""
    parts = []
    for field in fields(condition):
        value = getattr(condition, field.name)
        if value:
            parts.append(f"{field.name} {' '.join(value) if isinstance(value, tuple) else value}")
    return ", ".join(parts)


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) or "none"
