"""What backends that need exact lengths on the host (``needs_host_lengths``) ask of how steps are scheduled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.core.api.errors import SelectionError
from octavo.core.config import EngineConfig
from octavo.core.discovery import Registry
from octavo.core.discovery.report import Report

__all__ = ["with_exact_lengths"]


def with_exact_lengths(
    config: EngineConfig, registry: Registry, attention: Mapping[str, str]
) -> tuple[EngineConfig, Sequence[str]]:
    """The configuration with which the host knows every length when a step starts, and what was changed for that.

    A step that verifies guesses leaves the host in doubt of its requests' lengths until its tokens arrive, so none may be
    planned over it. Without guesses the host knows how far every request is before it knows with which tokens: those steps
    overlap. Raises `SelectionError` when asynchronous scheduling was asked for.
    """
    scheduler = config.scheduler
    needing = sorted({name for name in attention.values() if registry.find("attention", name).table.needs_host_lengths})
    if not needing or scheduler.speculative is None or scheduler.async_scheduling is False:
        return config, ()
    why = f"{', '.join(needing)} needs exact lengths on the host, and speculative={scheduler.speculative} leaves them open"
    if scheduler.async_scheduling and "async_scheduling" in config.given:
        raise SelectionError(
            f"steps can't be scheduled asynchronously: {why}",
            hint="leave async_scheduling out, leave speculative out, or choose another attention backend",
            report=Report(),
        )
    return config.with_value("scheduler.async_scheduling", False), (f"async_scheduling turned off: {why}",)
