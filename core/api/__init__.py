"""The only surface that plugins import (as ``octavo.api``). Versioned: see ``docs/decisions``.

``API_VERSION`` is (major, minor). Minor releases add keyword-only fields with defaults and optional methods. Importing this
package imports no torch.
"""

from __future__ import annotations

API_VERSION = (1, 0)
"""Provisional until CPU, accelerator and contrib backends have been built on it."""
