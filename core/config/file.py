"""``--config octavo.toml``: options under the names of their flags, flat or in tables named after their part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.core.api.errors import UsageError
from octavo.core.config.engine import EngineConfig
from octavo.core.config.suggest import nearest
from octavo.core.config.toml import parse_toml


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Options by name, ready for `EngineConfig.from_flat`. Raises `UsageError`.

    ``block_size = 32`` and ``[cache] block_size = 32`` say the same; ``attention_backend`` and ``op`` may be tables.
    """
    try:
        data = parse_toml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"config file {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise UsageError(f"config file {path} isn't TOML: {error}") from error
    options: dict[str, Any] = {}
    homes = {option.name.replace("-", "_"): part for part, option in EngineConfig.options()}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name in set(homes.values()) and isinstance(value, Mapping):
            for inner, item in value.items():
                _take(options, path, homes, inner.replace("-", "_"), item, part=name)
        else:
            _take(options, path, homes, name, value)
    return options


def _take(
    options: dict[str, Any], path: str | Path, homes: Mapping[str, str], name: str, value: Any, part: str | None = None
) -> None:
    if name not in homes:
        raise UsageError(f"config file {path}: unknown option {name!r}" + nearest(name, homes))
    if part is not None and homes[name] != part:
        raise UsageError(f"config file {path}: {name} belongs in [{homes[name]}], not [{part}]")
    if name in options:
        raise UsageError(f"config file {path}: {name} is set twice")
    options[name] = value
