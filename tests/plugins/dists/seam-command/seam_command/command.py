"""``octavo seam-shapes``: what the installed attention backends declare."""

from __future__ import annotations

import click

from octavo.api.discovery import installed
from octavo.api.errors import UsageError

__all__ = ["command"]


@click.command("seam-shapes")
@click.option("--only", help="of this backend alone")
def command(only: str | None) -> None:
    """Say which head sizes the attention backends take."""
    entries = {entry.name: entry for entry in installed().of_kind("attention") if entry.table is not None}
    if only is not None and only not in entries:
        raise UsageError(f"no attention backend {only!r}", hint=f"there is {', '.join(entries)}")
    for name, entry in entries.items():
        if only in (None, name):
            click.echo(f"{name}: {entry.table.head_sizes}")
