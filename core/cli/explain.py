"""``octavo explain``: what would run a model here, and for everything refused, why and what would be needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from octavo.core.api.errors import PluginError, Refused
from octavo.core.cli.engine_options import config_from, engine_options
from octavo.core.cli.table import table

if TYPE_CHECKING:
    from octavo.core.discovery.op_selection import OpChoice
    from octavo.core.discovery.report import Report
    from octavo.core.engine.resolve import Resolved


@click.command("explain")
@click.argument("model")
@click.option("--ops", "with_ops", is_flag=True, help="also the implementation of each op")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on standard output")
@engine_options(without=("model",))
def command(model: str, with_ops: bool, as_json: bool, **options: Any) -> None:
    """Say what would run MODEL with these flags: platform, attention backend of each group, block size, ops.

    Reads the model's headers, no weights. Where nothing would run, the report is printed all the same and the exit code is 3.
    """
    config = config_from(options, model=model)
    from octavo.core.engine.resolve import resolve

    try:
        found = resolve(config)
    except Refused as error:
        report = getattr(error, "report", None) or (_states() if isinstance(error, PluginError) else None)
        if report is not None:
            _print(as_json, {"chosen": None, "candidates": _candidates(report)}, _refused_lines(report))
        raise
    chosen, candidates = _chosen(found), _candidates(found.choice.report)
    if with_ops:
        chosen["ops"] = dict(found.ops.chosen)
        candidates += [candidate.document() for candidate in found.ops.candidates]
    _print(as_json, {"chosen": chosen, "candidates": candidates}, _lines(found, with_ops))


def _states() -> Report:
    """Every platform and backend with what is wrong with it, where the refusal came before any was compared."""
    from octavo.core.discovery import installed
    from octavo.core.discovery.report import Candidate, Report, state_reasons

    return Report(
        candidates=tuple(
            Candidate(name=entry.name, kind=entry.kind, origin=entry.origin, reasons=state_reasons(entry))
            for entry in installed().probe().entries
            if entry.kind in ("platform", "attention")
        )
    )


def _print(as_json: bool, document: dict[str, Any], lines: Iterator[str]) -> None:
    if as_json:
        import json

        click.echo(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        click.echo("\n".join(lines))


def _chosen(found: Resolved) -> dict[str, Any]:
    chosen = found.choice.chosen
    return {"platform": chosen.platform, "attention": dict(chosen.attention), "block_size": chosen.block_size}


def _candidates(report: Report) -> list[dict[str, Any]]:
    return [candidate.document() for candidate in report.candidates]


def _lines(found: Resolved, with_ops: bool) -> Iterator[str]:
    config, report = found.config, found.choice.report
    yield f"model       {found.spec.architecture}, {found.spec.num_layers} layers, context {config.model.max_model_len}"
    yield f"platform    {config.plugins.platform}, device {config.plugins.device}"
    yield f"dtype       {config.model.dtype}, cache {config.cache.kv_cache_dtype}"
    for group in found.groups:
        spec = group.spec
        shape = f"{spec.num_heads} heads, {spec.num_kv_heads} KV heads of {spec.head_dim}"
        window = f", window {spec.window}" if spec.window is not None else ""
        backend = config.plugins.attention_backend[group.name]
        yield f"attention   {group.name}: {backend} ({len(group.layers)} layers, {shape}{window})"
    yield f"block size  {report.block_size}"
    for proposal in report.proposals:
        yield f"set         {proposal}"
    for notice in report.notices:
        yield f"notice      {notice}"
    yield ""
    yield _table(report)
    if with_ops:
        yield ""
        yield _ops_table(found.ops)


def _refused_lines(report: Report) -> Iterator[str]:
    yield _table(report)


def _table(report: Report) -> str:
    rows = []
    for candidate in report.candidates:
        mark = "chosen" if candidate.chosen else "could" if candidate.ok else "no"
        why = "; ".join(map(str, candidate.reasons)) or candidate.note
        rows.append((candidate.kind, candidate.name, mark, candidate.origin, why))
    return table(("KIND", "NAME", "", "FROM", "WHY"), rows)


def _ops_table(ops: OpChoice) -> str:
    rows = [(op, name, ops.why[op]) for op, name in ops.chosen.items()]
    others = [
        (candidate.name, "not used", "; ".join(map(str, candidate.reasons)) or candidate.note)
        for candidate in ops.candidates
        if not candidate.chosen
    ]
    text = table(("OP", "IMPLEMENTATION", "WHY"), rows)
    return f"{text}\n\n{table(('OPS PLUGIN', '', 'WHY'), others)}" if others else text
