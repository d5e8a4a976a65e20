"""Model files as bytes: opened only when they are ordinary files, and mapped, so that nothing is copied until asked for."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

from octavo.core.api.errors import BrokenModel, UsageError

__all__ = ["is_there", "map_file", "read_small_file"]


def is_there(path: Path) -> bool:
    """Whether a model folder has this file. A link that leads nowhere is no absent file: `BrokenModel` names it."""
    if path.exists():
        return True
    if path.is_symlink():
        raise BrokenModel(
            f"{path} links to {path.readlink()}, which isn't there", hint="mend the link, or fetch the folder again"
        )
    return False


def _regular_size(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is not an ordinary file")
    return status.st_size


def map_file(path: Path, *, least_bytes: int = 1) -> mmap.mmap:
    """The file's bytes, mapped privately: pages are read when they are touched and never written back.

    The mapping is writable on paper (copy-on-write), because arrays over a read-only one draw warnings; nobody writes to it.
    Raises `UsageError` when the file can't be read, `BrokenModel` when it has fewer than ``least_bytes`` bytes.
    """
    size = _regular_size(path)
    if size < least_bytes:
        raise BrokenModel(f"{path.name} has only {size} bytes: truncated or not a model file", hint="fetch it again")
    try:
        with path.open("rb") as file:
            if hasattr(mmap, "MAP_PRIVATE"):
                # Without MAP_NORESERVE the kernel may refuse to map a file larger than its memory.
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
                return mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: the file shrank between stat and mmap
        raise UsageError(f"can't read {path}: {error}") from error


def read_small_file(path: Path, *, most_bytes: int) -> bytes:
    """The whole of a small file. Raises `UsageError` when it can't be read, `BrokenModel` when it is too large to be one."""
    size = _regular_size(path)
    if size > most_bytes:
        raise BrokenModel(f"{path.name} has {size} bytes; at most {most_bytes} are expected")
    try:
        with path.open("rb") as file:
            return file.read(size)  # read(n) sets n bytes aside whether or not they are there
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
