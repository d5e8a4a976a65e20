"""Which attention backend serves each group, and with which block size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from octavo.core.api.attention import DTYPE_BYTES, AttentionGroup
from octavo.core.api.errors import SelectionError
from octavo.core.api.manifest import DTYPES, Reason
from octavo.core.config import EngineConfig
from octavo.core.config.validate import EVERY_LAYER
from octavo.core.discovery.block_size import PREFERRED, Constraint, solve_block_size
from octavo.core.discovery.capability import check_attention
from octavo.core.discovery.grouping import kind_of
from octavo.core.discovery.registry import PluginEntry, Registry, unavailable
from octavo.core.discovery.report import Candidate, Report
from octavo.core.discovery.situation import Situation

_MOST_COMBINATIONS = 256
# Without scales for K and V, which no model brings yet, 8 bits may give wrong answers: only the operator may want that.
_ADVISED_KV_DTYPES = tuple(dtype for dtype in DTYPES if DTYPE_BYTES[dtype] > 1)


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """A backend for each group, one block size, and how that came about."""

    backends: Mapping[str, str]
    block_size: int
    block_size_reason: str
    candidates: tuple[Candidate, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True)
class _Request(Situation):
    """Everything that backends are measured against."""

    backends: Sequence[PluginEntry]
    dtypes: Sequence[str]  # activation dtypes that the platform has

    def reasons(self, entry: PluginEntry, group: AttentionGroup, block_size: int | None = None) -> tuple[Reason, ...]:
        """Why ``entry`` can't serve ``group`` on this platform; empty when it can."""
        return self.unfit(entry) or check_attention(
            entry.table,
            group.spec,
            block_size=block_size or self.config.cache.block_size,
            arch=self.arch,
            platform=self.platform.name,
            archs=self.platform.table.archs,
            features=engine_features(self.config),
        )


def engine_features(config: EngineConfig) -> frozenset[str]:
    """What this configuration's batches ask of every backend, beyond the layers' own needs."""
    needs = set()
    if config.scheduler.max_num_seqs > 1:
        needs.add("mixed_batch")
    if config.scheduler.speculative is not None:
        needs |= {"chunk_context", "multi_token_decode"}
    asked_for = {"enable_prefix_caching": config.cache.enable_prefix_caching}
    asked_for["enable_chunked_prefill"] = config.scheduler.enable_chunked_prefill
    if any(on and name in config.given for name, on in asked_for.items()):
        needs.add("chunk_context")
    return frozenset(needs)


def select_attention(
    config: EngineConfig,
    entries: Sequence[PluginEntry],
    platform: PluginEntry,
    groups: Sequence[AttentionGroup],
    arch: str | None,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
) -> AttentionChoice:
    """A backend for every group. Raises `SelectionError`, `PluginNotFound` or `PluginUnavailable`."""
    backends = [entry for entry in entries if entry.kind == "attention"]
    request = _Request(config, platform, arch, groups, backends, dtypes)
    explicit = {group.name: _explicit(config, group.name) for group in groups}
    options = [_options(request, group, explicit[group.name]) for group in groups]
    chosen, block_size = _first_combination(request, options)
    names = {group.name: entry.name for group, entry in zip(groups, chosen, strict=True)}
    return AttentionChoice(
        backends=names,
        block_size=block_size,
        block_size_reason=_why(request, chosen, block_size),
        candidates=_candidates(request, set(names.values())),
        notices=_without_effect(config, groups),
    )


def _explicit(config: EngineConfig, group: str) -> str | None:
    named = config.plugins.attention_backend
    return named.get(group) or named.get(kind_of(group)) or named.get(EVERY_LAYER)


def _options(request: _Request, group: AttentionGroup, explicit: str | None) -> Sequence[PluginEntry]:
    """The backends that can serve the group, best first; never empty."""
    if explicit is not None:
        entry = Registry(request.backends).find("attention", explicit)
        if not entry.usable:
            raise unavailable(entry)
        reasons = request.reasons(entry, group)
        if reasons:
            raise _refused(request, f"attention backend {explicit!r} can't serve {group.name}: {_lines(reasons)}", entry)
        return [entry]
    able = [entry for entry in _automatic_order(request) if not request.reasons(entry, group)]
    if not able:
        each = "; ".join(
            f"{entry.name}: {_lines(request.reasons(entry, group) or (_only_when_named(entry),))}" for entry in request.backends
        )
        raise _refused(
            request, f"no attention backend can serve {group.name} on {request.platform.name}: {each or 'none is installed'}"
        )
    return able


def _only_when_named(entry: PluginEntry) -> Reason:
    hint = f"--attention-backend {entry.name}"
    return Reason(field="auto", wanted="an automatic choice", supported="used only when named", hint=hint)


def _automatic_order(request: _Request) -> Sequence[PluginEntry]:
    """The platform's preference, then the others by name."""
    preferred = list(request.platform.table.attention)
    automatic = [entry for entry in request.backends if entry.table is not None and entry.table.auto]
    rank = {name: place for place, name in enumerate(preferred)}
    return sorted(automatic, key=lambda entry: (rank.get(entry.name, len(rank)), entry.name))


def _first_combination(request: _Request, options: Sequence[Sequence[PluginEntry]]) -> tuple[tuple[PluginEntry, ...], int]:
    """The first backends, in order of preference, that have a block size in common."""
    first: Sequence[Constraint] | None = None
    for chosen in islice(product(*options), _MOST_COMBINATIONS):
        constraints = _constraints(request, chosen)
        size = solve_block_size(constraints, request.config.cache.block_size)
        if size is not None:
            return chosen, size
        first = first or constraints
    listed = "; ".join(map(str, first or ()))
    raise _refused(request, f"no block size suits every group: {listed}")


