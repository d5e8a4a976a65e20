"""Loads plugins one after the other, for ``octavo doctor``: run as a module, in a process that may die of it.

Input, one JSON document on stdin: ``[[kind, name], …]``. Output on stdout, one JSON line before and one after each plugin.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from octavo.core.api.errors import OctavoError
from octavo.core.discovery import installed


def main() -> None:
    wanted = json.load(sys.stdin)
    results = os.dup(1)
    os.dup2(2, 1)  # what plugins print doesn't mix with the answers

    def write(answer: dict[str, Any]) -> None:
        os.write(results, json.dumps(answer).encode() + b"\n")

    registry = installed()
    for kind, name in wanted:
        write({"kind": kind, "name": name})
        answer: dict[str, Any] = {"kind": kind, "name": name, "ok": True}
        entry = registry.find(kind, name)
        try:
            registry.load(kind, name)
            answer["warning"] = entry.warning
        except OctavoError as error:
            answer |= {"ok": False, "error": entry.reason or str(error), "traceback": entry.traceback}
        write(answer)
    os._exit(0)


if __name__ == "__main__":
    main()
