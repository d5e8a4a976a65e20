"""Where a plugin's code and manifest lie, without importing any of it.

Only the top-level package is located, through the import system's own finders, which run no code of the package. Below it,
folders are followed by name; where a folder isn't there (an editable install that maps subpackages elsewhere), the finders are
asked again. Symbolic links are followed as they stand, never resolved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from octavo.core.discovery.manifest import FILE_NAME


def find_manifest(module: str) -> Path | None:
    """The manifest in the folder of ``module``, or in the nearest folder above it within its top-level package."""
    folders = _folders(module)
    for level in reversed(folders):
        for folder in level:
            if (folder / FILE_NAME).is_file():
                return folder / FILE_NAME
    return None


def find_package(module: str) -> bool:
    """Whether the top-level package of ``module`` is there."""
    return bool(_locations(module.partition(".")[0], None))


def _folders(module: str) -> Sequence[Sequence[Path]]:
    """The folders of the packages around ``module``, outermost first; several each for namespace packages."""
    top, *rest = module.split(".")
    level = _locations(top, None)
    levels = [level]
    name = top
    for part in rest:
        name = f"{name}.{part}"
        below = [folder / part for folder in level if (folder / part).is_dir()] or _locations(name, [str(f) for f in level])
        if not below:  # the target's module itself: its folder is the last one
            break
        levels.append(below)
        level = below
    return levels


def _locations(name: str, path: Sequence[str] | None) -> list[Path]:
    return [Path(folder) for folder in _search_locations(name, path) if Path(folder).is_dir()]


def _search_locations(name: str, path: Sequence[str] | None) -> Iterator[str]:
    """``submodule_search_locations`` of a package, from the finders; nothing when there is no such package."""
    if path is None:
        try:
            spec = find_spec(name)
        except (ValueError, ImportError):  # a module without a spec, or a finder that gives up
            return
        yield from (spec.submodule_search_locations or ()) if spec else ()
        return
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        found = find(name, path) if find else None
        if found is not None:
            locations = found.submodule_search_locations
            yield from getattr(locations, "_path", locations) or ()  # a nested namespace would import its parent when iterated
            return
