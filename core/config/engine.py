from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field as DataclassField
from dataclasses import dataclass, field, fields, replace
from typing import Any

from octavo.core.api.errors import UsageError
from octavo.core.config.cache import CacheConfig
from octavo.core.config.model import ModelConfig
from octavo.core.config.plugins import PluginsConfig
from octavo.core.config.scheduler import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is started with. `octavo.core.discovery.selection` turns open choices into explicit ones."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    given: frozenset[str] = field(default=frozenset(), compare=False)  # options that the operator named, defaults or not

    @classmethod
    def options(cls) -> Iterator[tuple[str, DataclassField[Any]]]:
        """Every option with the name of its part, in the order of declaration."""
        for part in _PARTS:
            for option in fields(_PARTS[part]):
                yield part, option

    @classmethod
    def from_flat(cls, **options: Any) -> EngineConfig:
        """From keywords without their part: ``from_flat(model="smollm2", block_size=32)``. Raises `UsageError`."""
        homes = {option.name: part for part, option in cls.options()}
        parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
        for name, value in options.items():
            if name not in homes:
                from octavo.core.config.suggest import nearest

                raise UsageError(f"unknown option {name!r}" + nearest(name, homes))
            parts[homes[name]][name] = value
        made = {part: _PARTS[part](**values) for part, values in parts.items()}
        config = cls(**made, given=frozenset(options))
        from octavo.core.config.validate import validate

        return validate(config)

    def with_value(self, path: str, value: Any) -> EngineConfig:
        """A copy with one field changed; ``path`` is dotted: ``"cache.block_size"``. Raises `UsageError` when unknown."""
        part, _, name = path.partition(".")
        if part not in _PARTS or name not in {option.name for option in fields(_PARTS[part])}:
            raise UsageError(f"no configuration field {path!r}")
        return replace(self, **{part: replace(getattr(self, part), **{name: value})})

    def get(self, path: str) -> Any:
        part, _, name = path.partition(".")
        return getattr(getattr(self, part), name)

    def flat(self) -> Mapping[str, Any]:
        return {option.name: getattr(getattr(self, part), option.name) for part, option in self.options()}


_PARTS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "plugins": PluginsConfig,
}
