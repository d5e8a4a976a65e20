"""Lets the environment whose Python runs this see another environment's packages: ``python base_packages.py FOLDER``."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main(base: str) -> None:
    packages = sysconfig.get_path("purelib", vars={"base": str(Path(base).resolve())})
    link = Path(sysconfig.get_path("purelib")) / "base-packages.pth"
    # addsitedir, not a bare path: editable installs over there have .pth files of their own.
    link.write_text(f"import site; site.addsitedir({packages!r})\n")


if __name__ == "__main__":
    main(sys.argv[1])
