"""`GenerationDefaults`: what a model's files recommend for sampling, and where it stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.api.errors import UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.loading.fields import Fields

__all__ = ["GenerationDefaults", "generation_defaults"]

_MAX_EOS_IDS = 64


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """None where the files are silent."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def generation_defaults(values: Mapping[str, Any], *, fallback_eos: Any, where: str) -> GenerationDefaults:
    """From a generation_config.json; ``fallback_eos`` (an id, a list, None) is config.json's. Raises `BrokenModel`."""
    fields = Fields(values, where)
    numbers = {key: fields.number(key) for key in ("temperature", "top_p", "min_p", "repetition_penalty") if fields.has(key)}
    top_k = fields.integer("top_k", least=-1) if fields.has("top_k") else None
    for key, value in (*numbers.items(), ("top_k", top_k)):
        if value is not None:
            _check(fields, key, value)
    eos = values.get("eos_token_id", fallback_eos)
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if len(ids) > _MAX_EOS_IDS or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        fields.broken(f"'eos_token_id' must be a token id or a list of them, not {str(eos)[:60]}")
    return GenerationDefaults(eos_token_ids=tuple(dict.fromkeys(ids)), top_k=top_k, **numbers)


def _check(fields: Fields, key: str, value: float) -> None:
    """A value that no request may have is the file's fault."""
    default: Mapping[str, Any] = {key: value}
    try:
        SamplingParams(**default)
    except UsageError as error:
        fields.broken(f"{key!r} is {value:g}: {error}")
