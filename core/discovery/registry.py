"""`Registry`: every installed plugin with its state and reason; loads the ones that are chosen.

States: ``found`` (nothing checked yet, or nothing to check) → ``incompatible`` | ``probe-absent`` | ``probe-broken`` |
``available`` → ``failed-to-load`` | ``active``. Reading imports no plugin; `Registry.probe` runs probes in a helper process;
`Registry.load` imports one plugin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from octavo.core.api.errors import PluginNotFound, PluginUnavailable
from octavo.core.api.manifest import ModelManifest, PluginKind, PluginManifest, ProbedDevice
from octavo.core.config import environment
from octavo.core.config.suggest import nearest
from octavo.core.discovery.probes import ProbeOutcome, Probes

State = Literal["found", "incompatible", "probe-absent", "probe-broken", "available", "failed-to-load", "active"]
USABLE: frozenset[str] = frozenset({"found", "available", "active"})

LABELS: Mapping[str, str] = {
    "platform": "platform",
    "attention": "attention backend",
    "ops": "ops plugin",
    "executor": "executor",
    "scheduling_policy": "scheduling policy",
    "kv_manager": "KV manager",
    "proposer": "proposer",
    "model": "model architecture",
    "command": "command",
    "hook": "hook",
}


@dataclass(kw_only=True)
class PluginEntry:
    """One entry point with its manifest's table, and what is known of it so far."""

    name: str
    kind: PluginKind
    distribution: str
    version: str
    target: str
    state: State = "found"
    reason: str = ""
    traceback: str | None = None
    hint: str = ""
    table: Any = None  # the manifest's table: PlatformManifest, AttentionManifest, …; None when there is no valid one
    manifest: PluginManifest | None = None
    devices: Sequence[ProbedDevice] = ()
    warning: str = ""  # usable, but something is wrong
    rivals: Sequence[str] = ()  # "name version" of every distribution that claims this name, when there are several
    loaded: Any = field(default=None, repr=False)
    instance: Any = field(default=None, repr=False)  # of a platform, which has one instance a process

    @property
    def usable(self) -> bool:
        return self.state in USABLE

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def who(self) -> str:
        """``attention backend 'acme' (acme-tools 1.0)``, for messages."""
        return f"{LABELS[self.kind]} {self.name!r} ({self.origin})"

    @property
    def is_own(self) -> bool:
        """Whether it comes with Octavo itself."""
        return self.distribution == "octavo"

    @property
    def probe_target(self) -> str | None:
        return getattr(self.table, "probe", None)

    def describe(self) -> str:
        """``acme (probe-absent: no device)``, for lists in messages."""
        return f"{self.name} ({self.state}{': ' + self.reason if self.reason else ''})"


