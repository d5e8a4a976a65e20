from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.core.api.errors import PluginNotFound, PluginUnavailable
from octavo.core.discovery.locate import find_manifest

PLATFORM = """
[plugin]
name = "{name}"
api = "{api}"
[platform.{name}]
device_type = "{name}"
{more}
"""


def manifest(name: str, *, api: str = "1.0", more: str = "") -> str:
    return PLATFORM.format(name=name, api=api, more=more)


def add_platform(box: Any, name: str, *, probe: str | None = None, distribution: str | None = None, **more: Any) -> Path:
    """A platform whose probe, where there is one, is the body given."""
    files = {"platform.py": "", **more.pop("files", {})}
    text = more.pop("text", None)
    extra = more.pop("more", "")
    package = (distribution or f"{name}-octavo").replace("-", "_")
    if probe is not None:
        lines = "\n    ".join(probe.splitlines())
        head = "from octavo.api.manifest import ProbeResult, ProbedDevice"
        files["probe.py"] = f"{head}\ndef probe():\n    {lines}\n"
        extra += f'\nprobe = "{package}.probe:probe"'
    folder: Path = box.add(
        distribution or f"{name}-octavo",
        manifest=text or manifest(name, more=extra, api=more.pop("api", "1.0")),
        files=files,
        entry_points=more.pop("entry_points", {"octavo.platforms": {name: f"{package}.platform:Platform"}}),
        **more,
    )
    return folder


def state(box: Any, name: str) -> tuple[str, str]:
    entries = [entry for entry in box.registry().probe().entries if entry.name == name]
    assert len(entries) == 1
    return entries[0].state, entries[0].reason


ONE_DEVICE = 'return ProbeResult(devices=[ProbedDevice(index=0, name="Acme One", arch="acme1")])'


def test_reading_imports_nothing_of_a_plugin(local_plugins: Any) -> None:
    add_platform(local_plugins, "acme", probe=ONE_DEVICE, files={"__init__.py": "raise RuntimeError('imported')"})
    registry = local_plugins.registry()
    assert [entry.state for entry in registry.entries if entry.name == "acme"] == ["found"]
    assert "acme_octavo" not in sys.modules


def test_a_probe_with_a_device_makes_a_platform_available(local_plugins: Any) -> None:
    add_platform(local_plugins, "acme", probe=ONE_DEVICE)
    entry = local_plugins.registry().probe().find("platform", "acme")
    assert (entry.state, entry.devices[0].name, entry.devices[0].arch) == ("available", "Acme One", "acme1")
    assert "acme_octavo" not in sys.modules, "the probe ran elsewhere"


