"""`DeviceWorker`: core's worker, put together from its parts; and `make_worker`, which honours a platform's own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from octavo.core.api.attention import DTYPE_BYTES, AttentionBackend, AttentionGroup
from octavo.core.api.errors import EngineError, OutOfMemory, PluginError, Unsupported, UsageError
from octavo.core.api.executor import Worker, WorkerInfo, WorkerMethod
from octavo.core.api.kv_cache import KVGroupInfo, RecurrentState
from octavo.core.api.models import BuildContext, CausalLM
from octavo.core.api.ops import ParallelContext
from octavo.core.api.platform import Platform
from octavo.core.api.scheduling import StepPlan, StepResult
from octavo.core.discovery import installed
from octavo.core.worker.caches import GroupCaches
from octavo.core.worker.in_use import CheckedModel, InUse, NamedStep, checked_sampler
from octavo.core.worker.memory import activation_bytes, cache_allowance_bytes, kv_specs, settle_blocks
from octavo.core.worker.model_runner import ModelRunner, RunnerLimits
from octavo.core.worker.named import free_memory, is_out_of_memory, kv_format, named

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig
    from octavo.core.engine.resolve import Resolved
    from octavo.core.layers.ops import Ops

__all__ = ["DeviceWorker", "load_ops", "make_worker"]

_T = TypeVar("_T")
_WORKER = ("load", "kv_groups", "allocate", "execute", "call", "close")
"""What an `octavo.core.api.executor.Worker` can be asked."""


def make_worker(config: EngineConfig, rank: int, device: int) -> Worker:
    """The worker of the platform that ``config`` names: its own, or core's."""
    name = config.plugins.platform
    if name is None:
        raise UsageError("a worker needs a resolved configuration: its platform is still open")
    platform: Platform = installed().platform(name)
    who = f"platform {name!r}"
    factory = named(who, "worker_factory()", platform.worker_factory)
    if factory is None:
        return DeviceWorker(config, rank, device)
    worker = named(who, "making its worker", lambda: factory(config, rank, device))
    lacking = [
        method for method in ("load", "kv_groups", "allocate", "execute", "call", "close") if not hasattr(worker, method)
    ]
    if lacking:
        raise PluginError(f"{who} made {worker!r}, which is no Worker: it lacks {', '.join(lacking)}")
    return worker


