"""`resolve`: a configuration with open choices → the same with every choice explicit. No weight is read.

Order: platform → its ``propose`` → applied → attention for each group → block size → ops → its ``reject``. What a platform
proposes may touch an earlier step, which then runs again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.core.api.attention import DTYPE_BYTES, AttentionGroup, CacheBackend
from octavo.core.api.errors import OctavoError, PluginError, PluginNotFound, PluginUnavailable, SelectionError, UsageError
from octavo.core.api.manifest import PluginKind, Reason, Verdict
from octavo.core.api.models import CausalLM
from octavo.core.api.ops import OPS
from octavo.core.api.platform import ConfigChange, DeviceInfo, Platform
from octavo.core.config import EngineConfig
from octavo.core.config.model_spec import ModelSpec
from octavo.core.config.validate import validate
from octavo.core.discovery import Registry, installed
from octavo.core.discovery.grouping import attention_groups, resolved
from octavo.core.discovery.loading import root_cause
from octavo.core.discovery.op_selection import OpChoice, select_ops
from octavo.core.discovery.selection import Choice, Report, refusal, select
from octavo.core.engine.host_lengths import with_exact_lengths
from octavo.core.engine.torch_import import import_torch

if TYPE_CHECKING:
    from octavo.core.loading import ModelSource

logger = logging.getLogger("octavo")

_T = TypeVar("_T")

_MOST_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration in which nothing is open, and how it came about."""

    config: EngineConfig
    choice: Choice
    source: ModelSource
    spec: ModelSpec
    groups: tuple[AttentionGroup, ...]
    ops: OpChoice


def resolve(config: EngineConfig) -> Resolved:
    """Settle every open choice. Raises typed errors; a second call with the result's ``config`` gives the same."""
    again = _LAST() if _LAST is not None else None
    if again is not None and again.config == config:
        return again  # the worker in this process asks after the engine did
    registry = installed()
    _check_names(config, registry)
    if not config.model.model:
        raise UsageError("no model is given", hint="--model NAME|FOLDER|FILE.gguf; octavo models list shows the catalogue")
    settled_before = _is_resolved(config)
    if not settled_before:
        registry.probe(meanwhile=lambda: import_module("octavo.core.loading"))  # the probes run in a process of their own
        _warn_of_broken(registry)
        platform = select(
            config, registry.entries
        ).chosen.platform  # what can't run anywhere is refused before torch is imported
        import_torch(registry.find("platform", platform))
    from octavo.core.loading import open_model

    source = open_model(config.model.model, models=registry.models())
    spec = source.spec
    model: type[CausalLM] = registry.load("model", spec.model_plugin)
    settled = _settle(_with_context_length(config, spec), registry, model, spec)
    if not settled_before:
        _tell(settled.choice.report)
    return _remember(
        Resolved(config=settled.config, choice=settled.choice, source=source, spec=spec, groups=settled.groups, ops=settled.ops)
    )


_LAST: weakref.ref[Resolved] | None = None


def _remember(resolved: Resolved) -> Resolved:
    """Keep the last result for as long as somebody else holds it."""
    global _LAST
    _LAST = weakref.ref(resolved)
    return resolved


def _is_resolved(config: EngineConfig) -> bool:
    """Whether nothing is open any more: a worker gets such a configuration, and needs neither probes nor notices."""
    return config.plugins.platform is not None and config.cache.block_size is not None and set(config.plugins.op) == set(OPS)


def _tell(report: Report) -> None:
    for proposal in report.proposals:
        logger.info(proposal)
    for notice in report.notices:
        logger.warning(notice)


def _check_names(config: EngineConfig, registry: Registry) -> None:
    """Names that no plugin has are refused before any file is opened."""
    plugins, scheduler = config.plugins, config.scheduler
    named: list[tuple[PluginKind, str]] = [("executor", plugins.executor), ("scheduling_policy", scheduler.scheduling_policy)]
    if plugins.platform is not None:
        named.append(("platform", plugins.platform))
    if scheduler.speculative is not None:
        named.append(("proposer", scheduler.speculative))
    named += [("attention", name) for name in plugins.attention_backend.values()]
    named += [("ops", name) for name in plugins.op.values() if name != "default"]
    for kind, name in named:
        _find(registry, kind, name)
    known = {entry.name for entry in registry.entries} | {e.manifest.name for e in registry.entries if e.manifest is not None}
    for name in plugins.plugin:
        if name not in known:
            _find(registry, "hook", name)  # raises, with near matches


