"""Whether a plugin's requirements are met, read from installed metadata; nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache


def unmet(requires: Iterable[str]) -> tuple[str, ...]:
    """One line for each requirement that isn't met: ``needs acme-kernels>=2, but 1.4 is installed``."""
    return tuple(line for text in requires if (line := _unmet(text)))


@cache
def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    import importlib_metadata

    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return None


@cache
def _unmet(text: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return f"needs {text!r}, which isn't a requirement"
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return ""
    version = installed_version(requirement.name)
    wanted = f"{requirement.name}{requirement.specifier}"
    if version is None:
        return f"needs {wanted}, which isn't installed; pip install '{wanted}'"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"needs {wanted}, but {requirement.name} {version} is installed"
    return ""
