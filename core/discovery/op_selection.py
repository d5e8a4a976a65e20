"""Which implementation each op gets. Pure: configuration, manifests and states decide.

In this order: ``--op OP=NAME`` (honoured or fatal), plugins that are enabled or autoload, the platform's own, core's default. A
tie is an error. Where an outsider's atom lies inside a composite that the platform fuses, core takes that composite's default
and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.core.api.attention import AttentionGroup
from octavo.core.api.errors import SelectionError
from octavo.core.api.manifest import Reason
from octavo.core.api.ops import COMPOSITES, OPS
from octavo.core.config import EngineConfig
from octavo.core.discovery.capability import Asked, applies, describe
from octavo.core.discovery.registry import PluginEntry, Registry, is_on, unavailable
from octavo.core.discovery.report import Candidate, Report
from octavo.core.discovery.situation import Situation

DEFAULT = "default"
"""The name of core's own implementation, in ``--op OP=default`` and in reports."""


@dataclass(frozen=True, kw_only=True)
class OpChoice:
    """The implementation of every op with the reason for it, every candidate, and what core changed on its own."""

    chosen: Mapping[str, str]  # op → name of an ops plugin, or "default"
    why: Mapping[str, str]
    candidates: tuple[Candidate, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True)
class _Request(Situation):
    plugins: Sequence[PluginEntry]

    def reasons(self, entry: PluginEntry) -> tuple[Reason, ...]:
        """Why the ops plugin doesn't apply here; empty when it does."""
        unfit = self.unfit(entry)
        if unfit:
            return unfit
        if not all(applies(entry.table.when, asked) for asked in self._asked()):
            return (Reason(field="when", wanted=self._situation(), supported=describe(entry.table.when)),)
        return ()

    def _asked(self) -> Sequence[Asked]:
        """What conditions are compared with, one for each group."""
        return [
            Asked(
                dtype=self.config.model.dtype,
                kv_dtype=group.spec.kv_dtype,
                head_size=group.spec.head_dim,
                block_size=group.block_size or None,
                features=group.spec.features(),
                kind=group.spec.kind,
                platform=self.platform.name,
                arch=self.arch,
                archs=self.platform.table.archs,
            )
            for group in self.groups
        ]

    def _situation(self) -> str:
        return f"dtype {self.config.model.dtype}, platform {self.platform.name}, arch {self.arch or 'unknown'}"

    def on(self, entry: PluginEntry) -> bool:
        return is_on(entry, self.config.plugins.plugin)


def select_ops(
    config: EngineConfig,
    entries: Sequence[PluginEntry],
    platform: PluginEntry,
    groups: Sequence[AttentionGroup] = (),
    *,
    arch: str | None = None,
) -> OpChoice:
    """The implementation of every op. Raises `SelectionError`, `PluginNotFound` or `PluginUnavailable`."""
    request = _Request(config, platform, arch, groups, [entry for entry in entries if entry.kind == "ops"])
    picks = {op: _pick(request, op) for op in OPS}
    chosen = {op: name for op, (name, _) in picks.items()}
    why = {op: reason for op, (_, reason) in picks.items()}
    notices = tuple(_unfuse(request, chosen, why))
    used = set(chosen.values())
    candidates = tuple(
        Candidate(
            name=entry.name, kind="ops", origin=entry.origin, reasons=request.reasons(entry), chosen=entry.name in used,
            note=_note(request, entry, used),
        )
        for entry in request.plugins
    )  # fmt: skip
    return OpChoice(chosen=chosen, why=why, candidates=candidates, notices=notices)


def _note(request: _Request, entry: PluginEntry, used: set[str]) -> str:
    if entry.name in used or request.reasons(entry) or request.on(entry):
        return ""
    return f"not asked for: --plugin {entry.name} turns it on, --op OP={entry.name} takes one op"


def _pick(request: _Request, op: str) -> tuple[str, str]:
    """The implementation's name, and why it is that one."""
    named = request.config.plugins.op.get(op)
    if named is not None:
        return _named(request, op, named), "named by --op"
    able = [e for e in request.plugins if e.table is not None and op in e.table.implements and not request.reasons(e)]
    on = [entry for entry in able if request.on(entry)]
    if len(on) > 1:
        listed = " and ".join(f"{entry.name} ({entry.origin})" for entry in on)
        raise SelectionError(f"op {op!r} is offered by {listed}, both turned on", hint=f"choose with --op {op}=NAME")
    if on:
        return on[0].name, "its plugin is turned on"
    for name in request.platform.table.ops:
        own = next((entry for entry in able if entry.name == name), None)
        if own is not None:
            return own.name, f"preferred by platform {request.platform.name}"
    return DEFAULT, "nothing else applies"


def _named(request: _Request, op: str, name: str) -> str:
    if name == DEFAULT:
        return DEFAULT
    entry = Registry(request.plugins).find("ops", name)
    if not entry.usable:
        raise unavailable(entry)
    reasons = list(request.reasons(entry))
    if op not in entry.table.implements:
        reasons.append(Reason(field="op", wanted=op, supported=", ".join(entry.table.implements) or "none"))
    if reasons:
        report = Report(candidates=(Candidate(name=name, kind="ops", origin=entry.origin, reasons=tuple(reasons)),))
        text = "; ".join(map(str, reasons))
        raise SelectionError(
            f"op {op}={name} can't be used: {text}", hint=f"--op {op}={DEFAULT} takes core's own", report=report
        )
    return name


def _unfuse(request: _Request, chosen: dict[str, str], why: dict[str, str]) -> Sequence[str]:
    """Take a composite's default where an outsider's atom lies inside it; one notice for each."""
    notices = []
    own = {DEFAULT, *request.platform.table.ops}
    named = request.config.plugins.op
    for composite in reversed(list(COMPOSITES)):  # the outer one first: it may hide an inner one
        fused = chosen[composite]
        outsiders = sorted(
            f"{atom}={chosen[atom]}" for atom in _inside(composite) if chosen[atom] not in own and chosen[atom] != fused
        )
        if fused == DEFAULT or not outsiders:
            continue
        if composite in named:
            notices.append(f"{composite}={fused} is fused and used as named: {', '.join(outsiders)} applies outside it only")
            continue
        chosen[composite], why[composite] = DEFAULT, f"{', '.join(outsiders)} lies inside it"
        notices.append(f"{composite}: core's default is used instead of {fused}, so that {', '.join(outsiders)} takes effect")
    return notices


def _inside(op: str) -> frozenset[str]:
    """Every op that the default of a composite calls, composites within it included."""
    parts = COMPOSITES.get(op, ())
    return frozenset(parts).union(*(_inside(part) for part in parts)) if parts else frozenset()
