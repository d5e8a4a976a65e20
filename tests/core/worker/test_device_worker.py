from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.api.errors import EngineError, OutOfMemory, PluginError, UsageError
from octavo.core.api.executor import WorkerMethod
from octavo.core.api.kv_cache import FullAttention
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import NewRequest, StepPlan
from octavo.core.config import EngineConfig
from octavo.core.engine.resolve import resolve
from octavo.core.worker.worker import DeviceWorker, make_worker

GREEDY = SamplingParams(temperature=0)
Greedy = Callable[[Sequence[int], int], list[int]]


def _config(folder: Path, **options: Any) -> EngineConfig:
    fields = {"platform": "cpu", "dtype": "float32", "max_num_seqs": 4, "num_blocks": 40, "block_size": 4}
    return resolve(EngineConfig.from_flat(model=str(folder), **{**fields, **options})).config


@pytest.fixture
def worker(tiny_llama: Path) -> Iterator[DeviceWorker]:
    made = DeviceWorker(_config(tiny_llama), 0, 0)
    made.load()
    yield made
    made.close()


def _request(slot: int, tokens: Sequence[int], first_block: int, **more: Any) -> NewRequest:
    fields: dict[str, Any] = {"num_computed_tokens": 0, "num_cached_tokens": 0, "sampling": GREEDY, **more}
    return NewRequest(
        slot=slot,
        request_id=str(slot),
        index=0,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens),
        block_ids=(np.arange(first_block, first_block + 8, dtype=np.int32),),
        **fields,
    )


def _run(worker: Any, requests: Sequence[NewRequest], num_tokens: int) -> list[list[int]]:
    plan = StepPlan(
        step=0,
        new=requests,
        rows=np.array([request.slot for request in requests], np.int32),
        num_scheduled_tokens=np.array([len(request.token_ids) for request in requests], np.int32),
    )
    results = [worker.execute(plan)] + [worker.execute(StepPlan(step=step)) for step in range(1, num_tokens)]
    return [[int(result.sampled[row, 0]) for result in results] for row in range(len(requests))]


def test_a_real_model_says_what_transformers_says(worker: DeviceWorker, tiny_llama_greedy: Greedy) -> None:
    info = worker.allocate(worker.kv_groups())
    assert info.vocab_size == 64
    assert info.attention == {"full_attention": "reference"}
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40], [33, 2, 60]]
    requests = [_request(slot, prompt, 1 + 10 * slot) for slot, prompt in enumerate(prompts)]
    assert _run(worker, requests, 10) == [tiny_llama_greedy(prompt, 10) for prompt in prompts]


def test_groups_say_what_the_backend_needs(worker: DeviceWorker) -> None:
    (group,) = worker.kv_groups()
    # K and V of 2 layers, 4 tokens, 2 heads of 8 floats.
    assert group.spec == FullAttention(block_size=4, bytes_per_block=2 * 2 * 4 * 2 * 8 * 4)
    assert group.num_blocks == 40


def test_methods_tell_memory_copies_and_who_ran_what(worker: DeviceWorker) -> None:
    (group,) = worker.kv_groups()
    assert worker.call(WorkerMethod.COUNTERS) == {"host_to_device": 0, "device_to_host": 0}
    worker.allocate((group,))
    memory = worker.call(WorkerMethod.KV_MEMORY)
    assert memory["kv_bytes"] == 40 * group.spec.bytes_per_block
    assert worker.call(WorkerMethod.ATTENTION_RUNS) == {}
    _run(worker, [_request(0, [1, 2, 3], 1)], 3)
    assert worker.call(WorkerMethod.ATTENTION_RUNS) == {0: "reference", 1: "reference"}
    assert worker.call(WorkerMethod.COUNTERS) == {"host_to_device": 3, "device_to_host": 3}
    with pytest.raises(UsageError, match="no extension 'x'"):
        worker.call(WorkerMethod.EXTENSION, name="x", payload=b"")


def test_calls_out_of_order_are_refused(tiny_llama: Path) -> None:
    worker = DeviceWorker(_config(tiny_llama), 0, 0)
    with pytest.raises(EngineError, match=r"load\(\) comes first"):
        worker.kv_groups()
    with pytest.raises(EngineError, match=r"allocate\(\) comes before"):
        worker.execute(StepPlan(step=0))
    worker.close()
    worker.close()


