from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.api.errors import OutOfMemory
from octavo.core.api.kv_cache import MLA, CustomSpec, FullAttention, RecurrentState, SlidingWindow
from octavo.core.api.platform import MemoryInfo
from octavo.core.config import EngineConfig
from octavo.core.kv_cache import KVCacheManager
from octavo.core.worker.memory import cache_allowance_bytes, settle_blocks

FULL = FullAttention(block_size=16, bytes_per_block=1000)
WINDOW = SlidingWindow(block_size=16, bytes_per_block=3000, window=64)


def _config(**options: Any) -> EngineConfig:
    return EngineConfig.from_flat(
        **{"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 128, "model": "m", **options}
    )


def _memory(free: int, total: int = 1 << 30) -> MemoryInfo:
    return MemoryInfo(free_bytes=free, total_bytes=total, peak_bytes=0)


def test_one_group_takes_the_whole_allowance() -> None:
    (group,) = settle_blocks([FULL], _config(), 123_456)
    assert group.num_blocks == 123
    assert group.spec is FULL


def test_blocks_that_nobody_could_use_are_not_taken() -> None:
    config = _config(enable_prefix_caching=False)
    (group,) = settle_blocks([FULL], config, 10**9)
    assert group.num_blocks == 4 * 64 + 1
    (group,) = settle_blocks([FULL], _config(), 10**9)
    assert group.num_blocks == 10**6, "with prefix caching there is no such limit"


def test_a_window_needs_no_more_than_its_requests_can_hold() -> None:
    full, window = settle_blocks([FULL, WINDOW], _config(), 10**6)
    assert window.num_blocks == 4 * (-(-(64 + 128) // 16) + 1) + 1
    assert full.num_blocks == (10**6 - 3000 * window.num_blocks) // 1000


def test_every_group_fits_one_request_of_full_length_however_little_there_is() -> None:
    full, window = settle_blocks([FULL, WINDOW], _config(), 65 * 1000 + 14 * 3000)
    assert (full.num_blocks, window.num_blocks) == (65, 14)


@given(st.integers(65_000 + 14 * 3000, 10**9))
def test_the_allowance_is_used_and_never_exceeded(allowance: int) -> None:
    groups = settle_blocks([FULL, WINDOW], _config(), allowance)
    used = sum(group.num_blocks * group.spec.bytes_per_block for group in groups)
    assert used <= allowance < used + 4000
    assert groups[0].num_blocks >= 65
    assert groups[1].num_blocks >= 14


def test_too_little_for_one_request_says_needed_available_and_what_to_do() -> None:
    with pytest.raises(OutOfMemory) as caught:
        settle_blocks([FULL], _config(max_model_len=2**20), 50 * 2**20)
    text = str(caught.value)
    assert "one request of 1048576 tokens needs 62.5 MiB of KV cache, 50.0 MiB is available" in text
    assert "--kv-cache-memory-bytes" in text
    length = int(text.partition("--max-model-len to ")[2].split()[0])
    settle_blocks([FULL], _config(max_model_len=length), 50 * 2**20)
    with pytest.raises(OutOfMemory):
        settle_blocks([FULL], _config(max_model_len=length + 16), 50 * 2**20)


def test_small_sizes_are_told_in_small_units() -> None:
    with pytest.raises(OutOfMemory, match=r"needs 63\.5 KiB of KV cache, 3 bytes is available"):
        settle_blocks([FULL], _config(), 3)


def test_a_state_needs_three_blocks_a_request_whatever_its_length() -> None:
    state = RecurrentState(block_size=16, bytes_per_block=5000)
    (group,) = settle_blocks([state], _config(max_model_len=10**6), 4 * 5000)
    assert group.num_blocks == 4
    with pytest.raises(OutOfMemory):
        settle_blocks([state], _config(max_model_len=10**6), 3 * 5000)


@pytest.mark.parametrize(
    "spec",
    [FULL, WINDOW, MLA(block_size=16, bytes_per_block=1000), RecurrentState(block_size=16, bytes_per_block=5000)],
    ids=lambda spec: type(spec).__name__,
)
@pytest.mark.parametrize("max_model_len", [16, 17, 33, 1024])
def test_the_least_memory_that_is_accepted_is_what_the_manager_needs_for_one_request_of_full_length(
    spec: Any, max_model_len: int
) -> None:
    config = _config(max_model_len=max_model_len)
    least = next(size for size in range(0, 10**6, spec.bytes_per_block) if _is_accepted(spec, config, size))
    groups = settle_blocks([spec], config, least)
    kv = KVCacheManager(groups, max_num_seqs=4, max_model_len=max_model_len)
    budget = config.scheduler.max_num_batched_tokens
    assert kv.peak_blocks(max_model_len, budget).tolist() == [groups[0].num_blocks - 1]  # one is the null block


def _is_accepted(spec: Any, config: EngineConfig, allowance_bytes: int) -> bool:
    try:
        settle_blocks([spec], config, allowance_bytes)
    except OutOfMemory:
        return False
    return True


def test_an_explicit_number_of_blocks_is_taken_as_it_is() -> None:
    assert [group.num_blocks for group in settle_blocks([FULL, WINDOW], _config(num_blocks=7), 0)] == [7, 7]


def test_the_allowance_is_what_was_asked_for_or_what_is_left_of_the_devices_share() -> None:
    assert cache_allowance_bytes(_config(kv_cache_memory_bytes=1000), _memory(free=5000), 99) == 1000
    half = cache_allowance_bytes(_config(gpu_memory_utilization=0.5), _memory(free=900, total=1000), 150)
    assert half == 500 - 100 - 150


def test_asking_for_more_than_is_free_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"needs 2\.00 GiB, 1\.0 MiB is available; lower --kv-cache-memory-bytes"):
        cache_allowance_bytes(_config(kv_cache_memory_bytes="2GiB"), _memory(free=2**20), 0)


def test_a_recurrent_group_beside_full_attention_gets_what_its_requests_can_hold() -> None:
    state = RecurrentState(block_size=16, bytes_per_block=5000)
    full, states = settle_blocks([FULL, state], _config(enable_prefix_caching=False), 10**9)
    assert (full.num_blocks, states.num_blocks) == (4 * 64 + 1, 4 * 3 + 1)
    assert full.pool_id != states.pool_id


def test_a_custom_spec_names_its_manager_and_keeps_what_it_says() -> None:
    custom = CustomSpec(block_size=16, bytes_per_block=100, kind="sinks", manager="sink-manager", kept_tokens=64)
    (group,) = settle_blocks([custom], _config(), 10**6)
    assert group.manager == "sink-manager"
    with pytest.raises(OutOfMemory):  # 64 tokens kept and a chunk of 128, never the whole 1024
        settle_blocks([custom], _config(), 13 * 100)
    settle_blocks([custom], _config(), 14 * 100)
