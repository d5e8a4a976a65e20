"""Every seam is used by a distribution of its own, installed as a vendor's would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent


def test_each_is_found_under_its_name_and_kind(site: Any) -> None:
    listed = {plugin["name"]: plugin for plugin in json.loads(site.octavo("backends", "--json").stdout)["plugins"]}
    kinds = {
        "seam-device": "platform",
        "seam-worker": "platform",
        "seam-functional": "attention",
        "seam-packed": "attention",
        "seam-chunked": "attention",
        "seam-norm": "ops",
        "seam-mlp": "ops",
        "seam-linear": "ops",
        "tinytest": "model",
        "seam-pipe": "executor",
        "seam-shortest": "scheduling_policy",
        "seam-chunks": "kv_manager",
        "seam-shapes": "command",
        "seam-steps": "hook",
    }
    assert {name: listed[name]["kind"] for name in kinds} == kinds
    assert {listed[name]["state"] for name in kinds} == {"found", "available"}


def test_a_platform_and_its_attention_backend(results: dict[str, Any]) -> None:
    ran = results["device"]
    assert (ran["platform"], ran["attention"]) == ("seam-device", ["seam-functional"])
    assert ran["bound"] == 1, "the engine bound another device than the one that was asked for"
    assert ran["tokens"] == results["cpu"]["tokens"]
    assert results["cpu"]["attention"] == ["reference"], "auto = false keeps a plugin out of what others run"


def test_an_attention_backend_for_somebody_elses_platform(results: dict[str, Any]) -> None:
    ran = results["packed"]
    assert (ran["platform"], ran["attention"]) == ("cpu", ["seam-packed"])
    assert ran["tokens"] == results["cpu"]["tokens"]


def test_atoms_a_composite_and_a_linear_layer_by_name(results: dict[str, Any]) -> None:
    ran = results["named_ops"]
    assert ran["tokens"] == results["cpu"]["tokens"]
    chosen = {op: name for op, name in ran["ops"].items() if name != "default"}
    assert chosen == {"rms_norm": "seam-norm", "add_rms_norm": "seam-norm", "mlp_block": "seam-mlp", "linear": "seam-linear"}
    assert ran["calls"]["prepare"] == 2 * 4 + 1, "qkv, o, gate/up and down of each layer, and the head"
    assert min(ran["calls"][name] for name in ("rms_norm", "add_rms_norm", "mlp_block", "apply")) > 0


def test_an_atom_of_a_plugin_that_is_turned_on(results: dict[str, Any]) -> None:
    ran = results["plugin_ops"]
    assert ran["ops"]["rms_norm"] == "seam-norm"
    assert set(ran["calls"]) == {"rms_norm", "add_rms_norm"}
    assert ran["tokens"] == results["cpu"]["tokens"]


def test_a_scheduling_policy_orders_who_comes_first(results: dict[str, Any]) -> None:
    assert results["policy"]["finished_in_order"] == [2, 0, 1], "3, 9 and 12 tokens to go"
    assert results["policy"]["tokens"] == results["cpu"]["tokens"]


def test_a_hook_brings_metrics_and_sees_the_engines_life(results: dict[str, Any]) -> None:
    ran = results["hook"]
    assert ran["metrics"]["seam-steps/steps"] == ran["metrics"]["steps_total"]
    assert 1 <= ran["metrics"]["seam-steps/most_running"] <= 3
    assert ran["metrics"]["seam-steps/step_seconds"] > 0
    assert ran["seen"] == ["configure cpu", "started ['reference']", "stopped"]
    assert ran["tokens"] == results["cpu"]["tokens"]


def test_a_worker_of_the_platforms_own(results: dict[str, Any]) -> None:
    ran = results["worker"]
    assert ran["platform"] == "seam-worker"
    assert ran["tokens"] == results["cpu"]["tokens"]
    prompts, decoded = 7 + 2 + 21, (9 - 1) + (12 - 1) + (3 - 1)
    assert sum(ran["step_tokens"]) == prompts + decoded, "the worker saw every token once"


def test_an_executor_with_its_worker_in_another_process(results: dict[str, Any]) -> None:
    ran = results["executor"]
    assert ran["tokens"] == results["cpu"]["tokens"]
    assert ran["same_process"] is False
    assert ran["code_after_close"] == 0, "closing the engine ends the worker's process"


def test_a_killed_worker_is_a_typed_error(results: dict[str, Any]) -> None:
    died = results["executor_death"]
    assert died["error"] == "WorkerDied", died
    assert f"code -{int(signal.SIGKILL)}" in died["message"]
    assert died["code"] == -signal.SIGKILL, "the process was waited for: no zombie is left"


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks /proc about processes")
def test_a_killed_engine_leaves_no_orphan(site: Any, models: Any) -> None:
    program = (
        "import sys, time\nfrom octavo import LLM\n"
        f"llm = LLM({str(models.llama)!r}, dtype='float32', executor='seam-pipe', kv_cache_memory_bytes='1M')\n"
        "print(llm.front.core._executor.process.pid, flush=True)\ntime.sleep(120)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site.folder)}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        worker = int(engine.stdout.readline())
        assert _runs(worker)
        engine.kill()
    deadline = time.monotonic() + 30
    while _runs(worker):
        assert time.monotonic() < deadline, f"process {worker} outlives its engine"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_model_architecture(results: dict[str, Any], models: Any) -> None:
    runs = _engine_runs()
    expected = [
        continued(models.tinytest, prompt, count) for prompt, count in zip(runs["PROMPTS"], runs["MAX_TOKENS"], strict=True)
    ]
    assert results["tinytest"]["tokens"] == expected


def test_a_kv_manager_for_a_spec_that_octavo_doesnt_have(results: dict[str, Any], models: Any) -> None:
    ran = results["chunked"]
    assert ran["kv"] == [["CustomSpec", "seam-chunks", 8]]
    assert ran["tokens"] == [continued(models.chunked, prompt, count, chunk=16) for prompt, count in ran["asked"]]
    assert sum(map(len, (ran["asked"][3][0], ran["tokens"][3]))) == 100, "13 blocks' worth of tokens went through 7"
    assert ran["forked"] == [continued(models.chunked, [5, 6, 7], 20, chunk=16)] * 2
    assert ran["usage_at_the_end"] == 0, "every block came back"


def test_its_prefix_hits_need_only_the_chunk_that_is_seen(results: dict[str, Any]) -> None:
    assert results["chunked"]["cached"] == [0, 40, 24, 0]


def test_its_tables_stay_right_when_blocks_are_few_and_prefixes_shared(results: dict[str, Any], models: Any) -> None:
    ran = results["crowded"]
    requests = zip(ran["prompts"], ran["max_tokens"], strict=True)
    expected = [continued(models.chunked, prompt, count, chunk=16) for prompt, count in requests]
    assert len({tuple(tokens) for tokens in expected}) > 8, "answers that differ, so that a wrong table shows"
    assert ran["rounds"] == [expected, expected]
    assert ran["preemptions"] > 0
    assert ran["prefix_hits"] > 0
    assert ran["usage_at_the_end"] == 0


def test_a_command(site: Any) -> None:
    assert "say which head sizes" in site.octavo("--help").stdout
    assert site.octavo("seam-shapes", "--only", "seam-packed").stdout == "seam-packed: {8, 64}\n"
    refused = site.octavo("seam-shapes", "--only", "nothing", check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def _engine_runs() -> dict[str, Any]:
    """The constants of the program that ran."""
    constants: dict[str, Any] = {}
    for line in (HERE / "engine_runs.py").read_text().splitlines():
        if line.startswith(("PROMPTS =", "MAX_TOKENS =")):
            exec(line, constants)
    return constants


def continued(folder: Path, prompt: list[int], count: int, *, chunk: int | None = None) -> list[int]:
    """Greedy tokens of a TinyTest model, the whole sequence computed again for each, in float64, straight from the formulas."""
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    known = list(prompt)
    for _ in range(count):
        x = weights["model.embed_tokens.weight"][known]
        for layer in range(2):
            x = x + _layer(x, {name.split(".", 3)[3]: w for name, w in weights.items() if f"layers.{layer}." in name}, chunk)
        x = _normed(x[-1], weights["model.norm.weight"])
        known.append(int((weights["lm_head.weight"] @ x).argmax()))
    return known[len(prompt) :]


def _layer(x: torch.Tensor, w: dict[str, torch.Tensor], chunk: int | None) -> torch.Tensor:
    hidden, length = _normed(x, w["input_layernorm.weight"]), len(x)
    q, k, v = ((hidden @ w[f"self_attn.{name}_proj.weight"].T).view(length, -1, 8).transpose(0, 1) for name in ("q", "k", "v"))
    at = torch.arange(length)
    seen = at[:, None] >= at
    if chunk is not None:
        seen &= at[:, None] // chunk == at // chunk
    heads = [(q[head] @ k[head // 2].T / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v[head // 2] for head in range(4)]
    gated = torch.nn.functional.silu(hidden @ w["mlp.gate_proj.weight"].T) * (hidden @ w["mlp.up_proj.weight"].T)
    return torch.cat(heads, dim=-1) @ w["self_attn.o_proj.weight"].T + gated @ w["mlp.down_proj.weight"].T


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
