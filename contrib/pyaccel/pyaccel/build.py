"""Builds the device's library on first use, with the system's C++ compiler and torch's own headers. Imports no torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from pyaccel.settings import cache_folder

__all__ = ["BuildError", "Slot", "built_library", "find_compiler", "library"]

Slot: TypeAlias = Literal["PrivateUse1", "HPU"]
"""The place in torch that the device takes: the one for devices from outside, or the one that torch keeps for HPUs."""

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")


class BuildError(RuntimeError):
    """The library can't be built here; the message says what is missing."""


def library(slot: Slot = "PrivateUse1") -> Path:
    """The built library; builds it (some ten seconds) unless this source was built for this torch and slot before."""
    if (path := built_library(slot)) is not None:
        return path
    path = _library_path(slot)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if not path.exists():  # another process may just have built it
            _build(path, slot)
    return path


def built_library(slot: Slot = "PrivateUse1") -> Path | None:
    """The library if it is built already, else None."""
    path = _library_path(slot)
    return path if path.exists() else None


def find_compiler() -> list[str] | None:
    """The C++ compiler's command: ``$CXX``, or the first of g++, clang++ and c++ that is installed; None without one."""
    wanted = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["clang++"], ["c++"]]
    return next((command for command in wanted if shutil.which(command[0])), None)


def _library_path(slot: Slot) -> Path:
    digest = hashlib.sha256(repr((_FLAGS, slot, importlib.metadata.version("torch"))).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_folder() / f"libpyaccel-{digest.hexdigest()[:16]}.so"


def _build(path: Path, slot: Slot) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("pyaccel needs a C++ compiler and found none: install g++ or clang++ (C++20), or set CXX")
    torch = _torch_folder()
    include = torch / "include"
    descriptor, built = tempfile.mkstemp(dir=path.parent, prefix="building-", suffix=".so")
    os.close(descriptor)
    command = [
        *compiler, *_FLAGS, f"-DPYACCEL_SLOT={slot}", f"-DPYACCEL_AUTOCAST_SLOT=Autocast{slot}",
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(_SOURCES / "library.cpp"),
        "-o", built, f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"pyaccel's library doesn't build:\n{shlex.join(command)}\n{done.stderr[-4000:]}")
        os.replace(built, path)
    finally:
        Path(built).unlink(missing_ok=True)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("pyaccel needs torch, which isn't installed")
    return Path(spec.submodule_search_locations[0])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