def test_a_probe_without_devices_gives_its_reason(local_plugins: Any) -> None:
    add_platform(local_plugins, "acme", probe='return ProbeResult(reason="no driver", hint="install acme-driver")')
    entry = local_plugins.registry().probe().find("platform", "acme")
    assert (entry.state, entry.reason, entry.hint) == ("probe-absent", "no driver", "install acme-driver")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise PermissionError(13, 'Permission denied', '/dev/acme0')", "PermissionError: [Errno 13] Permission denied"),
        ("import time; time.sleep(60)", "gave no answer within"),
        ("import os; os._exit(7)", "ended the process with exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return 17", "the probe returned 17, not a ProbeResult"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("return ProbeResult(devices=[{'index': 0}])", "gave no ProbeResult of ProbedDevices"),
    ],
)
def test_a_broken_probe_is_contained_and_costs_the_others_nothing(
    local_plugins: Any, monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    monkeypatch.setenv("OCTAVO_PROBE_TIMEOUT_S", "0.7")
    add_platform(local_plugins, "broken", probe=body)
    add_platform(local_plugins, "acme", probe=f"import time; time.sleep(0.05)\n{ONE_DEVICE}")
    registry = local_plugins.registry().probe()
    broken = registry.find("platform", "broken")
    assert broken.state == "probe-broken"
    assert says in broken.reason
    assert registry.find("platform", "acme").state == "available"


def test_what_a_probe_prints_goes_nowhere(local_plugins: Any, capfd: pytest.CaptureFixture[str]) -> None:
    body = f"import os, sys\nprint('out'); print('err', file=sys.stderr); os.system('echo child')\n{ONE_DEVICE}"
    add_platform(local_plugins, "acme", probe=body)
    assert state(local_plugins, "acme")[0] == "available"
    assert capfd.readouterr() == ("", "")


def test_a_probe_that_imports_torch_is_reported(local_plugins: Any) -> None:
    local_plugins.add("fake-torch", manifest=None, package="torch", version="9.9")  # stands before the real one: no wait
    add_platform(local_plugins, "acme", probe=f"import torch\n{ONE_DEVICE}")
    kind, reason = state(local_plugins, "acme")
    assert kind == "available"
    assert "imports torch" in reason


@pytest.mark.parametrize(
    ("api", "says"),
    [
        ("2.0", "needs octavo.api 2.0; this Octavo has 1.0, another major version"),
        ("1.9", "needs octavo.api 1.9; this Octavo has 1.0: upgrade octavo"),
        ("0.9", "another major version"),
    ],
)
def test_another_api_is_refused_before_import(local_plugins: Any, api: str, says: str) -> None:
    add_platform(local_plugins, "acme", probe=ONE_DEVICE, api=api)
    kind, reason = state(local_plugins, "acme")
    assert kind == "incompatible"
    assert says in reason


@pytest.mark.parametrize(
    ("more", "requires", "says"),
    [
        ('requires = ["acme-kernels>=2"]', (), "needs acme-kernels>=2, which isn't installed; pip install 'acme-kernels>=2'"),
        ('requires = ["click>=99"]', (), "needs click>=99, but click"),
        ("", ("torch<2",), "needs torch<2, but torch"),
        ("", ("octavo>=99",), "needs octavo>=99, but octavo"),
    ],
)
def test_requirements_are_read_from_metadata(local_plugins: Any, more: str, requires: tuple[str, ...], says: str) -> None:
    add_platform(local_plugins, "acme", more=more, requires=requires, probe=ONE_DEVICE)
    kind, reason = state(local_plugins, "acme")
    assert kind == "incompatible"
    assert says in reason


def test_met_requirements_make_a_plugin_without_probe_available(local_plugins: Any) -> None:
    add_platform(local_plugins, "acme", more='requires = ["click>=8", "no-such-thing; python_version < \'3\'"]')
    add_platform(local_plugins, "plain")
    assert state(local_plugins, "acme")[0] == "available"
    assert state(local_plugins, "plain")[0] == "found", "nothing was there to be checked"


def test_two_distributions_with_one_platform_name_are_both_named(local_plugins: Any) -> None:
    add_platform(local_plugins, "acme", distribution="acme-one", text=manifest("acme").replace('name = "acme"', 'name = "one"'))
    add_platform(local_plugins, "acme", distribution="acme-two", text=manifest("acme").replace('name = "acme"', 'name = "two"'))
    registry = local_plugins.registry().probe()
    with pytest.raises(PluginUnavailable, match=r"claimed by acme-one 1.0 and acme-two 1.0; uninstall all but one"):
        registry.find("platform", "acme")


def test_two_distributions_with_one_plugin_name_are_both_named(local_plugins: Any) -> None:
    add_platform(local_plugins, "one", text=manifest("one").replace('name = "one"', 'name = "same"'))
    add_platform(local_plugins, "two", text=manifest("two").replace('name = "two"', 'name = "same"'))
    assert "the plugin name 'same' is claimed by one-octavo 1.0 and two-octavo 1.0" in state(local_plugins, "one")[1]


def test_a_plugin_named_like_a_built_in_one_names_octavo_too(local_plugins: Any) -> None:
    add_platform(local_plugins, "cpu", distribution="evil")
    with pytest.raises(PluginUnavailable, match=r"claimed by evil 1.0 and octavo [\d.]+; uninstall"):
        local_plugins.registry().find("platform", "cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": "[plugin"}, "isn't TOML"),
        ({"text": manifest("other")}, "has no [platform.acme]; its key and the entry point's name must be equal"),
        ({"entry_points": {"octavo.platforms": {"acme": "gone.platform:Platform"}}}, "package 'gone' isn't there"),
        ({"entry_points": {"octavo.platforms": {"acme": "acme_octavo"}}}, "isn't module:attribute"),
    ],
)
def test_a_plugin_that_is_put_together_wrongly_says_how(local_plugins: Any, changes: dict[str, Any], says: str) -> None:
    add_platform(local_plugins, "acme", **changes)
    entries = [entry for entry in local_plugins.registry().entries if entry.name == "acme"]
    assert entries[0].state == "incompatible"
    assert says in entries[0].reason


