"""``octavo doctor``: the environment, the devices, every plugin loaded once, and a remedy for each mismatch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from octavo.core.cli.table import table
from octavo.core.discovery import installed
from octavo.core.discovery.registry import LABELS


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on standard output, for bug reports; no secrets in it")
@click.option("--verbose", "-v", is_flag=True, help="tracebacks too")
def command(as_json: bool, verbose: bool) -> None:
    """Check the environment and every plugin. Imports each plugin, in a process of its own that may die of it."""
    from octavo.core.discovery.diagnosis import diagnose

    document = diagnose(installed()).document()
    if as_json:
        import json

        click.echo(json.dumps(document, ensure_ascii=False, indent=2))
        return
    click.echo("\n".join(_lines(document, verbose)))


def _lines(document: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    about, torch = document["environment"], document["torch"]
    yield f"octavo   {document['octavo']['version']}, octavo.api {document['octavo']['api']}"
    yield f"python   {about['python']} ({about['implementation']}), {about['system']} {about['machine']}, {about['cpus']} CPUs"
    yield f"prefixes {about['prefix_hash']}"
    yield f"torch    {torch['version'] or 'not installed'}{'' if torch['imports'] else ' — CAN NOT BE IMPORTED'}"
    for extension in torch["extensions"]:
        yield f"         loads {extension['name']} by itself ({extension['distribution']} {extension['version']})"
    for name, value in about["variables"].items():
        yield f"variable {name}={value}"
    yield "packages " + ", ".join(f"{name} {version}" for name, version in document["packages"].items() if version)
    yield ""
    devices = [_device(device) for device in document["devices"]]
    yield table(("PLATFORM", "DEVICE", "NAME", "ARCH", "MEMORY", ""), devices) or "no device was found"
    yield ""
    plugins = document["plugins"]
    yield table(
        ("NAME", "KIND", "STATE", "FROM", ""),
        [
            (p["name"], LABELS[p["kind"]], p["state"], f"{p['distribution']} {p['version']}", p["reason"] or p["warning"])
            for p in plugins
        ],
    )
    if verbose:
        for plugin in plugins:
            if plugin["traceback"]:
                yield f"\n{plugin['name']}:"
                yield from (f"  | {line}" for line in plugin["traceback"].rstrip().splitlines())
    yield ""
    findings = document["findings"]
    yield f"{len(findings)} finding{'s' if len(findings) != 1 else ''}" if findings else "nothing to mend"
    for finding in findings:
        yield f"  {finding['severity']}: {finding['subject']}: {finding['problem']}"
        yield f"    → {finding['remedy']}"


def _device(device: Mapping[str, Any]) -> tuple[str, ...]:
    size = device["total_bytes"]
    more = ", ".join(f"{name} {value}" for name, value in device["properties"].items())
    return (
        device["platform"],
        str(device["index"]),
        device["name"],
        device["arch"] or "",
        f"{size / 2**30:.1f} GiB" if size else "",
        more,
    )