def _find(registry: Registry, kind: PluginKind, name: str) -> None:
    try:
        registry.find(kind, name)
    except PluginNotFound:
        registry.probe().find(kind, name)  # again, so that the message says of every other plugin whether it would work
        raise


def _warn_of_broken(registry: Registry) -> None:
    for entry in registry.entries:
        if entry.state == "probe-broken":
            logger.warning("plugin %r (%s) is left out: %s; octavo doctor shows more", entry.name, entry.origin, entry.reason)
        elif entry.warning:
            logger.warning("plugin %r (%s): %s", entry.name, entry.origin, entry.warning)


def _with_context_length(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    wanted, most = config.model.max_model_len, spec.max_position_embeddings
    if wanted is not None and wanted > most:
        raise UsageError(f"max_model_len {wanted} exceeds the model's own {most}", hint=f"--max-model-len {most} or less")
    return config.with_value("model.max_model_len", wanted or most)


@dataclass
class _Log:
    """What the platform set, and what it would have set if the operator hadn't."""

    proposals: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Settled:
    config: EngineConfig
    choice: Choice
    groups: tuple[AttentionGroup, ...]
    ops: OpChoice


def _settle(config: EngineConfig, registry: Registry, model: type[CausalLM], spec: ModelSpec) -> _Settled:
    log = _Log()
    for _ in range(_MOST_ROUNDS):
        name = select(config, registry.entries).chosen.platform
        platform = _platform(registry, name, named="platform" in config.given)
        device = _device(platform, config)
        with_platform = _with_dtype(config.with_value("plugins.platform", name), platform, device)
        with_platform = _with_async_scheduling(with_platform, platform)
        changed = _apply_proposals(config, with_platform, platform, log)
        if changed == config:
            return _settle_on(with_platform, registry, platform, device, model, spec, log)
        config = changed
    raise PluginError(
        f"platform {platform.name!r} still proposes changes after {_MOST_ROUNDS} rounds: report this to its vendor"
    )


def _apply_proposals(config: EngineConfig, shown: EngineConfig, platform: Platform, log: _Log) -> EngineConfig:
    """``config`` with what the platform asks for; what the operator set himself stays."""
    for change in _ask_for(platform, "propose", ConfigChange, lambda: platform.propose(shown)):
        _check_change(platform, change, shown)
        if shown.get(change.path) == change.value:
            continue
        if change.path.partition(".")[2] in config.given:
            log.notices.append(
                f"platform {platform.name} would set {change.path} to {change.value!r} ({change.reason}); yours is kept"
            )
            continue
        if change.path == "cache.kv_cache_memory_bytes" and "gpu_memory_utilization" in config.given:
            log.notices.append(
                f"gpu_memory_utilization has no effect on platform {platform.name}, which sets the KV cache's size itself; "
                "use --kv-cache-memory-bytes"
            )
        log.proposals.append(f"{change.path} = {change.value!r}: {change.reason} (platform {platform.name})")
        config = config.with_value(change.path, change.value)
    return config


def _platform(registry: Registry, name: str, *, named: bool) -> Platform:
    """The platform's instance. One that was chosen automatically and fails isn't replaced: its error says what to name."""
    try:
        platform: Platform = registry.platform(name)
    except PluginUnavailable as error:
        others = [entry.name for entry in registry.of_kind("platform") if entry.usable and entry.name != name]
        if not named and others:
            error.hint = f"choose another with --platform {' or --platform '.join(others)}"
        raise
    return platform


def _check_change(platform: Platform, change: ConfigChange, config: EngineConfig) -> None:
    """A proposal that isn't a valid configuration is the platform's mistake, not the operator's."""
    try:
        validate(config.with_value(change.path, change.value))
    except UsageError as error:
        raise PluginError(f"platform {platform.name!r} proposes {change.path} = {change.value!r}: {error}") from error


def _ask(platform: Platform, method: str, call: Callable[[], _T]) -> _T:
    """The platform's answer. Raises `PluginError` naming it when it raises."""
    try:
        return call()
    except OctavoError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"platform {platform.name!r} failed in {method}(): {root_cause(error)}") from error


