"""The report of a selection: every candidate, every reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.core.api.manifest import PluginKind, Reason
from octavo.core.discovery.registry import PluginEntry


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plugin that was considered. ``reasons`` says what speaks against it and is empty exactly when ``ok``."""

    name: str
    kind: PluginKind
    origin: str
    reasons: tuple[Reason, ...] = ()
    chosen: bool = False
    note: str = ""  # why it was or wasn't chosen although it would do

    @property
    def ok(self) -> bool:
        return not self.reasons

    def document(self) -> dict[str, Any]:
        """As ``octavo explain --json`` prints it."""
        reasons = [
            {"field": reason.field, "wanted": reason.wanted, "supported": reason.supported, "hint": reason.hint}
            for reason in self.reasons
        ]
        return {"name": self.name, "kind": self.kind, "ok": self.ok, "reasons": reasons}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every candidate, what core did on its own and the operator should know (``notices``), what the platform set
    (``proposals``), and why the block size is what it is."""

    candidates: tuple[Candidate, ...] = ()
    notices: tuple[str, ...] = ()
    proposals: tuple[str, ...] = ()
    block_size: str = ""


def state_reasons(entry: PluginEntry) -> tuple[Reason, ...]:
    """The reason that the plugin can't be used at all, if there is one."""
    if entry.usable:
        return ()
    return (Reason(field="state", wanted="available", supported=f"{entry.state}: {entry.reason}", hint=entry.hint),)
