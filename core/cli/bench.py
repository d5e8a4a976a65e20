"""``octavo bench``: what parts of Octavo cost. Each benchmark is imported when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

BENCHMARKS: Mapping[str, str] = {
    "scheduler": "Scheduler and KV cache manager alone, without a model.",
}
"""Name → help text; each is ``command`` in the module ``bench_NAME`` next to this one."""


class _Benchmarks(click.Group):
    """Imports a benchmark when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*BENCHMARKS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHMARKS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = import_module(f"octavo.core.cli.bench_{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHMARKS.items()))


@click.group("bench", cls=_Benchmarks)
def bench() -> None:
    """Measure what parts of Octavo cost."""


command = bench
