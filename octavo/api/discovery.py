"""The installed plugins, for commands, workers and tests that are written elsewhere. Imports no torch and no plugin."""

from octavo.core.discovery import PluginEntry, Registry, installed

__all__ = ["PluginEntry", "Registry", "installed"]