def test_a_device_that_is_not_there_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="no device 3"):
        DeviceWorker(_config(tiny_llama), 0, 3).load()


def test_an_allocator_that_fails_is_out_of_memory(worker: DeviceWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, shape: Any, dtype: str) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("octavo.backends.cpu.platform.CpuPlatform.zeros", fail)
    with pytest.raises(OutOfMemory, match=r"no memory for the KV cache.*--kv-cache-memory-bytes"):
        worker.allocate(worker.kv_groups())


def test_other_runtime_errors_are_not_taken_for_it(worker: DeviceWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, shape: Any, dtype: str) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr("octavo.backends.cpu.platform.CpuPlatform.zeros", fail)
    with pytest.raises(PluginError, match=r"'reference' failed in allocate_kv\(\): RuntimeError: something else"):
        worker.allocate(worker.kv_groups())


def test_an_open_platform_is_no_configuration_for_a_worker() -> None:
    with pytest.raises(UsageError, match="platform is still open"):
        make_worker(EngineConfig.from_flat(model="m"), 0, 0)


OPS_MANIFEST = """
    [plugin]
    name = "loud"
    api = "1.0"
    [ops.loud]
    implements = ["rms_norm"]
    platforms = ["cpu"]
"""


def _ops_plugin(local_plugins: Any, body: str) -> None:
    local_plugins.add(
        "loud-ops",
        manifest=OPS_MANIFEST,
        files={"ops.py": body},
        entry_points={"octavo.ops": {"loud": "loud_ops.ops:make"}},
    )


def test_ops_come_from_the_plugin_that_was_named(local_plugins: Any, tiny_llama: Path) -> None:
    body = """
        def make(platform):
            def rms_norm(x, weight, eps):
                return x * 0
            return {"rms_norm": rms_norm}
    """
    _ops_plugin(local_plugins, body)
    worker = DeviceWorker(_config(tiny_llama, op={"rms_norm": "loud"}), 0, 0)
    worker.load()
    worker.allocate(worker.kv_groups())
    # The first layer's input is gone, and every other norm is fused with an addition: what comes out isn't the model's own.
    plain = DeviceWorker(_config(tiny_llama), 0, 0)
    plain.load()
    plain.allocate(plain.kv_groups())
    requests = [_request(0, [5, 6, 7, 8], 1)]
    assert _run(worker, requests, 6) != _run(plain, requests, 6)


def test_ops_that_differ_from_their_manifest_are_refused(local_plugins: Any, tiny_llama: Path) -> None:
    _ops_plugin(local_plugins, "def make(platform): return {'rotary': print}")
    config = _config(tiny_llama, op={"rms_norm": "loud"})
    with pytest.raises(PluginError, match="'loud' gives rotary, its manifest declares rms_norm"):
        DeviceWorker(config, 0, 0).load()


def test_ops_that_raise_are_named(local_plugins: Any, tiny_llama: Path) -> None:
    _ops_plugin(local_plugins, "def make(platform): raise OSError('no driver')")
    config = _config(tiny_llama, op={"rms_norm": "loud"})
    with pytest.raises(PluginError, match="ops plugin 'loud' failed in making its ops: OSError: no driver"):
        DeviceWorker(config, 0, 0).load()


def test_a_platforms_own_worker_is_used(local_plugins: Any, tiny_llama: Path) -> None:
    local_plugins.add(
        "own-worker",
        manifest="""
            [plugin]
            name = "own"
            api = "1.0"
            [platform.own]
            kind = "host"
            device_type = "cpu"
            auto = false
            attention = ["reference"]
        """,
        files={
            "platform.py": """
                from octavo.backends.cpu.platform import CpuPlatform
                class OwnWorker:
                    def __init__(self, config, rank, device):
                        self.place = ("own worker", rank, device)
                    load = kv_groups = allocate = execute = call = close = None
                class OwnPlatform(CpuPlatform):
                    def worker_factory(self):
                        return OwnWorker
            """
        },
        entry_points={"octavo.platforms": {"own": "own_worker.platform:OwnPlatform"}},
    )
    config = EngineConfig.from_flat(model=str(tiny_llama), platform="own")
    worker: Any = make_worker(config, 2, 5)
    assert worker.place == ("own worker", 2, 5)
