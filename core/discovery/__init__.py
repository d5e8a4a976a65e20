"""Plugins: found through entry points, described by manifests, probed in a helper process, chosen by one pure function."""

from __future__ import annotations

from octavo.core.discovery.registry import PluginEntry, Registry, installed

__all__ = ["PluginEntry", "Registry", "installed"]