def _ask_for(platform: Platform, method: str, kind: type[_T], call: Callable[[], Iterable[_T]]) -> tuple[_T, ...]:
    """The platform's answer, a list of ``kind``. Raises `PluginError` naming it when it raises or answers something else."""
    answer = _ask(platform, method, lambda: tuple(call()))
    for item in answer:
        if not isinstance(item, kind):
            raise PluginError(f"platform {platform.name!r} answers {method}() with {item!r}, not a {kind.__name__}")
    return answer


def _settle_on(
    config: EngineConfig,
    registry: Registry,
    platform: Platform,
    device: DeviceInfo,
    model: type[CausalLM],
    spec: ModelSpec,
    log: _Log,
) -> _Settled:
    """Attention, block size and ops on a platform that has nothing more to propose; then its say on the whole."""
    kv_dtype = config.model.dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    groups = attention_groups(model.attention(spec, config.model.dtype, kv_dtype))
    dtypes = _dtypes(platform, device)
    choice = select(config, registry.entries, groups=groups, arch=device.arch, dtypes=dtypes)
    chosen = choice.chosen
    assert chosen.block_size is not None, "a choice for groups has a block size"
    groups = resolved(groups, [chosen.attention[group.name] for group in groups], chosen.block_size)
    config = _explicit(config, chosen.attention, chosen.block_size, kv_dtype)
    entry = registry.find("platform", platform.name)
    ops = select_ops(config, registry.entries, entry, groups, arch=device.arch)
    config = config.with_value("plugins.op", MappingProxyType(dict(ops.chosen)))
    config, without = _without_chunk_context(config, registry, chosen.attention)
    config, in_turn = with_exact_lengths(config, registry, chosen.attention)
    _assert_supports(registry, groups, chosen.attention, device.arch)
    notices = (*log.notices, *choice.report.notices, *ops.notices, *without, *in_turn, *_without_scales(kv_dtype, model))
    report = replace(choice.report, notices=tuple(dict.fromkeys(notices)), proposals=tuple(log.proposals))
    rejected = _ask_for(platform, "reject", Reason, lambda: platform.reject(config))
    if rejected:
        raise SelectionError(f"platform {platform.name!r} can't run this: {refusal(rejected)}", report=report)
    return _Settled(
        config=replace(
            config, given=frozenset(config.flat())
        ),  # every choice is explicit now, also for whoever resolves it again
        choice=Choice(chosen=replace(chosen, ops=ops.chosen), report=report),
        groups=groups,
        ops=ops,
    )


def _explicit(config: EngineConfig, attention: Mapping[str, str], block_size: int, kv_dtype: str) -> EngineConfig:
    values: Mapping[str, Any] = {
        "plugins.attention_backend": MappingProxyType(dict(attention)),
        "cache.block_size": block_size,
        "cache.kv_cache_dtype": kv_dtype,
    }
    for path, value in values.items():
        config = config.with_value(path, value)
    return config


def _device(platform: Platform, config: EngineConfig) -> DeviceInfo:
    devices = {device.index: device for device in _ask_for(platform, "devices", DeviceInfo, platform.devices)}
    index = config.plugins.device
    if index not in devices:
        listed = ", ".join(f"{device.index} ({device.name})" for device in devices.values()) or "none"
        raise UsageError(f"platform {platform.name!r} has no device {index}; it has: {listed}")
    return devices[index]


def _dtypes(platform: Platform, device: DeviceInfo) -> tuple[str, ...]:
    """Activation dtypes of this device, the platform's order."""
    return tuple(dtype for dtype in platform.capabilities.dtypes if dtype in device.dtypes) or platform.capabilities.dtypes