class DeviceWorker:
    """One device of a platform whose arrays are torch's. Not thread-safe: one thread calls it."""

    def __init__(self, config: EngineConfig, rank: int, device: int) -> None:
        self._config = config
        self._rank = rank
        self._device = device
        self._groups: list[GroupCaches] = []
        self._runner: ModelRunner | None = None
        self._loaded: _Loaded | None = None

    def load(self) -> None:
        """Bind the device, load plugins and weights, build the backends. Raises typed errors."""
        from octavo.core.engine.resolve import resolve

        self._loaded = _guard_memory("the model's weights", lambda: _Loaded(resolve(self._config), self._device))

    def kv_groups(self) -> tuple[KVGroupInfo, ...]:
        """The KV groups with the blocks that the memory allowance gives each. Raises `OutOfMemory`."""
        loaded = self._need_loaded()
        config = loaded.config
        activations = activation_bytes(loaded.resolved.spec, config, DTYPE_BYTES[config.model.dtype])
        specs = kv_specs(loaded.resolved.groups, loaded.backends, loaded.model.layer_params())
        if config.scheduler.speculative and any(isinstance(spec, RecurrentState) for spec in specs):
            raise Unsupported(
                f"speculative decoding ({config.scheduler.speculative!r}) guesses tokens that may be taken back, and this "
                "model's recurrent layers can't take any out of their states",
                hint="leave --speculative out",
            )
        if config.cache.num_blocks is not None:
            return settle_blocks(specs, config, 0)
        return settle_blocks(specs, config, cache_allowance_bytes(config, free_memory(loaded.platform), activations))

    def allocate(self, groups: tuple[KVGroupInfo, ...]) -> WorkerInfo:
        """Allocate the caches of the groups given, and make ready to run. Raises `OutOfMemory`."""
        loaded = self._need_loaded()
        config, spec = loaded.config, loaded.resolved.spec
        params = loaded.model.layer_params()

        def allocate_all() -> list[GroupCaches]:
            return [
                GroupCaches(group, backend, params, groups[group.kv_group].num_blocks)
                for group, backend in zip(loaded.resolved.groups, loaded.backends, strict=True)
            ]

        self._groups = _guard_memory("the KV cache", allocate_all, hint="lower --kv-cache-memory-bytes")
        speculative = config.scheduler.num_speculative_tokens if config.scheduler.speculative else 0
        assert config.model.max_model_len is not None, "a resolved configuration says how long a request may be"
        limits = RunnerLimits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            vocab_size=spec.vocab_size,
            num_speculative_tokens=speculative,
            seed=config.model.seed,
        )
        model: Any = loaded.model
        if loaded.in_use.has_outside_arithmetic:
            model = CheckedModel(loaded.model, spec.vocab_size, loaded.in_use)
        self._runner = ModelRunner(model, self._groups, groups, loaded.ops, loaded.platform, limits)
        return WorkerInfo(
            kv=groups,
            vocab_size=spec.vocab_size,
            weights_bytes=loaded.weights_bytes,
            attention={group.name: backend.manifest.name for group, backend in loaded.named_backends()},
        )

    def launch(self, plan: StepPlan) -> NamedStep:
        """Start one step; its result can be read from any thread, also after later steps are launched."""
        runner, loaded = self._runner, self._loaded
        if runner is None or loaded is None:
            raise EngineError("the worker has no caches: allocate() comes before the first step")
        what, in_use = f"step {plan.step}", loaded.in_use
        pending = _guard_memory(
            what,
            lambda: in_use.named(what, lambda: runner.launch(plan)),
            hint="lower --max-num-batched-tokens or --max-num-seqs",
        )
        return NamedStep(plan.step, pending, loaded.resolved.spec.vocab_size, in_use)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self.launch(plan).result()

    def call(self, method: WorkerMethod, **kwargs: Any) -> Any:
        """Answer a `WorkerMethod`. Raises `UsageError` for one that this worker has no answer to."""
        if method is WorkerMethod.KV_MEMORY:
            return self._kv_memory()
        if method is WorkerMethod.COUNTERS:
            return self._counters()
        if method is WorkerMethod.ATTENTION_RUNS:
            return {layer: name for group in self._groups for layer, name in sorted(group.runs.items())}
        raise UsageError(f"no extension {kwargs.get('name')!r}: this platform's worker is core's, which has none")

    def close(self) -> None:
        """Give model and caches back."""
        loaded, self._loaded = self._loaded, None
        self._runner = None
        self._groups = []
        if loaded is not None:
            platform = loaded.platform
            del loaded
            gc.collect()
            platform.empty_cache()

    def _need_loaded(self) -> _Loaded:
        if self._loaded is None:
            raise EngineError("the worker isn't loaded: load() comes first")
        return self._loaded

    def _counters(self) -> Mapping[str, int]:
        if self._runner is None:
            return {"host_to_device": 0, "device_to_host": 0}
        transfers = self._runner.transfers
        return {"host_to_device": transfers.host_to_device, "device_to_host": transfers.device_to_host}

    def _kv_memory(self) -> Mapping[str, int]:
        memory = free_memory(self._need_loaded().platform)
        kv_bytes = sum(group.num_bytes for group in self._groups)
        return {"kv_bytes": kv_bytes, "free_bytes": memory.free_bytes, "peak_bytes": memory.peak_bytes}


