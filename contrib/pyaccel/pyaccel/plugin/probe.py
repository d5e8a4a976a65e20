"""Whether the device can work here. Imports no torch and builds nothing."""

from __future__ import annotations

from octavo.api.manifest import ProbedDevice, ProbeResult
from pyaccel.build import built_library, find_compiler
from pyaccel.settings import Settings

__all__ = ["probe"]


def probe() -> ProbeResult:
    """The devices that the environment asks for, given a built library or a compiler to build it with."""
    if built_library() is None and find_compiler() is None:
        return ProbeResult(
            reason="its library isn't built, and there is no C++ compiler to build it with",
            hint="install g++ or clang++, or set CXX",
        )
    settings = Settings.from_environment()
    return ProbeResult(
        devices=tuple(
            ProbedDevice(index=index, name=f"pyaccel test device {index}", total_bytes=settings.memory_bytes)
            for index in range(settings.devices)
        )
    )