def _constraints(request: _Request, chosen: Sequence[PluginEntry]) -> Sequence[Constraint]:
    def accepts(entry: PluginEntry, group: AttentionGroup, size: int) -> bool:
        return not request.reasons(entry, group, size)

    return [
        Constraint(
            group=group.name,
            backend=entry.name,
            allowed=entry.table.block_sizes,
            accepts=lambda size, entry=entry, group=group: accepts(entry, group, size),  # type: ignore[misc]
        )
        for group, entry in zip(request.groups, chosen, strict=True)
    ]


def _why(request: _Request, chosen: Sequence[PluginEntry], size: int) -> str:
    """Who constrained the block size."""
    limits = "; ".join(dict.fromkeys(f"{entry.name} allows {entry.table.block_sizes}" for entry in chosen))
    if request.config.cache.block_size is not None:
        how = "as configured"
    else:
        how = "the preferred size" if size == PREFERRED else f"{PREFERRED} isn't allowed by all"
    return f"{size}: {how}; {limits}"


def _candidates(request: _Request, chosen: set[str]) -> tuple[Candidate, ...]:
    """Every backend with its reasons over all groups; a group's name is put before the field where there are several."""
    several = len(request.groups) > 1
    candidates = []
    for entry in request.backends:
        reasons: list[Reason] = []
        for group in request.groups:
            for reason in request.reasons(entry, group):
                of_entry = reason.field in ("state", "platform")
                prefix = f"{group.name}." if several and not of_entry else ""
                reasons.append(replace(reason, field=prefix + reason.field))
        if not reasons and not entry.table.auto and entry.name not in chosen:
            reasons.append(_only_when_named(entry))
        candidates.append(
            Candidate(
                name=entry.name,
                kind="attention",
                origin=entry.origin,
                reasons=tuple(dict.fromkeys(reasons)),
                chosen=entry.name in chosen,
            )
        )
    return tuple(candidates)


def _without_effect(config: EngineConfig, groups: Sequence[AttentionGroup]) -> tuple[str, ...]:
    known = {EVERY_LAYER, *(group.name for group in groups), *(kind_of(group.name) for group in groups)}
    return tuple(
        f"attention backend {name!r} for {key} has no effect: the model has no such layers"
        for key, name in config.plugins.attention_backend.items()
        if key not in known
    )


def _refused(request: _Request, message: str, entry: PluginEntry | None = None) -> SelectionError:
    advice = list(_advice(request, entry))
    return SelectionError(
        message,
        hint="this would work: " + ", or ".join(advice) if advice else None,
        report=Report(candidates=_candidates(request, set())),
    )


def _advice(request: _Request, refused: PluginEntry | None) -> Iterator[str]:
    """Changes of one flag after which every group is served; each was tried."""
    config = request.config
    others = [entry for entry in _automatic_order(request) if entry is not refused]
    for entry in others[:8]:
        if _works(replace(request, config=config.with_value("plugins.attention_backend", {EVERY_LAYER: entry.name}))):
            yield f"--attention-backend {entry.name}"
            break
    if config.cache.block_size is not None:
        size = _solved(replace(request, config=config.with_value("cache.block_size", None)))
        if size is not None:
            yield f"--block-size {size}"
    for dtype in request.dtypes:
        if dtype != config.model.dtype and _works(_with_dtype(request, dtype)):
            yield f"--dtype {dtype}"
            break
    for kv_dtype in ("auto", *_ADVISED_KV_DTYPES):
        if kv_dtype != config.cache.kv_cache_dtype and _works(_with_kv_dtype(request, kv_dtype)):
            yield f"--kv-cache-dtype {kv_dtype}"
            break


def _with_dtype(request: _Request, dtype: str) -> _Request:
    follow = request.config.cache.kv_cache_dtype == "auto"
    specs = [replace(group.spec, dtype=dtype, kv_dtype=dtype if follow else group.spec.kv_dtype) for group in request.groups]
    return replace(
        request,
        config=request.config.with_value("model.dtype", dtype),
        groups=[replace(group, spec=spec) for group, spec in zip(request.groups, specs, strict=True)],
    )


def _with_kv_dtype(request: _Request, kv_dtype: str) -> _Request:
    groups = [
        replace(group, spec=replace(group.spec, kv_dtype=group.spec.dtype if kv_dtype == "auto" else kv_dtype))
        for group in request.groups
    ]
    return replace(request, config=request.config.with_value("cache.kv_cache_dtype", kv_dtype), groups=groups)


def _works(request: _Request) -> bool:
    return _solved(request) is not None


def _solved(request: _Request) -> int | None:
    """The block size with which the request would be served, or None."""
    options = []
    for group in request.groups:
        explicit = _explicit(request.config, group.name)
        tried = [e for e in request.backends if e.name == explicit] if explicit else _automatic_order(request)
        options.append([entry for entry in tried if not request.reasons(entry, group)])
    for chosen in islice(product(*options), _MOST_COMBINATIONS):
        size = solve_block_size(_constraints(request, chosen), request.config.cache.block_size)
        if size is not None:
            return size
    return None


def _lines(reasons: Sequence[Reason]) -> str:
    return "; ".join(map(str, reasons))
