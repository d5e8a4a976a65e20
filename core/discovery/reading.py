"""Entry points and manifests → `PluginEntry` list. No plugin is imported."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.api import API_VERSION
from octavo.core.api.errors import ManifestError
from octavo.core.api.manifest import ENTRY_POINT_GROUPS, PluginKind, PluginManifest
from octavo.core.discovery.locate import find_manifest, find_package
from octavo.core.discovery.manifest import FILE_NAME, read_manifest
from octavo.core.discovery.registry import PluginEntry
from octavo.core.discovery.requirements import unmet
from octavo.core.discovery.values import TARGET

logger = logging.getLogger("octavo")

_OWN_DISTRIBUTION = "octavo"
_GATED = ("torch", "octavo")  # of a distribution's own requirements, those whose conflict breaks the import itself


def read_entries() -> Sequence[PluginEntry]:
    """Every plugin of every installed distribution, with what can be said without importing or probing it."""
    kinds = {group: kind for kind, group in ENTRY_POINT_GROUPS.items()}
    reader = _Reader()
    for point in _entry_points():
        if point.group in kinds:
            reader.add(kinds[point.group], point)
    entries = [*reader.entries, *reader.without_entry_point()]
    _mark_rivals(entries)
    _mark_shadows(entries)
    return sorted(entries, key=lambda entry: (list(ENTRY_POINT_GROUPS).index(entry.kind), entry.name, entry.distribution))


def _entry_points() -> Iterable[Any]:
    """Every entry point. A distribution whose metadata can't be read is left out with a warning."""
    import importlib_metadata

    try:
        return importlib_metadata.entry_points()
    except Exception:  # noqa: BLE001 - anyone may have written that file; which one it is, is found below
        return list(_readable(importlib_metadata.distributions()))


def _readable(distributions: Iterable[Any]) -> Iterator[Any]:
    seen: set[str] = set()
    for distribution in distributions:
        try:
            points, name = tuple(distribution.entry_points), _identity(distribution)[0]
        except Exception as error:  # noqa: BLE001 - reported here, and everybody else's plugins still work
            logger.warning("%s can't be read and is left out: %s", _folder(distribution), error)
            continue
        if name not in seen:  # a distribution that another one hides on the path
            seen.add(name)
            yield from points


def _identity(distribution: Any) -> tuple[str, str]:
    """Name and version; from the folder's name where the metadata doesn't say."""
    import importlib_metadata

    try:
        metadata = distribution.metadata
        name, version = metadata["Name"], metadata["Version"]
    except (importlib_metadata.MetadataNotFound, KeyError):
        name = version = None
    stem = _folder(distribution).rpartition("/")[2].removesuffix(".dist-info").removesuffix(".egg-info")
    return name or stem.partition("-")[0] or "unknown", version or stem.partition("-")[2] or "unknown"


def _folder(distribution: Any) -> str:
    return str(getattr(distribution, "_path", distribution))


class _Reader:
    """Collects entries; reads each manifest and each distribution's metadata once."""

    def __init__(self) -> None:
        self.entries: list[PluginEntry] = []
        self._manifests: dict[Path, PluginManifest | str] = {}
        self._origins: dict[Path, tuple[str, str]] = {}
        self._conflicts: dict[str, tuple[str, ...]] = {}
        self._identities: dict[int, tuple[str, str]] = {}

    def add(self, kind: PluginKind, point: Any) -> None:
        name, version = self._identity(point.dist)
        entry = PluginEntry(name=point.name, kind=kind, distribution=name, version=version, target=point.value)
        self.entries.append(entry)
        reason = self._describe(entry) or self._conflict(entry, point.dist)
        if reason:
            entry.state, entry.reason = "incompatible", reason
        elif not entry.probe_target and (entry.table.requires or name == _OWN_DISTRIBUTION):
            entry.state = "available"  # nothing more will be asked; without requirements it stays "found": nothing was checked

    def _identity(self, distribution: Any) -> tuple[str, str]:
        key = id(distribution)
        if key not in self._identities:
            self._identities[key] = _identity(distribution)
        return self._identities[key]

    def _describe(self, entry: PluginEntry) -> str:
        """Fill in manifest and table; why that isn't possible."""
        if not re.fullmatch(TARGET, entry.target):
            return f"its entry point's value {entry.target!r} isn't module:attribute"
        module = entry.target.partition(":")[0]
        path = find_manifest(module)
        if path is None:
            what = (
                f"no {FILE_NAME} beside or above {module}"
                if find_package(module)
                else f"package {module.partition('.')[0]!r} isn't there"
            )
            return f"{what}; reinstall {entry.distribution}"
        manifest = self._manifest(path)
        if isinstance(manifest, str):
            return manifest
        self._origins.setdefault(path, (entry.distribution, entry.version))
        entry.manifest = manifest
        entry.table = tables(manifest, entry.kind).get(entry.name)
        if entry.table is None:
            return f"{path} has no [{entry.kind}.{entry.name}]; its key and the entry point's name must be equal"
        return _api_conflict(manifest.api)

    def _manifest(self, path: Path) -> PluginManifest | str:
        if path not in self._manifests:
            try:
                self._manifests[path] = read_manifest(path)
            except ManifestError as error:
                self._manifests[path] = str(error)
        return self._manifests[path]

    def _conflict(self, entry: PluginEntry, distribution: Any) -> str:
        """Requirements that aren't met: the table's, and the distribution's own on torch and Octavo."""
        if entry.distribution not in self._conflicts:
            own = entry.distribution != _OWN_DISTRIBUTION
            requires = [text for text in _requires(distribution) if own and _project(text) in _GATED]
            self._conflicts[entry.distribution] = unmet(requires)
        return "; ".join((*unmet(entry.table.requires), *self._conflicts[entry.distribution]))

    def without_entry_point(self) -> Iterable[PluginEntry]:
        """Tables that no entry point leads to."""
        reached = {(id(entry.manifest), entry.kind, entry.name) for entry in self.entries}
        for path, manifest in self._manifests.items():
            if isinstance(manifest, str):
                continue
            distribution, version = self._origins[path]
            for kind, group in ENTRY_POINT_GROUPS.items():
                for name, table in tables(manifest, kind).items():
                    if (id(manifest), kind, name) not in reached:
                        yield PluginEntry(
                            name=name,
                            kind=kind,
                            distribution=distribution,
                            version=version,
                            target="",
                            state="incompatible",
                            reason=f"{path} has [{kind}.{name}], but {distribution} has no entry point {name!r} in {group}",
                            table=table,
                            manifest=manifest,
                        )


