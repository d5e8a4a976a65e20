"""``octavo models``: the catalogue, and the only command that downloads anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

Progress = Callable[[int, int], None]


@click.group(short_help="List and pull models of the catalogue.")
def command() -> None:
    """List and pull the models that Octavo knows by name."""


@command.command("list", short_help="List the catalogue.")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on standard output")
def list_models(as_json: bool) -> None:
    """List the models of the catalogue, and whether they are on this machine."""
    from octavo.core.loading.catalogue import find, listing

    models = listing()
    if as_json:
        rows = [
            {
                "name": model.name,
                "summary": model.summary,
                "size_bytes": model.size_bytes,
                "present": model.present,
                "path": str(model.path),
                "license": model.license,
                "source": model.source,
            }
            for model in models
        ]
        click.echo(json.dumps({"models": rows}, ensure_ascii=False))
        return
    for model in models:
        state = str(model.path) if model.present else f"not here: octavo models pull {find(model.name).pull_arguments}"
        click.echo(f"{model.name:<14} {model.summary:<28} {model.size_bytes / 1e6:>6.0f} MB  {model.license:<18} {state}")


@command.command("pull", short_help="Fetch a model.")
@click.argument("name")
@click.option("--accept-license", is_flag=True, help="accept the model's terms of use, where it has some")
def pull_model(name: str, accept_license: bool) -> None:
    """Fetch a model of the catalogue into the cache folder, check its SHA-256, and print its path."""
    from octavo.core.loading.catalogue import pull

    with _bar(f"Pulling {name}") as progress:
        path = pull(name, accept_license=accept_license, progress=progress)
    click.echo(path)


@contextmanager
def _bar(title: str) -> Iterator[Progress | None]:
    """A progress bar in bytes, on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
