"""Which platform runs: the one named, else an accelerator that works, else the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.core.api.errors import SelectionError
from octavo.core.api.manifest import Reason
from octavo.core.config import EngineConfig
from octavo.core.discovery.registry import PluginEntry, Registry, unavailable
from octavo.core.discovery.report import Candidate, Report, state_reasons


def select_platform(config: EngineConfig, entries: Sequence[PluginEntry]) -> tuple[PluginEntry, tuple[Candidate, ...]]:
    """The platform's entry, and every platform as a candidate.

    Raises `SelectionError`; for a name that is unknown or unusable, `PluginNotFound` and `PluginUnavailable`.
    """
    platforms = [entry for entry in entries if entry.kind == "platform"]
    named = config.plugins.platform
    if named is not None:
        chosen = Registry(entries).find("platform", named)
        if not chosen.usable:
            raise unavailable(chosen)
        asked = "platform" in config.given  # else an earlier step of the same selection made it explicit
        return chosen, tuple(_candidate(entry, chosen, named=asked) for entry in platforms)
    chosen = _automatic(platforms)
    return chosen, tuple(_candidate(entry, chosen, named=False) for entry in platforms)


def _automatic(platforms: Sequence[PluginEntry]) -> PluginEntry:
    contested = next((entry for entry in platforms if entry.rivals and _would_count(entry)), None)
    if contested is not None:
        raise SelectionError(
            f"can't choose a platform: {contested.reason}",
            hint="or name another with --platform",
            report=Report(candidates=tuple(_candidate(entry, None, named=False) for entry in platforms)),
        )
    ready = [entry for entry in platforms if entry.usable and entry.table.auto]
    for kind in ("accelerator", "host"):
        of_kind = [entry for entry in ready if entry.table.kind == kind]
        if len(of_kind) == 1:
            return of_kind[0]
        if of_kind:
            listed = ", ".join(f"{entry.name} ({entry.origin})" for entry in of_kind)
            raise SelectionError(
                f"several {kind}s are available: {listed}",
                hint="choose one with --platform NAME",
                report=Report(candidates=tuple(_candidate(entry, None, named=False) for entry in platforms)),
            )
    why = "; ".join(entry.describe() for entry in platforms) or "no platform plugin is installed"
    raise SelectionError(
        f"no platform is available: {why}",
        hint="octavo doctor says what each one needs",
        report=Report(candidates=tuple(_candidate(entry, None, named=False) for entry in platforms)),
    )


def _would_count(entry: PluginEntry) -> bool:
    return entry.table is None or bool(entry.table.auto)


def _candidate(entry: PluginEntry, chosen: PluginEntry | None, *, named: bool) -> Candidate:
    candidate = Candidate(
        name=entry.name, kind="platform", origin=entry.origin, reasons=state_reasons(entry), chosen=entry is chosen
    )
    if candidate.chosen:
        found = f"the only {entry.table.kind} that works and is offered automatically"
        return replace(candidate, note="named by --platform" if named else found)
    if candidate.ok and not entry.table.auto and not named:
        only = Reason(
            field="auto", wanted="an automatic choice", supported="used only when named", hint=f"--platform {entry.name}"
        )
        return replace(candidate, reasons=(only,))
    if candidate.ok:
        note = "another was named" if named else f"an accelerator is chosen before a {entry.table.kind}"
        return replace(candidate, note=note)
    return candidate
