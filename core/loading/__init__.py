"""Model files: found, checked as if hostile, and read lazily. `open_model` is the way in."""

from __future__ import annotations

from octavo.core.loading.generation import GenerationDefaults
from octavo.core.loading.source import ModelSource, open_model

__all__ = ["GenerationDefaults", "ModelSource", "open_model"]
