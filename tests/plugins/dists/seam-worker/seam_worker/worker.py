"""`CountingWorker`: put together from core's parts, with an answer of its own: how many tokens each step ran."""

from __future__ import annotations

import json
from typing import Any

import torch

from octavo.api.config import EngineConfig
from octavo.api.discovery import installed
from octavo.api.errors import EngineError, UsageError
from octavo.api.executor import WorkerInfo, WorkerMethod
from octavo.api.kv_cache import KVGroupInfo
from octavo.api.models import BuildContext
from octavo.api.ops import ParallelContext
from octavo.api.scheduling import StepPlan, StepResult
from octavo.api.worker import GroupCaches, ModelRunner, RunnerLimits, kv_specs, load_ops, resolve, settle_blocks

__all__ = ["CountingWorker"]

_KV_BYTES = 1 << 20


class CountingWorker:
    def __init__(self, config: EngineConfig, rank: int, device: int) -> None:
        self._config = config
        self._device = device
        self._runner: ModelRunner | None = None
        self._last = 0
        self.tokens: list[int] = []  # of each step

    def load(self) -> None:
        self._resolved = resolved = resolve(self._config)
        registry, chosen, spec = installed(), resolved.choice.chosen, resolved.spec
        self._platform = registry.platform(chosen.platform)
        self._platform.bind(self._device)
        self._backends = [
            registry.load("attention", chosen.attention[group.name])(group, self._platform) for group in resolved.groups
        ]
        self._ops = load_ops(resolved.ops.chosen, self._platform)
        length = resolved.config.model.max_model_len
        assert length is not None, "a resolved configuration says how long a request may be"
        build = BuildContext(
            ops=self._ops,
            platform=self._platform,
            dtype=resolved.config.model.dtype,
            parallel=ParallelContext(),
            max_model_len=length,
        )
        with torch.no_grad():
            self._model = registry.load("model", spec.model_plugin)(spec, resolved.source.weights(), build)
        self._limits = RunnerLimits(
            max_num_seqs=resolved.config.scheduler.max_num_seqs, max_model_len=length, vocab_size=spec.vocab_size
        )

    def kv_groups(self) -> tuple[KVGroupInfo, ...]:
        specs = kv_specs(self._resolved.groups, self._backends, self._model.layer_params())
        return settle_blocks(specs, self._resolved.config, _KV_BYTES)

    def allocate(self, groups: tuple[KVGroupInfo, ...]) -> WorkerInfo:
        params = self._model.layer_params()
        self._groups = [
            GroupCaches(group, backend, params, groups[group.kv_group].num_blocks)
            for group, backend in zip(self._resolved.groups, self._backends, strict=True)
        ]
        self._runner = ModelRunner(self._model, self._groups, groups, self._ops, self._platform, self._limits)
        return WorkerInfo(
            kv=groups,
            vocab_size=self._resolved.spec.vocab_size,
            weights_bytes=0,
            attention=dict(self._resolved.choice.chosen.attention),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        if self._runner is None:
            raise EngineError("allocate() comes before the first step")
        if plan.rows is not None:
            self._last = len(plan.rows)
        self.tokens.append(self._last if plan.num_scheduled_tokens is None else int(plan.num_scheduled_tokens.sum()))
        return self._runner.launch(plan).result()

    def call(self, method: WorkerMethod, **kwargs: Any) -> Any:
        if method is WorkerMethod.EXTENSION and kwargs.get("name") == "tokens":
            return json.dumps(self.tokens).encode()
        if method is WorkerMethod.ATTENTION_RUNS:
            return {layer: name for group in self._groups for layer, name in group.runs.items()}
        raise UsageError(f"a counting worker doesn't answer {method.value} {kwargs.get('name', '')}")

    def close(self) -> None:
        self._runner = None
        self._groups = []
