"""What ``octavo explain`` and ``octavo doctor`` print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.cli.main import main
from octavo.core.discovery import diagnosis

ACME = """
[plugin]
name = "acme"
api = "1.0"
[platform.acme]
device_type = "acme"
archs = ["acme1", "acme2"]
probe = "acme_octavo.probe:probe"
auto = false
attention = ["acme-attention"]
[attention.acme-attention]
platforms = ["acme"]
dtypes = ["bfloat16"]
kv_dtypes = ["bfloat16"]
head_sizes = [64]
block_sizes = [32]
features = ["causal", "gqa", "mixed_batch"]
[[attention.acme-attention.except]]
when = { features = ["gqa"], arch = "<acme2" }
reason = "too old for grouped heads"
[[attention.acme-attention.withheld]]
when = { kv_dtypes = ["bfloat16"] }
reason = "slow"
[ops.acme-ops]
implements = ["rms_norm"]
platforms = ["cpu"]
"""
PROBE = """
from octavo.api.manifest import ProbedDevice, ProbeResult

def probe():
    device = ProbedDevice(index=0, name="Acme One", arch="acme1", total_bytes=2**33, properties={"driver": "1.2"})
    return ProbeResult(devices=[device])
"""
OPS = """
def ops(platform):
    from octavo.core.layers.ops import Ops
    return {"rms_norm": Ops(platform=platform).rms_norm}
"""


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrapped."""
    monkeypatch.setenv("COLUMNS", "500")


@pytest.fixture
def acme(local_plugins: Any) -> Any:
    points = {
        "octavo.platforms": {"acme": "acme_octavo.platform:Platform"},
        "octavo.attention_backends": {"acme-attention": "acme_octavo.attention:Attention"},
        "octavo.ops": {"acme-ops": "acme_octavo.ops:ops"},
    }
    files = {"probe.py": PROBE, "platform.py": "raise OSError('password=hunter2 at https://me:secret@host/x')", "ops.py": OPS}
    local_plugins.add("acme-octavo", manifest=ACME, files=files, entry_points=points)
    return local_plugins


def test_explain_says_what_would_run_and_why(acme: Any, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tiny_llama), "--ops", "--op", "rms_norm=acme-ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model       LlamaForCausalLM, 2 layers, context 128"
    assert "attention   full_attention: reference (2 layers, 4 heads, 2 KV heads of 8)" in lines
    text = "\n".join(lines)
    assert "block size  16: the preferred size; reference allows multiples of 1" in text
    assert "used only when named" in text
    assert any(line.split()[:2] == ["rms_norm", "acme-ops"] and "named by --op" in line for line in lines)
    assert any(line.split()[:2] == ["rotary", "default"] for line in lines)


def test_explain_counts_ops_plugins_that_are_not_used(acme: Any, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tiny_llama), "--ops"]) == 0
    assert "acme-ops" in capsys.readouterr().out
    assert main(["explain", str(tiny_llama), "--ops", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["chosen"]) == {"platform", "attention", "block_size", "ops"}
    assert document["chosen"]["ops"]["rms_norm"] == "default"
    assert {"name": "acme-ops", "kind": "ops", "ok": True, "reasons": []} in document["candidates"]


def test_a_refusal_prints_its_report_all_the_same(acme: Any, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tiny_llama), "--block-size", "24", "--attention-backend", "acme-attention", "--json"]) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["chosen"] is None
    fields = {candidate["name"]: [reason["field"] for reason in candidate["reasons"]] for candidate in document["candidates"]}
    assert fields["acme-attention"] == ["platform"]
    assert fields["cpu"] == []
    assert "this would work: --attention-backend reference" in err
    assert main(["explain", str(tiny_llama), "--attention-backend", "acme-attention"]) == 3
    assert "platform: wanted cpu, supports acme" in capsys.readouterr().out


def test_a_platform_that_is_named_and_broken_is_listed_among_the_others(
    acme: Any, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tiny_llama), "--platform", "acme", "--json"]) == 3
    out, err = capsys.readouterr()
    candidates = {candidate["name"]: candidate for candidate in json.loads(out)["candidates"]}
    assert "failed-to-load: OSError" in candidates["acme"]["reasons"][0]["supported"]
    assert candidates["cpu"]["ok"]
    assert "platform 'acme' (acme-octavo 1.0) is failed-to-load: OSError" in err


