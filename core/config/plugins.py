from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.core.config._field import option


@dataclass(frozen=True, kw_only=True)
class PluginsConfig:
    """Which plugins are used. After selection every field is explicit."""

    platform: str | None = option(None, help="platform plugin (default: an accelerator that works, else the host)")
    device: int = option(0, help="index of the platform's device")
    attention_backend: Mapping[str, str] = option({}, help="NAME for every layer, or kind=NAME,kind=NAME")
    op: Mapping[str, str] = option({}, help="OP=NAME: implementation of one op; repeatable")
    executor: str = option("inline", help="executor plugin: how workers are reached")
    plugin: tuple[str, ...] = option((), help="plugins whose hooks and ops are turned on; repeatable")