def test_a_missing_manifest_is_named(local_plugins: Any) -> None:
    points = {"octavo.platforms": {"acme": "acme_octavo.platform:Platform"}}
    local_plugins.add("acme-octavo", manifest=None, files={"platform.py": ""}, entry_points=points)
    assert "no octavo-plugin.toml beside or above acme_octavo.platform" in state(local_plugins, "acme")[1]


def test_a_table_that_no_entry_point_leads_to_is_listed(local_plugins: Any) -> None:
    text = manifest("acme") + "[platform.lost]\ndevice_type = 'lost'\n"
    add_platform(local_plugins, "acme", text=text)
    kind, reason = state(local_plugins, "lost")
    assert kind == "incompatible"
    assert "has no entry point 'lost' in octavo.platforms" in reason


def test_an_unknown_name_gets_near_matches_and_everyone_s_state(local_plugins: Any) -> None:
    add_platform(local_plugins, "acme", probe='return ProbeResult(reason="no driver")')
    registry = local_plugins.registry().probe()
    with pytest.raises(PluginNotFound, match=r"did you mean 'acme'.*; installed: acme \(probe-absent: no driver\)"):
        registry.find("platform", "acmee")


def test_metadata_that_can_not_be_read_costs_only_its_own_plugins(
    local_plugins: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    add_platform(local_plugins, "acme", probe=ONE_DEVICE)
    for folder, content in (
        ("broken-1.0.dist-info", b"[octavo.hooks\xff"),
        ("nameless-2.0.dist-info", b"[octavo.hooks]\nx = x:y\n"),
    ):
        (local_plugins.site / folder).mkdir()
        (local_plugins.site / folder / "entry_points.txt").write_bytes(content)
    registry = local_plugins.registry()
    assert registry.find("platform", "acme").state == "found"
    (nameless,) = [entry for entry in registry.entries if entry.name == "x"]
    assert (nameless.distribution, nameless.version) == ("nameless", "2.0")
    assert "broken-1.0.dist-info can't be read and is left out" in caplog.text


class TestManifestsAreFound:
    def test_beside_the_module_before_the_packages_above(self, local_plugins: Any) -> None:
        folder = local_plugins.add("acme", manifest="top", files={"deep/__init__.py": "", "deep/octavo-plugin.toml": "near"})
        assert find_manifest("acme.deep.platform") == folder / "deep" / "octavo-plugin.toml"
        assert find_manifest("acme.other.platform") == folder / "octavo-plugin.toml"

    def test_not_above_the_top_level_package(self, local_plugins: Any) -> None:
        local_plugins.add("acme", manifest=None)
        (local_plugins.site / "octavo-plugin.toml").write_text("not acme's")
        assert find_manifest("acme.platform") is None

    def test_through_symbolic_links_as_they_stand(self, local_plugins: Any, tmp_path: Path) -> None:
        real = tmp_path / "elsewhere" / "code"
        real.mkdir(parents=True)
        (real / "octavo-plugin.toml").write_text("x")
        (local_plugins.add("acme", manifest=None) / "linked").symlink_to(real)
        assert find_manifest("acme.linked.platform") == local_plugins.site / "acme" / "linked" / "octavo-plugin.toml"

    def test_in_namespace_packages(self, local_plugins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for root, part in ((local_plugins.site, "one"), (tmp_path / "second", "two")):
            (root / "vendor" / part).mkdir(parents=True)
            (root / "vendor" / part / "octavo-plugin.toml").write_text(part)
        monkeypatch.syspath_prepend(str(tmp_path / "second"))
        for part in ("one", "two"):
            found = find_manifest(f"vendor.{part}.platform")
            assert found is not None
            assert found.read_text() == part

    def test_where_an_editable_install_maps_a_subpackage_elsewhere(
        self, local_plugins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from importlib.machinery import ModuleSpec

        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "octavo-plugin.toml").write_text("mapped")
        local_plugins.add("vendor", manifest=None)

        class Finder:
            @staticmethod
            def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
                if name != "vendor.npu":
                    return None
                spec = ModuleSpec(name, None, is_package=True)
                spec.submodule_search_locations = [str(tmp_path / "src")]
                return spec

        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
        assert find_manifest("vendor.npu.platform") == tmp_path / "src" / "octavo-plugin.toml"


class TestLoading:
    def test_a_module_that_raises_gives_its_root_cause(self, local_plugins: Any) -> None:
        body = """
        try:
            raise OSError("libacme.so.2: cannot open shared object file")
        except OSError as error:
            raise ImportError("acme is broken") from error
        """
        add_platform(local_plugins, "acme", files={"platform.py": body})
        registry = local_plugins.registry()
        with pytest.raises(PluginUnavailable, match=r"acme-octavo 1.0\) is failed-to-load: OSError: libacme.so.2: cannot open"):
            registry.load("platform", "acme")
        entry = registry.find("platform", "acme")
        assert entry.state == "failed-to-load"
        assert "ImportError: acme is broken" in (entry.traceback or "")
        with pytest.raises(PluginUnavailable, match="OSError: libacme"):
            registry.load("platform", "acme")

    def test_a_class_of_another_kind_is_refused(self, local_plugins: Any) -> None:
        add_platform(local_plugins, "acme", files={"platform.py": "class Platform: pass"})
        with pytest.raises(PluginUnavailable, match=r"must be a class that derives from octavo.api's Platform"):
            local_plugins.registry().load("platform", "acme")

    def test_forgotten_methods_are_named(self, local_plugins: Any) -> None:
        body = """
        from octavo.api import platform as api
        class Platform(api.Platform):
            def bind(self, index): pass
        """
        add_platform(local_plugins, "acme", files={"platform.py": body})
        with pytest.raises(PluginUnavailable, match=r"lacks required methods of Platform: devices, empty_cache, from_host"):
            local_plugins.registry().load("platform", "acme")

    def test_a_module_that_loads_itself_is_told_so(self, local_plugins: Any) -> None:
        body = """
        from octavo.core.discovery import installed
        installed().load("platform", "acme")
        """
        add_platform(local_plugins, "acme", files={"platform.py": body})
        from octavo.core.discovery import installed

        with pytest.raises(PluginUnavailable, match="asks for itself while it is being imported"):
            installed().load("platform", "acme")

    def test_one_class_under_two_names_keeps_them_apart(self, local_plugins: Any) -> None:
        body = """
        from octavo.backends.cpu.platform import CpuPlatform
        class Platform(CpuPlatform): pass
        """
        text = manifest("one") + "[platform.two]\ndevice_type = 'two'\n"
        points = {"octavo.platforms": {"one": "pair.platform:Platform", "two": "pair.platform:Platform"}}
        add_platform(local_plugins, "one", distribution="pair", files={"platform.py": body}, text=text, entry_points=points)
        registry = local_plugins.registry()
        assert [registry.platform(name).name for name in ("one", "two", "one")] == ["one", "two", "one"]
        assert registry.platform("one") is registry.platform("one")
