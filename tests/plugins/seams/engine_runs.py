"""Runs small models with plugins of every kind, in one process, and prints what happened as JSON.

``python engine_runs.py LLAMA TINYTEST CHUNKED SCRATCH``: folders of models, and one for a module. Nothing is asserted here.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patch_watch import PatchWatch

PACKAGES = (
    "seam_device", "seam_attention", "seam_ops", "seam_model", "seam_executor", "seam_policy", "seam_chunks", "seam_command",
    "seam_hook", "seam_worker", "bad_plugin",
)  # fmt: skip
PROMPTS = [[7, 3, 11, 5, 60, 2, 9], [1, 2], [33, 21, 4, 4, 8, 15, 16, 23, 42, 17, 19, 20, 3, 1, 5, 9, 2, 6, 5, 35, 8]]
MAX_TOKENS = [9, 12, 3]
SHARED = list(range(1, 41))  # five blocks of 8, two chunks of 16 and a half


def run(model: str, look: Callable[[Any], dict[str, Any]] | None = None, **options: Any) -> dict[str, Any]:
    """Greedy tokens of `PROMPTS`, what ran them, and what ``look`` sees of the engine afterwards."""
    from octavo import LLM, SamplingParams
    from octavo.core.api.executor import WorkerMethod

    with LLM(model, dtype="float32", block_size=16, **{"kv_cache_memory_bytes": "1M", **options}) as llm:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in MAX_TOKENS]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        (runs,) = llm.front.core.call(WorkerMethod.ATTENTION_RUNS)
        finished = {output.request_id: output.metrics.finished_s for output in outputs}
        return {
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "finished_in_order": [int(name) for name in sorted(finished, key=finished.__getitem__)],
            "platform": llm.config.plugins.platform,
            "attention": sorted(set(runs.values())),
            "ops": dict(llm.config.plugins.op),
            "kv": [(type(group.spec).__name__, group.manager, group.num_blocks) for group in llm.front.core.info.kv],
            **(look(llm) if look else {}),
        }


def device(llama: str) -> dict[str, Any]:
    from octavo.core.discovery import installed

    ran = run(llama, platform="seam-device", device=1, kv_cache_memory_bytes=None)
    return {**ran, "bound": installed().platform("seam-device").bound}


def ops(llama: str, **options: Any) -> dict[str, Any]:
    from seam_ops.ops import CALLS

    CALLS.clear()
    return {**run(llama, **options), "calls": dict(CALLS)}


def hook(llama: str) -> dict[str, Any]:
    ran = run(llama, lambda llm: {"metrics": dict(llm.front.core.metrics())}, plugin=("seam-hook",))
    from seam_hook.hook import StepMetrics

    return {**ran, "seen": StepMetrics.seen}


def worker(llama: str) -> dict[str, Any]:
    from octavo.core.api.executor import WorkerMethod

    def look(llm: Any) -> dict[str, Any]:
        (payload,) = llm.front.core.call(WorkerMethod.EXTENSION, name="tokens", payload=b"")
        return {"step_tokens": json.loads(payload)}

    return run(llama, look, platform="seam-worker")


def executor(llama: str) -> dict[str, Any]:
    processes = []

    def look(llm: Any) -> dict[str, Any]:
        processes.append(llm.front.core._executor.process)
        return {"same_process": processes[0].pid == os.getpid()}

    ran = run(llama, look, executor="seam-pipe")
    return {**ran, "code_after_close": processes[0].poll()}


def executor_death(llama: str) -> dict[str, Any]:
    from octavo import LLM, SamplingParams

    llm = LLM(llama, dtype="float32", executor="seam-pipe", kv_cache_memory_bytes="1M")
    process = llm.front.core._executor.process
    outputs = llm.stream({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(outputs)
    os.kill(process.pid, signal.SIGKILL)
    died = {"code": None}
    try:
        for _ in outputs:
            pass
    except Exception as error:  # noqa: BLE001 - whatever it is, the test says what it should be
        died = {"error": type(error).__name__, "message": str(error), "code": process.poll()}
    llm.close()
    return died


def chunked(folder: str) -> dict[str, Any]:
    """Prefixes that are shared, a request of 100 tokens in 7 blocks of 8, and two completions of one prompt."""
    from octavo import LLM, SamplingParams

    asked = [(SHARED, 4), ([*SHARED, 50], 8), ([*SHARED[:30], 9, 9], 8), (SHARED[::-1], 60)]
    with LLM(folder, dtype="float32", block_size=8, num_blocks=8, max_num_batched_tokens=16) as llm:
        alone = [
            llm.generate(
                {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False
            )[0]
            for prompt, count in asked
        ]
        several = llm.generate(
            {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, n=2, max_tokens=20, ignore_eos=True), use_tqdm=False
        )[0]
        core = llm.front.core
        return {
            "asked": asked,
            "tokens": [output.outputs[0].token_ids for output in alone],
            "forked": [completion.token_ids for completion in several.outputs],
            "cached": [output.num_cached_tokens for output in alone],
            "kv": [(type(group.spec).__name__, group.manager, group.num_blocks) for group in core.info.kv],
            "usage_at_the_end": core.stats().kv_usage,
        }


def crowded(folder: str) -> dict[str, Any]:
    """Twice the same 12 requests with common beginnings, in fewer blocks than four of them want."""
    from octavo import LLM, SamplingParams

    draw = random.Random(5)
    stems = [[draw.randrange(63) for _ in range(32)] for _ in range(3)]
    prompts = [[*draw.choice(stems)[: draw.randrange(1, 33)], draw.randrange(63)] for _ in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=draw.randrange(4, 32), ignore_eos=True) for _ in prompts]
    with LLM(folder, dtype="float32", block_size=4, num_blocks=12, max_num_batched_tokens=20, max_num_seqs=4) as llm:
        rounds = [llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False) for _ in range(2)]
        stats = llm.front.core.stats()
        return {
            "prompts": prompts,
            "max_tokens": [one.max_tokens for one in params],
            "rounds": [[output.outputs[0].token_ids for output in outputs] for outputs in rounds],
            "preemptions": stats.preemptions_total,
            "prefix_hits": stats.prefix_hits_total,
            "usage_at_the_end": stats.kv_usage,
        }


def caught(watch: PatchWatch, folder: str) -> list[str]:
    """What the watch says of a module that patches; for this process it is the end."""
    Path(folder, "bad_plugin.py").write_text(
        "from octavo.core.config import suggest\nfrom octavo.core.scheduling.scheduler import Scheduler\n"
        "import octavo.core.layers.ops as ops\n"
        "suggest.nearest = lambda name, known: ''\nScheduler.schedule = lambda self: None\n"
        "class Ops(ops.Ops): pass\nops.Ops = Ops\n"
    )
    sys.path.insert(0, folder)
    importlib.import_module("bad_plugin")
    return watch.by_plugin["bad_plugin"]


def main(llama: str, tinytest: str, chunked_model: str, scratch: str) -> None:
    watch = PatchWatch(PACKAGES)
    results = {
        "cpu": run(llama, platform="cpu"),
        "device": device(llama),
        "packed": run(llama, platform="cpu", attention_backend="seam-packed"),
        "named_ops": ops(
            llama,
            op={"rms_norm": "seam-norm", "add_rms_norm": "seam-norm", "mlp_block": "seam-mlp", "linear": "seam-linear"},
        ),
        "plugin_ops": ops(llama, plugin=("seam-norm",)),
        "policy": run(llama, scheduling_policy="seam-shortest", max_num_seqs=1),
        "hook": hook(llama),
        "worker": worker(llama),
        "executor": executor(llama),
        "executor_death": executor_death(llama),
        "tinytest": run(tinytest),
        "chunked": chunked(chunked_model),
        "crowded": crowded(chunked_model),
    }
    results["changed"] = watch.changed()
    results["changed_by_plugin"] = dict(watch.by_plugin)
    results["watched"] = len(watch.before)
    results["caught"] = caught(watch, scratch)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