class _Loaded:
    """Platform, backends, ops and model of a resolved configuration. Whatever can be refused is, before weights are read."""

    def __init__(self, resolved: Resolved, device: int) -> None:
        registry = installed()
        self.resolved = resolved
        self.config = config = resolved.config
        assert config.plugins.platform is not None, "resolve() makes every choice explicit"
        self.platform: Platform = registry.platform(config.plugins.platform)
        named(f"platform {self.platform.name!r}", "bind()", lambda: self.platform.bind(device))
        backend_of = resolved.choice.chosen.attention
        self.backends: Sequence[AttentionBackend] = [
            _backend(registry.load("attention", backend_of[group.name]), group, self.platform) for group in resolved.groups
        ]
        self.ops: Ops = load_ops(resolved.ops.chosen, self.platform)
        model: type[CausalLM] = registry.load("model", resolved.spec.model_plugin)
        max_model_len = config.model.max_model_len
        assert max_model_len is not None, "resolve() makes every choice explicit"
        build = BuildContext(
            ops=self.ops,
            platform=self.platform,
            dtype=config.model.dtype,
            parallel=ParallelContext(),
            max_model_len=max_model_len,
        )
        free_before = free_memory(self.platform).free_bytes
        self.in_use = InUse(resolved, registry)
        with torch.no_grad():
            self.model = self.in_use.named("loading the model", lambda: model(resolved.spec, resolved.source.weights(), build))
        self.weights_bytes = max(free_before - free_memory(self.platform).free_bytes, 0)

    def named_backends(self) -> Sequence[tuple[Any, AttentionBackend]]:
        return list(zip(self.resolved.groups, self.backends, strict=True))


def _backend(cls: type[AttentionBackend], group: AttentionGroup, platform: Platform) -> AttentionBackend:
    """The backend of one group, with a cache format that can be used. Raises `PluginError`."""
    backend = named(f"attention backend {cls.manifest.name!r}", "__init__()", lambda: cls(group, platform))
    form, who = kv_format(backend), f"attention backend {cls.manifest.name!r}"
    if not callable(getattr(backend, "forward", None)):
        raise PluginError(f"{who} has no forward(), which every layer calls; AttentionBackend.forward shows what it takes")
    if group.spec.kind == "recurrent" and form.unit != "request" and backend.kv_spec(form.bytes_per_unit) is None:
        raise PluginError(
            f"{who} answers kv_format() with unit {form.unit!r} for recurrent layers, expected 'request': one state a request"
        )
    return backend


def load_ops(chosen: Mapping[str, str], platform: Platform) -> Ops:
    """The ops that were chosen (op → plugin, or "default"), from their plugins. Raises `PluginError`."""
    from octavo.core.layers.ops import Ops

    registry = installed()
    offers: dict[str, Mapping[str, Any]] = {}
    overrides: dict[str, Any] = {}
    for op, name in chosen.items():
        if name == "default":
            continue
        entry = registry.find("ops", name)
        if name not in offers:
            offers[name] = _offer(name, registry.load("ops", name), entry.table.implements, platform)
        overrides[op] = offers[name][op]
        who = f"{entry.who} for {op}"
        try:
            Ops({op: overrides[op]}, platform=platform)
        except PluginError as error:
            raise PluginError(f"{who}: {error.message}", hint="report this to its vendor") from error
        if op == "verify_and_sample" and not entry.is_own:
            overrides[op] = checked_sampler(overrides[op], who)
    return Ops(overrides, platform=platform)


def _offer(
    name: str, target: Callable[[Platform], Mapping[str, Any]], declared: Sequence[str], platform: Platform
) -> Mapping[str, Any]:
    """What an ops plugin gives, checked against what its manifest says."""
    offer = named(f"ops plugin {name!r}", "making its ops", lambda: target(platform))
    if not isinstance(offer, Mapping):
        raise PluginError(f"ops plugin {name!r} gives {offer!r}, not ops by name")
    if set(offer) != set(declared):
        raise PluginError(
            f"ops plugin {name!r} gives {', '.join(sorted(offer)) or 'nothing'}, its manifest declares "
            f"{', '.join(sorted(declared))}",
            hint="the two must agree: report this to its vendor",
        )
    return offer


def _guard_memory(what: str, action: Callable[[], _T], *, hint: str = "use a smaller model or dtype") -> _T:
    """``action()``, with an allocator's failure as `OutOfMemory`."""
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"no memory for {what}: {error}", hint=hint) from error
        raise
