"""Builds a wheel of each project given, with the build backend that its pyproject.toml names, all in one process.

``python build_wheels.py TARGET PROJECT…``: a front end such as pip does the same, with a process for each.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import tomllib
from importlib import import_module
from pathlib import Path


def main(target: str, *projects: str) -> None:
    for project in map(Path.resolve, map(Path, projects)):
        with tempfile.TemporaryDirectory() as folder:  # builds leave files behind, which must not be the sources' folder
            copy = Path(folder, project.name)
            shutil.copytree(project, copy, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build"))
            os.chdir(copy)
            build = tomllib.loads(Path("pyproject.toml").read_text())["build-system"]
            import_module(build["build-backend"]).build_wheel(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
