"""What a step runs through, for messages: a failure in the middle of a model rarely tells by itself whose code it was.

Nothing here costs a good step anything, where all of it is Octavo's own; and next to nothing where a model or op isn't.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from octavo.core.api.errors import EngineError, OctavoError, PluginError
from octavo.core.api.ops import OPS
from octavo.core.api.scheduling import StepResult
from octavo.core.discovery.loading import root_cause
from octavo.core.discovery.op_selection import DEFAULT
from octavo.core.discovery.registry import LABELS, PluginEntry, Registry
from octavo.core.discovery.wording import first_cause
from octavo.core.worker.named import is_out_of_memory
from octavo.core.worker.sampling_op import Sampled, SamplingBatch

if TYPE_CHECKING:
    from octavo.core.api.models import CausalLM
    from octavo.core.engine.resolve import Resolved
    from octavo.core.worker.pending import PendingStep

__all__ = ["CheckedModel", "InUse", "NamedStep", "checked_sampler"]

_T = TypeVar("_T")


class InUse:
    """The plugins that run a resolved configuration's steps; as text, those from outside core come first."""

    def __init__(self, resolved: Resolved, registry: Registry) -> None:
        self._ops: dict[str, list[str]] = {}  # ops plugin → the ops that it gives
        for op in OPS:
            self._ops.setdefault(resolved.ops.chosen.get(op, DEFAULT), []).append(op)
        chosen = resolved.choice.chosen
        names: list[tuple[Any, str]] = [
            *(("ops", name) for name in self._ops if name != DEFAULT),
            *(("attention", name) for name in dict.fromkeys(chosen.attention.values())),
            ("model", resolved.spec.model_plugin),
            ("platform", str(resolved.config.plugins.platform)),
        ]
        entries = [registry.find(kind, name) for kind, name in names]
        self._own = [entry for entry in entries if entry.is_own]
        self._outside = [entry for entry in entries if not entry.is_own]

    @property
    def has_outside_arithmetic(self) -> bool:
        """Whether the model or an op is from outside: then the logits are looked at."""
        return any(entry.kind in ("ops", "model") for entry in self._outside)

    def outside_op(self, op: str) -> str | None:
        """Who gives the op; None where that is core itself."""
        return next((self._who(e) for e in self._outside if e.kind == "ops" and op in self._ops[e.name]), None)

    def __str__(self) -> str:
        outside = ", ".join(map(self._who, self._outside))
        others = "other op" if any(entry.kind == "ops" for entry in self._outside) else "op"
        own = [f"{LABELS[entry.kind]} {entry.name!r}" for entry in self._own if entry.kind != "ops"]
        own += [f"every {others}"] if len(self._ops) > 1 or DEFAULT in self._ops else []
        return f"{outside}; Octavo's own: {', '.join(own)}" if outside else ", ".join(own)

    def named(self, what: str, call: Callable[[], _T]) -> _T:
        """``call()``. What it raises unmeant becomes an error that names who raised it, or else all that is from outside.

        Typed errors and an allocator's failure stay what they are, and so does everything where nothing is from outside.
        """
        try:
            return call()
        except OctavoError:
            raise
        except (Exception, SystemExit) as error:
            if not self._outside or is_out_of_memory(error):
                raise
            raise self._error(what, error) from error

    def _error(self, what: str, error: BaseException) -> OctavoError:
        raisers = self._raisers(error)
        if not raisers:
            return EngineError(f"the worker failed in {what}: {root_cause(error)}", hint=f"it ran with {self}")
        others = [entry for entry in self._outside if entry not in raisers]
        return PluginError(
            f"{' or '.join(map(self._who, raisers))} failed in {what}: {root_cause(error)}",
            hint=f"it ran with {', '.join(map(self._who, others))}" if others else None,
        )

    def _raisers(self, error: BaseException) -> Sequence[PluginEntry]:
        """Whose code raised: the innermost frame that is a plugin's. None when one of core lies deeper, as where core comes
        upon a wrong result.
        """
        for module in _modules(first_cause(error).__traceback__ or error.__traceback__):
            homes = {id(entry): _nearness(module, entry) for entry in self._outside}
            nearest = max(homes.values(), default=0)
            if nearest:
                return [entry for entry in self._outside if homes[id(entry)] == nearest]
            if module.partition(".")[0] == "octavo":
                break
        return ()

    def _who(self, entry: PluginEntry) -> str:
        return f"{entry.who} for {', '.join(self._ops[entry.name])}" if entry.kind == "ops" else entry.who


