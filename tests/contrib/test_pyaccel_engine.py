"""The whole engine on a device that isn't a CPU: same tokens, nothing on device 0, no read that wasn't planned."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyaccel
import pytest
import torch
from pyaccel import Counters
from small_models import NAMES, NUM_LAYERS, VOCAB_SIZE, save_small_model

from octavo import LLM, SamplingParams
from octavo.core.api.errors import OctavoError, OutOfMemory, UsageError
from octavo.core.api.executor import WorkerMethod
from octavo.core.loading.catalogue import find
from octavo.core.worker.memory import logits_bytes
from octavo.core.worker.sampler import Sampler

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "max_model_len": 256}


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a small random model, once, in a folder."""
    made: dict[str, Path] = {}

    def make(name: str = "llama") -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_small_model(name, made[name])
        return made[name]

    return make


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    settings = pyaccel.install()
    torch.pyaccel.set_device(0)
    yield
    pyaccel.install(memory_bytes=settings.memory_bytes)
    torch.pyaccel.set_device(0)


def prompts(*lengths: int) -> list[dict[str, Any]]:
    """Token prompts, each unlike the others."""
    return [{"prompt_token_ids": [(31 * n + 7 * i * i) % 256 for i in range(n)]} for n in lengths]


def generate(model: Path, platform: str, given: Sequence[Any], params: Any, **options: Any) -> list[Any]:
    """What the engine makes of ``given``, as plain data; on pyaccel strictly, on device 1, with nothing on device 0."""
    if platform == "cpu":
        with LLM(str(model), platform="cpu", **{**OPTIONS, **options}) as llm:
            return _plain(llm.generate(given, params), approximate=True)
    held = torch.pyaccel.memory_allocated(0), torch.pyaccel.memory_allocated(1)
    torch.pyaccel.reset_peak_memory_stats(0)
    with pyaccel.strict(copies=True), LLM(str(model), platform="pyaccel", device=1, **{**OPTIONS, **options}) as llm:
        outputs = _plain(llm.generate(given, params))
        assert torch.pyaccel.memory_allocated(1) > held[1]
    assert torch.pyaccel.max_memory_allocated(0) == held[0]
    assert torch.pyaccel.memory_allocated(1) == held[1]  # a closed engine leaves nothing behind
    return outputs


def _plain(outputs: Sequence[Any], *, approximate: bool = False) -> list[Any]:
    return [
        [(one.token_ids, one.finish_reason, _logprobs(one.logprobs, approximate)) for one in output.outputs]
        + [_logprobs(output.prompt_logprobs, approximate)]
        for output in outputs
    ]


