"""``octavo backends``: every installed plugin with its state and reason. Imports none of them, and no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from octavo.core.api import API_VERSION
from octavo.core.api.manifest import AttentionManifest, Condition, OpsManifest, PlatformManifest, Restriction
from octavo.core.cli.table import table
from octavo.core.discovery import PluginEntry, installed
from octavo.core.discovery.registry import LABELS


@click.command("backends")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on standard output")
@click.option("--verbose", "-v", is_flag=True, help="also what each plugin declares, and tracebacks")
def command(as_json: bool, verbose: bool) -> None:
    """List the installed plugins: what was found, what works here, and why the others don't."""
    entries = installed().probe().entries
    if as_json:
        import json

        click.echo(json.dumps(document(entries), ensure_ascii=False, indent=2))
        return
    rows = [(entry.name, LABELS[entry.kind], entry.state, entry.origin, summary(entry)) for entry in entries]
    click.echo(table(("NAME", "KIND", "STATE", "FROM", ""), rows))
    if verbose:
        for entry in entries:
            click.echo()
            click.echo("\n".join(details(entry, entries)))


def document(entries: Sequence[PluginEntry]) -> dict[str, Any]:
    """As ``--json`` prints it."""
    return {
        "api": ".".join(map(str, API_VERSION)),
        "plugins": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "distribution": entry.distribution,
                "version": entry.version,
                "state": entry.state,
                "reason": entry.reason,
                "traceback": entry.traceback,
            }
            for entry in entries
        ],
    }


def summary(entry: PluginEntry) -> str:
    """The reason, or the devices, or what the plugin is for."""
    if entry.reason:
        return f"{entry.reason} ({entry.hint})" if entry.hint else entry.reason
    if entry.devices:
        names = [f"{device.name}{f' ({device.arch})' if device.arch else ''}" for device in entry.devices]
        return ", ".join(dict.fromkeys(names)) + (f", {len(names)} devices" if len(names) > 1 else "")
    return getattr(entry.table, "help", "")


def details(entry: PluginEntry, entries: Sequence[PluginEntry]) -> Iterator[str]:
    """What the plugin declares, line by line; rules about archs with what they mean for the devices here."""
    yield f"{LABELS[entry.kind]} {entry.name} — {entry.origin}, {entry.target or 'no target'}"
    if entry.manifest is not None:
        yield f"  manifest  {entry.manifest.path} (octavo.api {'.'.join(map(str, entry.manifest.api))})"
    for name, value in _declared(entry.table, entries):
        if value:
            yield f"  {name}  {value}"
    if entry.traceback:
        yield from (f"  | {line}" for line in entry.traceback.rstrip().splitlines())


def _declared(declared: Any, entries: Sequence[PluginEntry]) -> Iterator[tuple[str, str]]:
    if isinstance(declared, PlatformManifest):
        yield "kind", f"{declared.kind}, device type {declared.device_type}{'' if declared.auto else ', only when named'}"
        yield "archs", " < ".join(declared.archs)
        yield "attention", ", ".join(declared.attention)
        yield "ops", ", ".join(declared.ops)
    if isinstance(declared, AttentionManifest):
        yield from _attention(declared, entries)
    if isinstance(declared, OpsManifest):
        yield "implements", ", ".join(declared.implements)
        yield "platforms", ", ".join(declared.platforms)
    yield "requires", ", ".join(getattr(declared, "requires", ()))


def _attention(declared: AttentionManifest, entries: Sequence[PluginEntry]) -> Iterator[tuple[str, str]]:
    from octavo.core.discovery.capability import describe

    yield "platforms", ", ".join(declared.platforms) + ("" if declared.auto else ", only when named")
    yield "kinds", ", ".join(declared.kinds)
    yield "dtypes", ", ".join(declared.dtypes)
    yield "kv dtypes", ", ".join(declared.kv_dtypes)
    yield "head sizes", str(declared.head_sizes)
    yield "block sizes", str(declared.block_sizes)
    yield "features", ", ".join(declared.features)
    for rule in declared.excepts:
        yield "except", f"{describe(rule.when)}: {rule.reason}{_here(rule, declared, entries)}"
    for rule in declared.withheld:
        yield "withheld", f"{describe(rule.when)}: {rule.reason}{_here(rule, declared, entries)}"


def _here(rule: Restriction, declared: AttentionManifest, entries: Sequence[PluginEntry]) -> str:
    """What a rule about platforms or archs means for each device that the backend could run on."""
    from octavo.core.discovery.capability import Asked, applies

    if rule.when.arch is None and rule.when.platform is None:
        return ""
    where = Condition(platform=rule.when.platform, arch=rule.when.arch)
    said = []
    for entry in entries:
        if entry.kind != "platform" or entry.table is None or not {entry.name, "*"} & set(declared.platforms):
            continue
        for device in entry.devices:
            asked = Asked(platform=entry.name, arch=device.arch, archs=entry.table.archs)
            verdict = "applies" if applies(where, asked) else "doesn't apply"
            said.append(f"{verdict} on {entry.name} device {device.index} ({device.arch or 'arch unknown'})")
    return f" [{'; '.join(said)}]" if said else ""
