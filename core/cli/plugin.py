"""``octavo plugin``: starts a plugin of one's own."""

from __future__ import annotations

from pathlib import Path

import click


@click.group(short_help="Start a plugin of your own.")
def command() -> None:
    """Write plugins: see docs/writing-a-backend.md."""


@command.command("new", short_help="Write a working plugin to start from.")
@click.argument("name")
@click.option(
    "--dir", "parent", type=click.Path(path_type=Path), default=Path("."), help="the folder in which NAME is made [here]"
)
def new(name: str, parent: Path) -> None:
    """Write the plugin NAME: a platform and an attention backend that work, their conformance test, and a CI workflow."""
    from octavo.core.cli.scaffold import write_plugin

    target = write_plugin(name, parent)
    click.echo(f"{target} is a working plugin: platform {name}, attention backend {name}-attention. Next:")
    for line in (
        f"cd {target}",
        'pip install -e ".[test]"',
        f'octavo generate --model smollm2 --platform {name} --prompt "What is the capital of France?"',
        "pytest",
    ):
        click.echo(f"  {line}")