def _logprobs(found: Any, approximate: bool) -> list[dict[int, Any] | None] | None:
    if found is None:
        return None
    number = (lambda value: pytest.approx(value, abs=1e-4)) if approximate else float
    return [at and {token: number(entry.logprob) for token, entry in at.items()} for at in found]


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CASES: dict[str, tuple[list[Any], Any, dict[str, Any]]] = {
    "greedy": (prompts(1, 5, 17, 40), GREEDY, {}),
    "sampled": (
        prompts(3, 9, 20, 4, 11),
        [
            SamplingParams(temperature=1, seed=1, max_tokens=20),
            SamplingParams(temperature=0.7, top_k=12, seed=2, max_tokens=20),
            SamplingParams(temperature=1.3, top_p=0.8, seed=3, max_tokens=20),
            SamplingParams(temperature=1, min_p=0.1, top_k=30, top_p=0.9, seed=4, max_tokens=20),
            GREEDY,
        ],
        {},
    ),
    "unseeded": (prompts(3, 9), SamplingParams(temperature=1, max_tokens=20), {"seed": 5}),
    "penalties": (
        prompts(8, 30),
        [
            SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=20),
            SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5, max_tokens=20),
        ],
        {},
    ),
    "logit bias": (prompts(8), SamplingParams(temperature=0, logit_bias={65: 5.0, 66: -100.0}, max_tokens=12), {}),
    "log probabilities": (prompts(6, 19), SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, max_tokens=8), {}),
    "several completions": (prompts(12), SamplingParams(n=3, temperature=1, seed=9, max_tokens=12), {}),
    "stop tokens": (
        prompts(7),
        SamplingParams(temperature=0, stop_token_ids=list(range(0, 256, 4)), min_tokens=3, max_tokens=40),
        {},
    ),
    "chunked prefill": (prompts(90, 7, 130), GREEDY, {"max_num_batched_tokens": 32, "max_num_seqs": 8}),
    "shared prefixes": (prompts(64, 64, 64), GREEDY, {"max_num_seqs": 1}),
    "preemption": (prompts(30, 40, 50, 60), GREEDY, {"num_blocks": 14, "max_model_len": 128}),
    "no asynchronous scheduling": (prompts(5, 17), GREEDY, {"async_scheduling": False}),
    "speculation": ([{"prompt_token_ids": [65, 66, 67, 68] * 8}], GREEDY, {"speculative": "ngram"}),
    "block size": (prompts(5, 37), GREEDY, {"block_size": 8}),
    "bfloat16": (prompts(5, 17), GREEDY, {"dtype": "bfloat16"}),
    "float16": (prompts(5, 17), GREEDY, {"dtype": "float16"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_llama_generates_the_cpus_tokens(random_model: Callable[..., Path], case: str) -> None:
    given, params, options = CASES[case]
    want = generate(random_model(), "cpu", given, params, **options)
    got = generate(random_model(), "pyaccel", given, params, **options)
    assert got == want


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda values: values.flatten()[0].item(),
    "tolist": lambda values: values.flatten()[:2].tolist(),
    "truth": lambda values: bool(values.isnan().any()),
    "mask": lambda values: values[values > 0],
    "copy": lambda values: values.cpu(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_backend_that_reads_the_device_in_a_step_is_found(
    random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, read: Callable[[torch.Tensor], object]
) -> None:
    from octavo.plugins.attention.reference.backend import ReferenceAttention

    attend = ReferenceAttention.attend

    def attend_and_read(self: Any, q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        read(q)
        return attend(self, q, *arguments, **options)

    monkeypatch.setattr(ReferenceAttention, "attend", attend_and_read)
    with pytest.raises(OctavoError, match="strict mode forbids"):
        generate(random_model(), "pyaccel", prompts(5), GREEDY)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama"])
def test_other_architectures_generate_the_cpus_tokens(random_model: Callable[..., Path], name: str) -> None:
    model = random_model(name)
    want = generate(model, "cpu", prompts(5, 40), GREEDY)
    assert generate(model, "pyaccel", prompts(5, 40), GREEDY) == want


@pytest.mark.model
def test_smollm2_generates_the_cpus_tokens() -> None:
    path = find("smollm2").path
    if not path.is_file():
        pytest.skip("smollm2 isn't on this machine: octavo models pull smollm2")
    texts = ["The capital of France is", "def fibonacci(n):"]
    params = SamplingParams(temperature=0, max_tokens=12)
    want = generate(path, "cpu", texts, params, kv_cache_memory_bytes="64M")
    assert generate(path, "pyaccel", texts, params, kv_cache_memory_bytes="64M") == want


def decode_costs(model: Path, given: Sequence[Any], params: SamplingParams, **options: Any) -> Counters:
    """What 32 steady decode steps cost beyond what loading, prefill and the first tokens did."""
    counts = []
    with pyaccel.strict(copies=True), LLM(str(model), platform="pyaccel", device=1, **{**OPTIONS, **options}) as llm:
        for max_tokens in (16, 48):
            one = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=max_tokens, ignore_eos=True)
            llm.reset_prefix_cache()
            with pyaccel.count() as counted:
                llm.generate(given, one)
            counts.append(counted[0])
    return counts[1] - counts[0]


@pytest.mark.parametrize("num_requests", [1, 6])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1, seed=3)], ids=["greedy", "sampled"])
def test_steady_decode_step_copies_and_waits_no_more_than_it_must(
    random_model: Callable[..., Path], num_requests: int, asynchronous: bool, params: SamplingParams
) -> None:
    given = prompts(*range(10, 10 + num_requests))
    costs = decode_costs(random_model(), given, params, async_scheduling=asynchronous)
    assert costs.host_to_device <= 32 * 2  # the step's arrays, and the reference backend's plan
    assert costs.device_to_host == 32  # the sampled tokens
    assert costs.synchronisations == 32  # waiting for them
    assert costs.device_to_device == 0


def test_steps_cost_the_same_for_six_requests_as_for_one(random_model: Callable[..., Path]) -> None:
    one = decode_costs(random_model(), prompts(12), GREEDY)
    six = decode_costs(random_model(), prompts(12, 12, 12, 12, 12, 12), GREEDY)
    assert (six.host_to_device, six.device_to_host, six.synchronisations) == (
        one.host_to_device,
        one.device_to_host,
        one.synchronisations,
    )


def test_the_backend_that_ran_is_the_one_that_was_chosen(random_model: Callable[..., Path]) -> None:
    options = {**OPTIONS, "attention_backend": "reference"}
    with LLM(str(random_model()), platform="pyaccel", device=1, **options) as llm:
        llm.generate(prompts(5), SamplingParams(temperature=0, max_tokens=2))
        (runs,) = llm.front.core.call(WorkerMethod.ATTENTION_RUNS)
        assert runs == dict.fromkeys(range(NUM_LAYERS), "reference")
        assert llm.config.plugins.platform == "pyaccel"


