"""Every error that Octavo raises on purpose, and the exit code each one ends the command line with.

::

    OctavoError                     1   anything else
    ├── UsageError                  2   the command or an argument is wrong
    ├── Refused                     3   this model, platform or backend can't do it
    │   ├── ModelError                  a model file or folder
    │   │   ├── BrokenModel                 truncated, inconsistent, hostile
    │   │   └── UnsupportedModel            well-formed, but not something we run
    │   ├── PluginError                 a plugin
    │   │   ├── ManifestError               its octavo-plugin.toml
    │   │   ├── PluginNotFound              no plugin of that name
    │   │   └── PluginUnavailable           found, but not usable here
    │   ├── SelectionError              no platform, backend or block size satisfies the request
    │   └── Unsupported                 a backend was asked for something it doesn't declare
    ├── OutOfMemory                 4   a device or the host has too little memory
    └── EngineError                 1   the engine stopped
        ├── WorkerDied                  a worker process ended or stopped answering
        └── RequestAborted              the request was aborted before it finished

A message says what is wrong, what was expected and what to do, in one line; ``hint`` holds the last part on its own, for
reports that print it apart.
"""

from __future__ import annotations

__all__ = [
    "BrokenModel",
    "EngineError",
    "ManifestError",
    "ModelError",
    "OctavoError",
    "OutOfMemory",
    "PluginError",
    "PluginNotFound",
    "PluginUnavailable",
    "Refused",
    "RequestAborted",
    "SelectionError",
    "Unsupported",
    "UnsupportedModel",
    "UsageError",
    "WorkerDied",
]


class OctavoError(Exception):
    """Base of every deliberate error. ``str(error)`` is one line: the message and, where there is one, the hint."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.message}; {self.hint}" if self.hint else self.message
        return " ".join(text.split())


class UsageError(OctavoError):
    """The command, an argument or a request is wrong: the caller can mend it."""

    exit_code = 2


class Refused(OctavoError):
    """What was asked for is understood but can't be done here."""

    exit_code = 3


class ModelError(Refused):
    """A model can't be loaded."""


class BrokenModel(ModelError):
    """A model file is truncated, inconsistent or hostile."""


class UnsupportedModel(ModelError):
    """A well-formed model that Octavo doesn't run."""


class PluginError(Refused):
    """A plugin is missing, broken or not usable."""


class ManifestError(PluginError):
    """An ``octavo-plugin.toml`` breaks the manifest's rules; the message names the file and the key."""


class PluginNotFound(PluginError):
    """No installed plugin has that name."""


class PluginUnavailable(PluginError):
    """The plugin is installed, but it, or what it needs, doesn't work here."""


class SelectionError(Refused):
    """Nothing satisfies the request; ``report`` holds every candidate with every reason."""

    def __init__(self, message: str, *, hint: str | None = None, report: object = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report


class Unsupported(Refused):
    """A backend or op was asked for something that it doesn't declare."""


class OutOfMemory(OctavoError):
    """Too little memory; the message says needed, available and which flag changes it."""

    exit_code = 4


class EngineError(OctavoError):
    """The engine can't go on."""


class WorkerDied(EngineError):
    """A worker process ended, or stopped answering."""


class RequestAborted(EngineError):
    """The request was aborted before it finished."""