def test_backends_verbose_says_what_rules_mean_here(acme: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "too old for grouped heads [applies on acme device 0 (acme1)]" in text
    assert "withheld  kv_dtypes bfloat16: slow" in text
    assert "implements  rms_norm" in text
    assert "archs  acme1 < acme2" in text


def test_doctor_finds_what_is_wrong_and_says_what_to_do(
    acme: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    acme.add("broken", manifest="[plugin]\nname = 'x'\nfoo = 1\nbar = 2\n", entry_points={"octavo.hooks": {"h": "broken:h"}})
    kills = {"it.py": "import os; os._exit(5)"}
    points = {"octavo.hooks": {"killer": "killer.it:Hook"}}
    acme.add("killer", manifest='[plugin]\nname = "k"\napi = "1.0"\n[hook.killer]\n', files=kills, entry_points=points)
    points = {"octavo.hooks": {"p": "picky:p"}}
    acme.add("picky", manifest='[plugin]\nname = "p"\napi = "1.0"\n', requires=["click<1"], entry_points=points)
    monkeypatch.setenv("OCTAVO_CACHEDIR", "/x")
    monkeypatch.setenv("MY_TOKEN", "abc123")
    assert main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    document = json.loads(text)
    assert set(document) == {"octavo", "environment", "packages", "torch", "devices", "plugins", "findings"}
    assert document["torch"]["imports"]
    assert {key: value for key, value in document["devices"][0].items() if key in ("platform", "name", "total_bytes")} == {
        "platform": "acme",
        "name": "Acme One",
        "total_bytes": 2**33,
    }
    states = {plugin["name"]: plugin["state"] for plugin in document["plugins"]}
    assert (states["cpu"], states["acme"], states["killer"], states["h"]) == (
        "available", "failed-to-load", "failed-to-load", "incompatible",
    )  # fmt: skip
    problems = "\n".join(f"{finding['subject']}: {finding['problem']}" for finding in document["findings"])
    assert "plugin.foo: unknown key" in problems
    assert "plugin.bar: unknown key" in problems
    assert "hook killer (killer 1.0): failed-to-load: killed the process (5)" in problems
    assert "needs click<1, but click" in problems
    assert "OCTAVO_CACHEDIR is unknown and ignored" in problems
    assert all(finding["remedy"] for finding in document["findings"])
    for secret in ("hunter2", "secret", "abc123"):
        assert secret not in text
    assert "password=***" in text
    assert "https://***@host/x" in text


def test_doctor_s_page_names_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def found(_: Any) -> diagnosis.Diagnosis:
        return diagnosis.Diagnosis(
            octavo={"version": "1", "api": "1.0"},
            environment={
                "python": "3", "implementation": "C", "system": "S", "machine": "m", "cpus": 2,
                "prefix_hash": "sha256 compiled", "variables": {"OCTAVO_DEBUG": "1"},
            },
            packages={"torch": "2.8", "gguf": None},
            torch={"version": "2.8", "imports": False, "extensions": [{"name": "n", "distribution": "d", "version": "3"}]},
            devices=[
                {"platform": "p", "index": 0, "name": "dev", "arch": None, "total_bytes": 2**30, "properties": {"driver": 7}},
            ],
            plugins=[
                {"name": "p", "kind": "platform", "state": "failed-to-load", "distribution": "d", "version": "1", "reason": "r",
                 "warning": "", "traceback": "Traceback\n  line"},
            ],
            findings=[diagnosis.Finding(subject="it", problem="is broken", remedy="mend it")],
        )  # fmt: skip

    monkeypatch.setattr(diagnosis, "diagnose", found)
    assert main(["doctor", "--verbose"]) == 0
    text = capsys.readouterr().out
    for part in (
        "prefixes sha256 compiled",
        "CAN NOT BE IMPORTED",
        "loads n by itself (d 3)",
        "OCTAVO_DEBUG=1",
        "1.0 GiB",
        "driver 7",
        "failed-to-load",
    ):
        assert part in text
    assert "  | Traceback" in text
    assert text.endswith("1 finding\n  warning: it: is broken\n    → mend it\n")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("HF_TOKEN=abc rest", "HF_TOKEN=*** rest"),
        ('api_key: "k1"', 'api_key: "***"'),
        ("git+https://user:pw@host/x", "git+https://***@host/x"),
        ("tokenizer is missing", "tokenizer is missing"),
        (f"{Path.home()}/models", "~/models"),
    ],
)
def test_secrets_are_masked(text: str, masked: str) -> None:
    assert diagnosis._masked({"a": [text]}) == {"a": [masked]}


def test_torch_that_can_not_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.core.discovery.torch_extensions import TorchExtension

    broken = "Failed to load the backend extension: torch_acme. You can disable extension auto-loading with X=0. (OSError: y)"
    cases: list[tuple[str, tuple[TorchExtension, ...], str]] = [
        (
            broken,
            (TorchExtension("torch_acme", "torch-acme", "1"), TorchExtension("fine", "f", "1")),
            "torch_acme (torch-acme 1)",
        ),
        ("libtorch.so: not found", (), "torch"),
    ]
    for error, extensions, subject in cases:
        monkeypatch.setattr(diagnosis, "_import_torch", lambda error=error: error)
        monkeypatch.setattr(diagnosis, "torch_extensions", lambda extensions=extensions: extensions)
        about, (finding,) = diagnosis._torch()
        assert (about["imports"], finding.subject, finding.severity) == (False, subject, "error")
    monkeypatch.setattr(diagnosis, "installed_version", lambda name: None)
    _, (finding,) = diagnosis._torch()
    assert finding.problem == "torch isn't installed"
