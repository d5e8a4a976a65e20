"""The first ``import torch`` of a process: a vendor's package that torch loads by itself must not break other platforms."""

from __future__ import annotations

import logging
import sys

from octavo.core.api.errors import PluginUnavailable
from octavo.core.config import environment
from octavo.core.discovery import PluginEntry
from octavo.core.discovery.loading import root_cause
from octavo.core.discovery.torch_extensions import torch_extensions

logger = logging.getLogger("octavo")


def import_torch(platform: PluginEntry) -> None:
    """Import torch; without its extensions where the host's own processors run the model.

    Raises `PluginUnavailable` naming the extension when one breaks the import, with the remedy.
    """
    if "torch" not in sys.modules:
        environment.limit_spinning()
    extensions = torch_extensions() if "torch" not in sys.modules and environment.torch_autoload() else ()
    if not extensions:
        return
    listed = ", ".join(map(str, extensions))
    if platform.table.kind == "host":
        environment.disable_torch_autoload()
        logger.info("torch won't load %s: platform %s doesn't need it", listed, platform.name)
        return
    try:
        import torch  # noqa: F401 - the import is the point
    except Exception as error:
        raise PluginUnavailable(
            f"importing torch fails in an extension that torch loads by itself, {listed}: {root_cause(error)}",
            hint=f"repair or uninstall it, or set {environment.TORCH_AUTOLOAD}=0",
        ) from error