def test_a_device_that_is_not_there_is_a_usage_error(random_model: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="device"):
        LLM(str(random_model()), platform="pyaccel", device=2, **OPTIONS)


@pytest.mark.parametrize(
    ("memory_bytes", "what"), [(200_000, "weights"), (4 << 20, "KV cache")], ids=["for the weights", "for the cache"]
)
def test_too_little_device_memory_is_a_typed_error(random_model: Callable[..., Path], memory_bytes: int, what: str) -> None:
    pyaccel.memory_limit(1, memory_bytes)
    with pytest.raises(OutOfMemory, match=what):
        LLM(str(random_model()), platform="pyaccel", device=1, **OPTIONS)


def test_memory_share_counts_the_devices_memory(random_model: Callable[..., Path]) -> None:
    pyaccel.memory_limit(1, 64 << 20)
    pyaccel.memory_limit(0, 1 << 20)
    with LLM(
        str(random_model()), platform="pyaccel", device=1, dtype="float32", max_num_seqs=4, max_num_batched_tokens=64
    ) as llm:
        llm.generate(prompts(5, 50), GREEDY)
        (memory,) = llm.front.core.call(WorkerMethod.KV_MEMORY)
        assert 8 << 20 < memory["kv_bytes"] < 64 << 20


@pytest.mark.parametrize("asked", [0, -1])
def test_log_probabilities_take_no_more_memory_than_is_set_aside_for_logits(
    random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    set_aside = logits_bytes(max_num_seqs=8, num_speculative_tokens=0, vocab_size=VOCAB_SIZE)
    taken: dict[str, list[int]] = {"sample": [], "prompt_logprobs": []}

    def measure(name: str, already: Callable[[Any], int]) -> None:
        method = getattr(Sampler, name)

        def measured(self: Any, logits: Any, *arguments: Any) -> Any:
            before = torch.pyaccel.memory_allocated(1) - already(logits)
            torch.pyaccel.reset_peak_memory_stats(1)
            outcome = method(self, logits, *arguments)
            taken[name].append(torch.pyaccel.max_memory_allocated(1) - before)
            return outcome

        monkeypatch.setattr(Sampler, name, measured)

    measure("sample", lambda logits: logits.nbytes)
    measure("prompt_logprobs", lambda logits: 0)
    params = SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=4, logprobs=asked, prompt_logprobs=asked)
    outputs = generate(random_model(), "pyaccel", prompts(*range(6, 14)), params, max_num_seqs=8)
    assert len(outputs) == 8
    assert len(outputs[0][-1][-1]) == (VOCAB_SIZE if asked else 1)
    assert max(taken["prompt_logprobs"]) > 0
    assert max(taken["sample"]) <= set_aside
    assert max(taken["prompt_logprobs"]) <= set_aside * 3 // 4  # the rest may hold what `sample` found


def test_a_worker_in_its_own_process_runs_on_the_device_too(
    random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = generate(random_model(), "cpu", prompts(5, 17), GREEDY)
    monkeypatch.setenv("PYACCEL_STRICT", "copies")
    before = torch.pyaccel.memory_allocated(1)
    with LLM(str(random_model()), platform="pyaccel", device=1, executor="multiprocess", **OPTIONS) as llm:
        assert _plain(llm.generate(prompts(5, 17), GREEDY)) == want
        assert torch.pyaccel.memory_allocated(1) == before


def octavo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_one_flag_on_the_command_line_chooses_the_platform(random_model: Callable[..., Path]) -> None:
    flags = ["--model", str(random_model()), "--prompt", "hello", "--temperature", "0", "--max-tokens", "12"]
    flags += ["--dtype", "float32", "--kv-cache-memory-bytes", "16M"]
    on_host = octavo("generate", *flags, "--platform", "cpu")
    on_device = octavo("generate", *flags, "--platform", "pyaccel", "--device", "1", PYACCEL_STRICT="copies")
    assert on_device.returncode == on_host.returncode == 0, on_device.stderr
    assert on_device.stdout == on_host.stdout != ""


def test_a_device_without_a_compiler_is_refused_by_name_with_the_remedy(
    random_model: Callable[..., Path], tmp_path: Path
) -> None:
    done = octavo(
        "generate", "--model", str(random_model()), "--prompt", "hello", "--platform", "pyaccel",
        PYACCEL_CACHE_DIR=str(tmp_path), CXX=str(tmp_path / "missing"),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "its library isn't built, and there is no C++ compiler" in done.stderr
    assert "install g++ or clang++" in done.stderr


def test_a_program_that_forgets_to_close_its_engine_ends_quietly(random_model: Callable[..., Path]) -> None:
    program = f"""
from octavo import LLM, SamplingParams
llm = LLM({str(random_model())!r}, platform="cpu", dtype="float32", kv_cache_memory_bytes="16M")
print(len(llm.generate("hello", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1", "")