class CheckedModel:
    """A model whose logits are looked at: its own code, or an op that it calls, is from outside."""

    def __init__(self, model: CausalLM, vocab_size: int, in_use: InUse) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._in_use = in_use

    def forward(self, token_ids: Tensor, step: Any) -> tuple[Tensor, Tensor]:
        return self._model.forward(token_ids, step)

    def logits(self, x: Tensor, residual: Tensor, rows: Tensor, step: Any) -> Tensor:
        logits: Any = self._model.logits(x, residual, rows, step)
        shape = (rows.shape[0], self._vocab_size)
        if not isinstance(logits, Tensor) or logits.shape != shape or logits.dtype != torch.float32:
            raise PluginError(
                f"the logits are {_described(logits)}, expected {shape} torch.float32", hint=f"they come from {self._in_use}"
            )
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class NamedStep:
    """A launched step; where it fails, it says what it ran with."""

    def __init__(self, step: int, pending: PendingStep, vocab_size: int, in_use: InUse) -> None:
        self._step = step
        self._pending = pending
        self._vocab_size = vocab_size
        self._in_use = in_use

    @property
    def done(self) -> bool:
        """Whether `result` answers at once."""
        return self._pending.done

    def result(self) -> StepResult:
        """Wait for the step; on any thread. Raises `PluginError` for a token id that no vocabulary has."""
        result = self._in_use.named(f"step {self._step}", self._pending.result)
        sampler = self._in_use.outside_op("verify_and_sample")
        if sampler is not None:
            self._check(result, sampler)
        if not result.failed:
            return result
        failed: Mapping[int, str] = {row: f"{why}; the step ran with {self._in_use}" for row, why in result.failed.items()}
        return msgspec.structs.replace(result, failed=dict(failed))

    def _check(self, result: StepResult, sampler: str) -> None:
        tokens, _ = self._pending.sampled()
        wrong = tokens[tokens >= self._vocab_size]
        if not len(wrong) and int((tokens[:, :1] < 0).sum()) > len(result.failed):
            wrong = tokens[tokens < 0]
        if len(wrong):
            raise PluginError(
                f"{sampler} gives token id {wrong[0]} in step {self._step}, expected one from 0 to {self._vocab_size - 1}",
                hint="report this to its vendor",
            )


def checked_sampler(op: Callable[[Tensor, SamplingBatch], Sampled], who: str) -> Callable[[Tensor, SamplingBatch], Sampled]:
    """An outsider's ``verify_and_sample``, held to the form of its answer. Raises `PluginError`."""

    def verify_and_sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
        rows = (logits.shape[0], 1) if batch.drafts is None else (batch.drafts.shape[0], 1 + batch.drafts.shape[1])
        sampled: Any = op(logits, batch)
        if not isinstance(sampled, Sampled):
            raise PluginError(f"{who} gives {_described(sampled)}, not a Sampled")
        tokens: Any = sampled.token_ids
        if not isinstance(tokens, Tensor) or (tokens.shape, tokens.dtype) != (rows, torch.int32):
            raise PluginError(f"{who} gives tokens {_described(tokens)}, expected {rows} torch.int32 on {logits.device}")
        if batch.drafts is not None and not isinstance(sampled.num_accepted, Tensor):
            raise PluginError(f"{who} gives {_described(sampled.num_accepted)} as the number of drafts accepted, not a tensor")
        return sampled

    return verify_and_sample


def _described(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"{tuple(given.shape)} {given.dtype} on {given.device}"
    return f"a {type(given).__name__}"


def _modules(traceback: TracebackType | None) -> Sequence[str]:
    """The modules of a traceback's frames, innermost first."""
    found = []
    while traceback is not None:
        found.append(str(traceback.tb_frame.f_globals.get("__name__", "")))
        traceback = traceback.tb_next
    return found[::-1]


def _nearness(module: str, entry: PluginEntry) -> int:
    """How sure it is that a module is the plugin's: 2 it is the one that is loaded, 1 it is of the same package, 0 it isn't."""
    home = entry.target.partition(":")[0]
    if module == home:
        return 2
    return int(f"{module}.".startswith(f"{home.partition('.')[0]}."))