def tables(manifest: PluginManifest, kind: PluginKind) -> Mapping[str, Any]:
    """The manifest's tables of one kind, by name."""
    known: Mapping[str, Mapping[str, Any]] = {
        "platform": manifest.platforms,
        "attention": manifest.attention,
        "ops": manifest.ops,
        "model": manifest.models,
    }
    return known[kind] if kind in known else manifest.others.get(kind, {})


def _requires(distribution: Any) -> Sequence[str]:
    """The distribution's own requirements; none where its metadata is missing, as `_identity` has it."""
    import importlib_metadata

    try:
        return tuple(distribution.requires or ())
    except importlib_metadata.MetadataNotFound:
        return ()


def _project(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _api_conflict(api: tuple[int, int]) -> str:
    wanted, ours = ".".join(map(str, api)), ".".join(map(str, API_VERSION))
    if api[0] != API_VERSION[0]:
        return f"needs octavo.api {wanted}; this Octavo has {ours}, another major version"
    if api[1] > API_VERSION[1]:
        return f"needs octavo.api {wanted}; this Octavo has {ours}: upgrade octavo"
    return ""


def _mark_rivals(entries: Sequence[PluginEntry]) -> None:
    """Two distributions with one name, or one with two entry points of it: neither is usable, and both say so."""
    claims: dict[tuple[str, str], list[PluginEntry]] = defaultdict(list)
    for entry in entries:
        claims[entry.kind, entry.name].append(entry)
        if entry.manifest is not None:
            claims["plugin", entry.manifest.name].append(entry)
    for (what, name), group in claims.items():
        rivals = sorted({entry.origin for entry in group})
        if len({entry.distribution for entry in group}) < 2:
            if len(group) > 1 and what != "plugin":
                _mark_twins(group)
            continue
        for entry in group:
            label = "plugin name" if what == "plugin" else what.replace("_", " ")
            entry.state, entry.rivals = "incompatible", rivals
            entry.reason = f"the {label} {name!r} is claimed by {' and '.join(rivals)}; uninstall all but one"


def _mark_twins(group: Sequence[PluginEntry]) -> None:
    """One distribution's entry points of one kind and name: nothing says which of them is meant."""
    targets = " and ".join(sorted(entry.target for entry in group))
    for entry in group:
        entry.state = "incompatible"
        entry.reason = f"{entry.origin} has {len(group)} entry points of this name, {targets}; it must have one: reinstall it"


def _mark_shadows(entries: Sequence[PluginEntry]) -> None:
    """Commands named like one of ``octavo``'s own, which have no entry points to be rivals with: never used, and told so."""
    commands = [entry for entry in entries if entry.kind == "command"]
    if not commands:
        return
    from octavo.core.cli.main import COMMANDS

    for entry in commands:
        if entry.name in COMMANDS:
            entry.state = "incompatible"
            entry.reason = f"the command {entry.name!r} is claimed by {entry.origin} and by octavo itself, which keeps it"
