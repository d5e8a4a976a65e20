"""Writes a plugin's distribution from ``templates/plugin``: all of it, or nothing.

A template is a file whose name ends in ``.in``; ``dot-`` at the start of a name stands for a dot, ``PACKAGE`` for the Python
package's name. In its text, ``@name@`` is the plugin's name, ``@package@`` the package's, ``@Class@`` what class names begin
with, and ``@api@`` the version of `octavo.api`.
"""

from __future__ import annotations

import keyword
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from octavo.core.api import API_VERSION
from octavo.core.api.errors import UsageError
from octavo.core.discovery import installed

__all__ = ["check_name", "check_spelling", "write_plugin"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 40
_SUFFIX = ".in"


def write_plugin(name: str, parent: Path) -> Path:
    """Make the folder ``parent/name`` and return it. Raises `UsageError`, and leaves nothing behind then."""
    target = parent / name
    check_spelling(name)
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists already", hint="choose another name or another --dir")
    check_name(name)
    if not parent.is_dir():
        raise UsageError(f"there is no folder {parent}", hint="make it first, or give another --dir")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as temporary:
            made = Path(temporary, name)
            _write(made, _words(name))
            made.rename(target)
    except OSError as error:
        raise UsageError(f"can't write {target}: {error.strerror or error}", hint="give another --dir") from error
    return target


def check_spelling(name: str) -> None:
    """Raises `UsageError` unless ``name`` can name a distribution, a platform and, with ``_`` for ``-``, a package."""
    if not _NAME.fullmatch(name):
        rule = "lowercase letters, digits and single hyphens, a letter first, such as acme-npu"
        raise UsageError(f"{name!r} can't name a plugin; it must be {rule}")
    if len(name) > _LONGEST:
        raise UsageError(f"a plugin's name has at most {_LONGEST} characters, {name!r} has {len(name)}")


def check_name(name: str) -> None:
    """Raises `UsageError` for a name that Python, another package or another plugin has taken."""
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or keyword.issoftkeyword(package) or package in sys.stdlib_module_names:
        raise UsageError(f"{package!r} is a word or a module of Python's own", hint=f"choose another name, such as {name}-npu")
    found = find_spec(package)
    if found is not None and found.origin is not None:  # a mere folder of that name is no package
        raise UsageError(f"the package {package!r} is installed already ({found.origin})", hint="choose another name")
    for entry in installed().entries:
        taken = {entry.name, entry.distribution, entry.manifest.name if entry.manifest is not None else ""}
        if name in taken or f"{name}-attention" in taken:
            raise UsageError(f"{entry.origin} has a plugin {entry.name!r} already", hint="choose another name")


def _words(name: str) -> Mapping[str, str]:
    return {
        "name": name,
        "package": name.replace("-", "_"),
        "Class": "".join(part.capitalize() for part in name.split("-")),
        "api": ".".join(map(str, API_VERSION)),
    }


def _write(folder: Path, words: Mapping[str, str]) -> None:
    def fill(text: str) -> str:
        return re.sub(r"@(\w+)@", lambda found: words.get(found[1], found[0]), text)

    for path, text in _templates(files("octavo.core.cli") / "templates" / "plugin"):
        parts = [words["package"] if part == "PACKAGE" else re.sub(r"^dot-", ".", part) for part in path]
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(fill(text), encoding="utf-8")


def _templates(folder: Traversable, *under: str) -> Iterator[tuple[Sequence[str], str]]:
    """Every template below ``folder``: the parts of the path that its file gets, and its text."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _templates(entry, *under, entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield (*under, entry.name.removesuffix(_SUFFIX)), entry.read_text(encoding="utf-8")
