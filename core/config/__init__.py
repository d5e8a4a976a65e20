"""Configuration: small frozen dataclasses, one file each. Environment variables are read in `environment` and nowhere else.

A field's name is its flag (``--max-model-len``), its keyword in `LLM` and its key in ``octavo.toml``; names are unique over all
parts, so `EngineConfig.from_flat` can take them flat.
"""

from __future__ import annotations

from octavo.core.config.cache import CacheConfig
from octavo.core.config.engine import EngineConfig
from octavo.core.config.model import ModelConfig
from octavo.core.config.plugins import PluginsConfig
from octavo.core.config.scheduler import SchedulerConfig

__all__ = ["CacheConfig", "EngineConfig", "ModelConfig", "PluginsConfig", "SchedulerConfig"]
