"""Reads ``octavo-plugin.toml`` into a `PluginManifest`. Nothing of the plugin is imported.

Every mistake is one line that names the file and the key. `parse_manifest` raises the first; `manifest_problems` returns all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.core.api.errors import ManifestError
from octavo.core.api.manifest import ENTRY_POINT_GROUPS, AttentionManifest, PlatformManifest, PluginManifest, SimpleManifest
from octavo.core.config.suggest import nearest
from octavo.core.config.toml import parse_toml
from octavo.core.discovery.manifest_tables import PLUGIN, SIMPLE, TABLES
from octavo.core.discovery.values import NAME, Problems

FILE_NAME = "octavo-plugin.toml"
MAX_BYTES = 1 << 17
"""The longest manifest that is read: every command reads all of them, so none may cost a second."""


def read_manifest(path: Path) -> PluginManifest:
    """The manifest at ``path``. Raises `ManifestError`."""
    return parse_manifest(_text(path), str(path))


def parse_manifest(text: str, path: str) -> PluginManifest:
    """The manifest in ``text``; ``path`` is for messages. Raises `ManifestError`."""
    problems = Problems()
    manifest = _parse(text, path, problems)
    if problems.found:
        raise _error(path, problems)
    assert manifest is not None, "a manifest without problems was read"
    return manifest


def manifest_problems(path: Path) -> tuple[str, ...]:
    """Everything that is wrong with the file, one line each."""
    problems = Problems()
    try:
        _parse(_text(path), str(path), problems)
    except ManifestError as error:
        return (str(error),)
    return tuple(f"{path}: {key}: {message}" for key, message in problems.found)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ManifestError(f"{path}: can't be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise ManifestError(f"{path}: is longer than {MAX_BYTES} bytes, which no manifest needs")
    try:
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: isn't UTF-8 (byte {error.start})") from error


def _error(path: str, problems: Problems) -> ManifestError:
    key, message = problems.found[0]
    more = len(problems.found) - 1
    return ManifestError(f"{path}: {key}: {message}", hint=f"and {more} more" if more else None)


def _parse(text: str, path: str, problems: Problems) -> PluginManifest | None:
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise ManifestError(f"{path}: isn't TOML: {error}") from error
    known = ("plugin", *ENTRY_POINT_GROUPS)
    for name in data:
        if name not in known:
            problems.add(name, "unknown table" + nearest(name, known))
    if "plugin" not in data:
        problems.add("plugin", "the [plugin] table is missing")
        return None
    plugin = PLUGIN.read(data["plugin"], "plugin", problems)
    entries: dict[str, dict[str, Any]] = {
        kind: _entries(kind, data[kind], problems) for kind in ENTRY_POINT_GROUPS if kind in data
    }
    if problems.found:
        return None
    api = _version(plugin["api"])
    attention = {name: replace(entry, api=api) for name, entry in entries.pop("attention", {}).items()}
    return PluginManifest(
        name=plugin["name"],
        api=api,
        autoload=plugin.get("autoload", False),
        path=path,
        platforms=entries.pop("platform", {}),
        attention=attention,
        ops=entries.pop("ops", {}),
        models=entries.pop("model", {}),
        others=entries,
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _entries(kind: Any, tables: Any, problems: Problems) -> dict[str, Any]:
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        problems.add(kind, f"must hold named tables: [{kind}.NAME]")
        return {}
    table = TABLES[kind]
    entries = {}
    for name, values in tables.items():
        key = f"{kind}.{name}"
        if not re.fullmatch(NAME, name):
            problems.add(key, "isn't a name of letters, digits, '.', '_' and '-'")
        given = {"name": name, **({"kind": kind} if table is SIMPLE else {})}
        entry = table.read(values, key, problems, **given)
        if entry is not None:
            _check(entry, key, problems)
            entries[name] = entry
    return entries


def _check(entry: Any, key: str, problems: Problems) -> None:
    """What involves more than one key."""
    if isinstance(entry, AttentionManifest):
        for rule in ("excepts", "withheld"):
            word = rule.removesuffix("s") if rule == "excepts" else rule
            for index, restriction in enumerate(getattr(entry, rule)):
                if restriction.when == type(restriction.when)():
                    problems.add(f"{key}.{word}[{index}].when", "is empty: it would refuse everything")
    if isinstance(entry, PlatformManifest) and entry.device_type == "none" and entry.kind == "host":
        problems.add(f"{key}.device_type", "'none' can't be the host: a host computes with torch tensors")
    if isinstance(entry, SimpleManifest) and entry.specs and entry.kind != "kv_manager":
        problems.add(f"{key}.specs", "is for [kv_manager.NAME] only")