class Registry:
    """The installed plugins."""

    def __init__(self, entries: Iterable[PluginEntry]) -> None:
        self.entries: Sequence[PluginEntry] = tuple(entries)
        self._lock = threading.RLock()
        self._probed = False

    @classmethod
    def read(cls) -> Registry:
        """From the entry points and manifests of installed distributions."""
        from octavo.core.discovery.reading import read_entries

        return cls(read_entries())

    def of_kind(self, kind: PluginKind) -> Sequence[PluginEntry]:
        return tuple(entry for entry in self.entries if entry.kind == kind)

    def find(self, kind: PluginKind, name: str) -> PluginEntry:
        """The plugin of that name. Raises `PluginNotFound`, or `PluginUnavailable` when several distributions claim it."""
        entries = [entry for entry in self.of_kind(kind) if entry.name == name]
        if not entries:
            known = self.of_kind(kind)
            listed = "installed: " + ", ".join(entry.describe() for entry in known[:12]) if known else "none is installed"
            raise PluginNotFound(
                f"no {LABELS[kind]} named {name!r}" + nearest(name, {entry.name for entry in known}), hint=listed
            )
        if len(entries) > 1:
            raise unavailable(entries[0])
        return entries[0]

    def models(self) -> Mapping[str, ModelManifest]:
        """The model architectures that can be used, by plugin name."""
        return {entry.name: entry.table for entry in self.of_kind("model") if entry.usable}

    def probe(self, meanwhile: Callable[[], object] | None = None) -> Registry:
        """Let every plugin with a probe answer, once a process. Returns itself. ``meanwhile`` is called while they do."""
        with self._lock:
            if not self._probed:
                self._probed = True
                asked = {
                    str(index): target
                    for index, entry in enumerate(self.entries)
                    if entry.state == "found" and (target := entry.probe_target)
                }
                probes = Probes(asked, limit_s=environment.probe_timeout_s())
                if meanwhile is not None:
                    meanwhile()
                for key, outcome in probes.outcomes().items():
                    _settle(self.entries[int(key)], outcome)
        return self

    def load(self, kind: PluginKind, name: str) -> Any:
        """The plugin's object, imported on first use. Raises `PluginNotFound` or `PluginUnavailable` with the root cause."""
        from octavo.core.discovery.loading import load_entry

        return load_entry(self.find(kind, name))

    def platform(self, name: str) -> Any:
        """The platform's only instance in this process. Raises `PluginNotFound` or `PluginUnavailable`."""
        from octavo.core.discovery.loading import platform_instance

        return platform_instance(self.find("platform", name))


def unavailable(entry: PluginEntry) -> PluginUnavailable:
    """The error for a plugin that can't be used, with its reason."""
    where = "" if entry.rivals else f" ({entry.origin})"
    return PluginUnavailable(
        f"{LABELS[entry.kind]} {entry.name!r}{where} is {entry.state}: {entry.reason}", hint=entry.hint or None
    )


def is_on(entry: PluginEntry, enabled: Sequence[str]) -> bool:
    """Whether the operator named the plugin with ``--plugin``, or its manifest turns it on."""
    return is_named(entry, enabled) or (entry.manifest is not None and entry.manifest.autoload and entry.usable)


def is_named(entry: PluginEntry, enabled: Sequence[str]) -> bool:
    """Whether ``--plugin`` names the entry, or the plugin that it belongs to."""
    return entry.name in enabled or (entry.manifest is not None and entry.manifest.name in enabled)


def _settle(entry: PluginEntry, outcome: ProbeOutcome) -> None:
    """Turn a probe's outcome into the entry's state."""
    result = outcome.result
    if result is None:
        entry.state, entry.reason, entry.traceback = "probe-broken", f"its probe {_said(outcome)}", outcome.traceback or None
        return
    entry.hint = result.hint
    absent = not result.devices if entry.kind == "platform" else bool(result.reason and not result.devices)
    if absent:
        entry.state, entry.reason = "probe-absent", result.reason or "its probe found no device"
        return
    entry.state, entry.reason, entry.devices = "available", result.reason, result.devices
    if outcome.imported_torch:
        entry.warning = f"its probe imports torch ({outcome.seconds:.1f} s), which slows every command; it must not"
        entry.reason = entry.reason or entry.warning


def _said(outcome: ProbeOutcome) -> str:
    return f"raised {outcome.error}" if outcome.traceback else outcome.error


class _Installed:
    """The registry of this process, read on first use."""

    def __init__(self, read: Callable[[], Registry]) -> None:
        self._read = read
        self._lock = threading.Lock()

    @cached_property
    def registry(self) -> Registry:
        return self._read()

    def get(self) -> Registry:
        with self._lock:
            return self.registry

    def forget(self) -> None:
        with self._lock:
            self.__dict__.pop("registry", None)


_INSTALLED = _Installed(Registry.read)


def installed() -> Registry:
    """The plugins installed in this environment; read once a process."""
    return _INSTALLED.get()


def forget_installed() -> None:
    """Read again at the next `installed()`: for tests that install plugins."""
    _INSTALLED.forget()