def _with_dtype(config: EngineConfig, platform: Platform, device: DeviceInfo) -> EngineConfig:
    """dtype "auto" = the platform's first: bfloat16 where the hardware has it."""
    dtypes = _dtypes(platform, device)
    wanted = config.model.dtype
    if wanted == "auto":
        return config.with_value("model.dtype", dtypes[0])
    if wanted not in dtypes:
        raise SelectionError(
            f"platform {platform.name!r} has no {wanted} activations on device {device.index} ({device.name})",
            hint=f"--dtype {' or --dtype '.join(dtypes)}",
            report=Report(),
        )
    return config


def _with_async_scheduling(config: EngineConfig, platform: Platform) -> EngineConfig:
    """Off where the platform can't have a step planned while another runs; asking for it is refused there."""
    if platform.capabilities.async_scheduling:
        return config
    if config.scheduler.async_scheduling:
        raise SelectionError(
            f"platform {platform.name!r} runs one step at a time: it can't schedule asynchronously",
            hint="leave async_scheduling out",
            report=Report(),
        )
    return config.with_value("scheduler.async_scheduling", False)


def _without_scales(kv_dtype: str, model: type[CausalLM]) -> Sequence[str]:
    """What 8 bits do to K and V of a model that doesn't say how to scale them."""
    if DTYPE_BYTES[kv_dtype] > 1 or model.layer_params is not CausalLM.layer_params:
        return ()
    how = "rounded to whole numbers" if kv_dtype == "int8" else "cut off at the largest number that it holds"
    return (f"kv_cache_dtype {kv_dtype}: the model has no scales for K and V, which are {how}: answers may be wrong",)


def _without_chunk_context(
    config: EngineConfig, registry: Registry, attention: Mapping[str, str]
) -> tuple[EngineConfig, Sequence[str]]:
    """Turn off what needs attention over an earlier context, where a backend hasn't it.

    What the operator asked for himself was refused in `select`: it is among the features that backends are measured against.
    """
    lacking = sorted(
        {name for name in attention.values() if "chunk_context" not in registry.find("attention", name).table.features}
    )
    if not lacking:
        return config, ()
    turned_off = []
    for path in ("cache.enable_prefix_caching", "scheduler.enable_chunked_prefill"):
        if config.get(path):
            config = config.with_value(path, False)
            turned_off.append(path.partition(".")[2])
    notices = [f"{', '.join(turned_off)} turned off: {', '.join(lacking)} lacks chunk_context"] if turned_off else []
    length, budget = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    if length is not None and budget < length and "max_num_batched_tokens" not in config.given:
        config = config.with_value("scheduler.max_num_batched_tokens", length)
        notices.append(f"max_num_batched_tokens raised to {length}: a prompt can't be cut into chunks")
    return config, notices


def _assert_supports(
    registry: Registry, groups: Sequence[AttentionGroup], attention: Mapping[str, str], arch: str | None
) -> None:
    """A class that refuses what its manifest covers is wrong in one of the two: fatal, and both are named."""
    for group in groups:
        name = attention[group.name]
        cls: type[CacheBackend] = registry.load("attention", name)
        if cls.supports.__func__ is CacheBackend.supports.__func__:  # type: ignore[attr-defined]
            continue  # the default asks the manifest itself
        verdict: Any
        try:
            verdict = cls.supports(group.spec, block_size=group.block_size, arch=arch)
        except (Exception, SystemExit) as error:
            raise PluginError(f"attention backend {name!r} failed in supports(): {root_cause(error)}") from error
        if not isinstance(verdict, Verdict):
            raise PluginError(f"attention backend {name!r} answers supports() with {verdict!r}, not a SupportVerdict")
        if not verdict:
            manifest = registry.find("attention", name).manifest
            raise PluginError(
                f"attention backend {name!r}: {manifest.path if manifest else 'its manifest'} covers {group.name}, but "
                f"{cls.__module__}.{cls.__qualname__}.supports() refuses it: {refusal(verdict.reasons)}",
                hint="the two must agree: report this to its vendor",
            )
