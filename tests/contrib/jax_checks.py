"""Run by ``test_jax_reference.py`` with the interpreter of ``.venv-jax``: prints {check: what is wrong, or ""} as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from octavo.api.attention import AttentionBackend
from octavo.api.platform import Platform
from octavo.conformance.cases import Case, RowLengths, make_case
from octavo.conformance.declared import declared_cases
from octavo.conformance.driver import compare, run_backend, same_bits, same_stored
from octavo.core.discovery import installed
from octavo.core.layers.context import LayerCache, StepContext

# Each case compiles for seconds, so sizes that differ in a number only are left to backends that don't compile.
LEFT_OUT = (
    "head_",
    "block_",
    "long",
    "gqa_2-f",
    "gqa_prefill",
    "window_full",
    "window_needle-",
    "sinks_gqa",
    "alibi_gqa",
    "mla_p",
    "window_oldest",
    "window_16",
    "needle_future-",
)
EVERY_DTYPE = ("decode", "kv_fp8_e4m3")


def main() -> None:
    registry = installed()
    backend: type[AttentionBackend] = registry.load("attention", "jax-reference")
    platform: Platform = registry.load("platform", "jax-cpu")()
    platform.bind(0)
    entries = [registry.find("attention", "jax-reference"), registry.find("platform", "jax-cpu")]
    problems = {"declared": "" if chosen_cases(backend) else "no case was drawn"}
    problems["loaded"] = "; ".join(entry.warning for entry in entries if entry.warning)
    for case in chosen_cases(backend):
        problems[case.name] = what_is_wrong(backend, platform, case)
    checks: list[Callable[[type[AttentionBackend], Platform], str]] = [functional_cache, rebound_by_core, carried_whole]
    problems |= {check.__name__: check(backend, platform) for check in checks}
    json.dump(problems, sys.stdout)


def chosen_cases(backend: type[AttentionBackend]) -> list[Case]:
    return [
        case
        for case in declared_cases(backend.manifest, seed=11)
        if not case.name.startswith(LEFT_OUT) and (case.spec.dtype == "float32" or case.name.startswith(EVERY_DTYPE))
    ]


def what_is_wrong(backend: type[AttentionBackend], platform: Platform, case: Case) -> str:
    run = run_backend(backend, platform, case, lse=True)
    problems = [str(deviation) for deviation in compare(run, case) if not deviation]
    problems += [] if run.inputs_kept else ["q, k or v was changed"]
    problems += [name for name, blocks in case.blocks_after().items() if not same_stored(run.blocks[name][1:], blocks[1:])]
    return "; ".join(problems)


def functional_cache(backend: type[AttentionBackend], platform: Platform) -> str:
    """A write leaves the cache that it was given as it was, and everything computed is JAX's."""
    case = chosen_cases(backend)[0]
    instance = backend(case.group(), platform)
    ids = np.arange(case.num_blocks, dtype=np.int32)
    (empty,) = instance.allocate_kv(case.num_blocks)
    kv = instance.write_blocks(empty, ids, case.cache_blocks())
    q, k, v = (platform.from_host(tensor) for tensor in case.step_tensors() if tensor is not None)
    out = platform.from_host(case.step_tensors()[0])
    result = instance.forward(q, k, v, kv, instance.plan(case.batch(platform)), case.device_params(platform), out)
    if not all(isinstance(array, jax.Array) for array in (q, result.out, *kv.values(), *result.kv.values())):
        return "an array isn't JAX's"
    before = instance.read_blocks(kv, ids)
    if not all(same_stored(before[name], blocks) for name, blocks in case.cache_blocks().items()):
        return "the cache that was handed in has changed"
    after = instance.read_blocks(result.kv, ids)
    return "" if not same_stored(after["k"], before["k"]) else "the new cache holds nothing new"


def rebound_by_core(backend: type[AttentionBackend], platform: Platform) -> str:
    """Two steps of one request through core's `StepContext`: the second sees what the first wrote."""
    spec = chosen_cases(backend)[0].spec
    both = make_case("both", spec, [RowLengths(query_len=1, context_len=20)], seed=4)
    (request,) = both.inputs
    first_input = replace(request, q=request.k[:20], k=request.k[:20], v=None if request.v is None else request.v[:20])
    prefill = replace(both, inputs=(replace(first_input, num_computed_tokens=0),))
    instance = backend(both.group(), platform)
    (kv,) = instance.allocate_kv(both.num_blocks)
    cache = LayerCache(backend=instance, params=both.device_params(platform), kv=kv)
    out = None
    for case in (prefill, both):
        cache.plan = instance.plan(case.batch(platform))
        step = StepContext(ops=None, positions=cache.plan.positions, layers=[cache])  # type: ignore[arg-type]
        q, k, v = (platform.from_host(tensor) for tensor in case.step_tensors() if tensor is not None)
        out = step.attend(0, q, k, v, q)
    got = platform.to_host(out)
    error = np.abs(got.double().numpy() - both.expected.out).max()
    return "" if error < 1e-5 else f"off by {error}"


def carried_whole(backend: type[AttentionBackend], platform: Platform) -> str:
    """Every dtype comes back from the device with the bits it went with."""
    import torch

    pattern = torch.arange(256, dtype=torch.uint8).repeat(8)
    dtypes = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float16, torch.float32]
    dtypes += [torch.int32, torch.int64, torch.uint8]
    changed = [
        dtype
        for dtype in dtypes
        if not same_bits(platform.to_host(platform.from_host(pattern.view(dtype))), pattern.view(dtype))
    ]
    return ", ".join(map(str, changed))


if __name__ == "__main__":
    main()
