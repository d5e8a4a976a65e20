"""Plain text tables, without a library: ``octavo backends`` has 0.4 s."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the last one is wrapped into what the terminal leaves."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header) - 1)]
    left = sum(widths) + len(_GAP) * len(widths)
    room = max(30, shutil.get_terminal_size((120, 24)).columns - left)
    lines = []
    for row in (header, *rows):
        wrapped = textwrap.wrap(row[-1], room, break_long_words=False) or [""]
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(_GAP.join([*cells, wrapped[0]]).rstrip())
        lines.extend(" " * left + more for more in wrapped[1:])
    return "\n".join(lines)
