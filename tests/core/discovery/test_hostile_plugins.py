"""Manifests, metadata and probes that nobody writes by accident: each is a listed state with a reason, the rest goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.core.api.errors import ManifestError, OctavoError, PluginUnavailable, UsageError
from octavo.core.config.file import read_config_file
from octavo.core.discovery import probe_runner, probes
from octavo.core.discovery.loading import root_cause
from octavo.core.discovery.manifest import MAX_BYTES, parse_manifest, read_manifest
from octavo.core.discovery.probes import Probes
from octavo.core.discovery.wording import LONGEST, error_text, first_cause, one_line

ACME = '[plugin]\nname = "acme"\napi = "1.0"\n[platform.acme]\ndevice_type = "cpu"\n'
HEAD = "import os\nfrom octavo.api.manifest import ProbedDevice, ProbeResult\n"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "isn't TOML: maximum recursion depth"),
        ("x = " + "{a = " * 3000 + "1" + "}" * 3000, "isn't TOML: maximum recursion depth"),
        ("archs = [" + "9" * 5000 + "]", "isn't TOML"),
        ("archs = [0x" + "f" * 5000 + "]", "isn't TOML: a whole number has more than 64 bits"),
        ("a" + ".a" * 2000 + " = 0x" + "f" * 5000, "isn't TOML: a whole number has more than 64 bits"),
        ('archs = ["acme1\\n"]', "archs"),
    ],
)
def test_values_that_break_the_reader_are_mistakes_like_others(more: str, says: str) -> None:
    with pytest.raises(ManifestError, match=says) as caught:
        parse_manifest(ACME + more, "acme/octavo-plugin.toml")
    assert str(caught.value).startswith("acme/octavo-plugin.toml: ")


@pytest.mark.parametrize("api", ["9" * 5000 + ".1", "1." + "9" * 5000, "١.٠", "1.0\\n"])
def test_a_version_is_two_short_numbers(api: str) -> None:
    with pytest.raises(ManifestError, match=r"plugin\.api: must be"):
        parse_manifest(ACME.replace('"1.0"', f'"{api}"'), "acme/octavo-plugin.toml")


def test_a_manifest_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "octavo-plugin.toml"
    path.write_text(ACME + "#" * (MAX_BYTES - len(ACME)))
    assert read_manifest(path).name == "acme"
    path.write_text(ACME + "#" * MAX_BYTES)
    with pytest.raises(ManifestError, match=f"is longer than {MAX_BYTES} bytes"):
        read_manifest(path)


def test_a_distribution_without_metadata_still_has_its_plugins(local_plugins: Any) -> None:
    local_plugins.add("acme", manifest=ACME, entry_points={"octavo.platforms": {"acme": "acme.it:Platform"}})
    (metadata,) = local_plugins.site.glob("acme-1.0.dist-info/METADATA")
    metadata.unlink()
    (entry,) = [entry for entry in local_plugins.registry().entries if entry.name == "acme"]
    assert (entry.state, entry.origin) == ("found", "acme 1.0")


def test_two_entry_points_of_one_name_in_one_distribution_are_both_named(local_plugins: Any) -> None:
    local_plugins.add("acme", manifest=ACME, entry_points={"octavo.platforms": {"acme": "acme.it:One"}})
    (points,) = local_plugins.site.glob("acme-1.0.dist-info/entry_points.txt")
    points.write_text(points.read_text() + "acme = acme.it:Two\n")
    registry = local_plugins.registry()
    says = "acme 1.0 has 2 entry points of this name, acme.it:One and acme.it:Two; it must have one: reinstall it"
    assert [(entry.state, entry.reason) for entry in registry.entries if entry.name == "acme"] == [("incompatible", says)] * 2
    with pytest.raises(PluginUnavailable, match="has 2 entry points of this name"):
        registry.load("platform", "acme")


def outcomes(box: Any, bodies: Mapping[str, str]) -> Mapping[str, Any]:
    """What becomes of probes with these bodies, all in one helper at first."""
    files = {f"{name}.py": HEAD + body for name, body in bodies.items()}
    box.add("acme", manifest=None, files=files)
    return Probes({name: f"acme.{name}:probe" for name in bodies}, limit_s=10).outcomes()


def result(devices: str) -> str:
    return f"def probe(): return ProbeResult(devices={devices})"


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ("[ProbedDevice(index='0', name='x')]", "index '0' isn't a whole number"),
        ("[ProbedDevice(index=True, name='x')]", "index True isn't a whole number"),
        ("[ProbedDevice(index=-1, name='x')]", "index -1 isn't a whole number"),
        ("[ProbedDevice(index=0, name='x'), ProbedDevice(index=0, name='y')]", "two devices have index 0"),
        ("[ProbedDevice(index=0, name=5)]", "name 5 and arch None of device 0 aren't text"),
        ("[ProbedDevice(index=0, name='x', arch=90)]", "name 'x' and arch 90 of device 0 aren't text"),
        ("[ProbedDevice(index=0, name='x', total_bytes='8G')]", "total_bytes '8G' of device 0 isn't a number of bytes"),
        ("'abc'", "must be a mapping, not str"),
        ("7", "not iterable"),
        ("[{'nom': 'x'}]", "unexpected keyword argument 'nom'"),
    ],
)
def test_an_answer_of_wrong_types_is_a_broken_probe(local_plugins: Any, devices: str, says: str) -> None:
    outcome = outcomes(local_plugins, {"it": result(devices)})["it"]
    assert outcome.result is None
    assert says in outcome.error


def test_what_probes_write_where_they_should_not_is_ignored(local_plugins: Any) -> None:
    good = "return ProbeResult(devices=[ProbedDevice(index=0, name='x')])"
    junk = r"b'junk\n{}\n[1]\n{\"key\": \"nobody\"}\n{\"key\": []}\n\xff\n'"
    writes = f"def probe():\n  for fd in range(3, 40):\n    try: os.write(fd, {junk})\n    except OSError: pass\n  {good}"
    found = outcomes(local_plugins, {"writes": writes, "good": f"def probe(): {good}"})
    assert [found[name].result.devices[0].name for name in ("writes", "good")] == ["x", "x"]


def test_what_a_probe_says_fits_on_a_line(local_plugins: Any) -> None:
    says = r"'a\n\x1b[31mb\udc80' + 'c' * 3_000_000"
    bodies = {
        "absent": f"def probe(): return ProbeResult(reason={says}, hint={says})",
        "raises": f"def probe(): raise RuntimeError({says})",
    }
    found = outcomes(local_plugins, bodies)
    for text in (found["absent"].result.reason, found["absent"].result.hint, found["raises"].error):
        assert len(text) <= LONGEST
        assert text.isprintable()
        assert "a [31mb ccc" in text
    found["raises"].traceback.encode()


class _Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")

    __repr__ = __str__


def _circle() -> Exception:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@pytest.mark.parametrize(("error", "says"), [(_Unsayable(), "_Unsayable"), (_circle(), "RuntimeError: second")])
def test_errors_that_can_not_be_told_are_told_anyway(error: Exception, says: str) -> None:
    assert root_cause(error).startswith(says)
    assert probe_runner._told(error)["error"].startswith(says)


def test_text_of_plugins_is_made_fit_for_one_line() -> None:
    assert one_line("  a\n\tb\r\x00\x1b[0m \udc80 ü ") == "a b [0m ü"
    assert one_line("x" * LONGEST) == "x" * LONGEST
    assert one_line("x" * (LONGEST + 1)) == "x" * (LONGEST - 1) + "…"
    assert error_text(KeyError()) == "KeyError"
    assert first_cause(_circle()).args == ("second",)
    assert root_cause(OctavoError("l" * (LONGEST + 1))) == "l" * (LONGEST + 1), "our own text is kept whole"
    assert os.linesep not in error_text(OSError("a\nb"))


@pytest.mark.parametrize("value", ["9" * 5000, "0x" + "f" * 5000, str(2**63), "[" * 5000 + "]" * 5000])
def test_a_config_file_with_values_that_break_the_reader_is_a_usage_error(tmp_path: Path, value: str) -> None:
    path = tmp_path / "octavo.toml"
    path.write_text(f"block_size = {value}\n")
    with pytest.raises(UsageError, match=r"config file .*octavo\.toml isn't TOML: "):
        read_config_file(path)


def test_a_command_named_like_one_of_octavo_s_own_names_both_and_is_never_run(local_plugins: Any) -> None:
    manifest = '[plugin]\nname = "acme"\napi = "1.0"\n[command.backends]\n[command.shapes]\n'
    points = {"octavo.commands": {"backends": "acme.it:one", "shapes": "acme.it:two"}}
    local_plugins.add("acme", manifest=manifest, entry_points=points)
    states = {entry.name: (entry.state, entry.reason) for entry in local_plugins.registry().of_kind("command")}
    says = "the command 'backends' is claimed by acme 1.0 and by octavo itself, which keeps it"
    assert states == {"backends": ("incompatible", says), "shapes": ("found", "")}


def test_an_interrupt_while_a_probe_hangs_leaves_no_process_behind(local_plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(probes, "_read_until", interrupted)
    local_plugins.add("acme", manifest=None, files={"hangs.py": "def probe():\n  while True: pass\n"})
    under_way = Probes({"hangs": "acme.hangs:probe"}, limit_s=10)
    assert under_way._helper is not None
    with pytest.raises(KeyboardInterrupt):
        under_way.outcomes()
    assert under_way._helper.process.returncode == -signal.SIGKILL
