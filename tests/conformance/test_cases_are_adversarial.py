"""The case maker keeps its promises: reproducible, poisoned where nothing may be read, laid out as the engine lays it out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.api.attention import AttentionSpec
from octavo.conformance.cases import Case, RowLengths, make_case

ROWS = [RowLengths(query_len=5, context_len=20), RowLengths(query_len=1, context_len=33), RowLengths(query_len=1)]


def make(seed: int = 1, **changes: object) -> Case:
    spec: dict[str, object] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "head_dim_v": 8, "scale": 0.5}
    spec |= {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    spec |= {key: changes.pop(key) for key in list(changes) if key in AttentionSpec.__dataclass_fields__}
    return make_case("case", AttentionSpec(**spec), ROWS, seed=seed, block_size=8, **changes)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_case_and_another_doesnt() -> None:
    one, again, other = make(), make(), make(seed=2)
    assert torch.equal(one.step_tensors()[0], again.step_tensors()[0])
    assert np.array_equal(one.block_table, again.block_table)
    assert not torch.equal(one.step_tensors()[0], other.step_tensors()[0])


def test_decode_rows_come_first() -> None:
    case = make()
    assert [request.query_len for request in case.inputs] == [1, 1, 5]
    assert case.host_batch().query_start_loc.tolist() == [0, 1, 2, 7]
    assert case.host_batch().num_computed_tokens.tolist() == [33, 0, 20]


def test_blocks_belong_to_one_request_and_none_is_the_null_block() -> None:
    case = make()
    used = case.block_table[case.block_table > 0]
    assert len(set(used.tolist())) == len(used) == 5 + 1 + 4
    assert case.num_blocks > len(used) + 1
    assert used.tolist() != sorted(used.tolist())


def test_everything_outside_the_context_is_poison() -> None:
    case = make()
    for blocks in (case.cache_blocks(), case.blocks_after()):
        assert torch.isnan(blocks["k"][0].float()).all()
    before, after = case.cache_blocks()["k"].float(), case.blocks_after()["k"].float()
    assert (~torch.isnan(before[..., 0, 0])).sum() == 33 + 20
    assert (~torch.isnan(after[..., 0, 0])).sum() == 34 + 1 + 25


def test_the_steps_keys_are_what_the_history_holds_at_their_slots() -> None:
    case = make()
    _, k, v = case.step_tensors()
    assert k is not None
    assert v is not None
    slots = torch.from_numpy(case.slot_mapping())
    assert torch.equal(case.blocks_after()["k"].flatten(0, 1)[slots], k)
    assert torch.equal(case.blocks_after()["v"].flatten(0, 1)[slots], v)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_quantising_the_steps_keys_again_gives_the_stored_ones(kv_dtype: str) -> None:
    case = make(kv_dtype=kv_dtype, k_scale=0.037, v_scale=0.61)
    _, k, _ = case.step_tensors()
    assert k is not None
    stored = torch.cat([request.k[request.num_computed_tokens :] for request in case.inputs])
    quantised = k.float() / 0.037
    quantised = quantised.round() if kv_dtype == "int8" else quantised
    assert torch.equal(quantised.to(stored.dtype).view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_a_cache_of_another_float_holds_what_the_step_writes_exactly(dtype: str, kv_dtype: str) -> None:
    case = make(dtype=dtype, kv_dtype=kv_dtype)
    _, k, v = case.step_tensors()
    for new, name in ((k, "k"), (v, "v")):
        assert new is not None
        stored = torch.cat([getattr(request, name)[request.num_computed_tokens :] for request in case.inputs])
        assert torch.equal(new.to(stored.dtype), stored)


def test_blocks_wholly_behind_the_window_are_the_null_block() -> None:
    case = make(window=10)
    assert case.block_table[0, :5].tolist()[:3] == [0, 0, 0]  # position 33 sees from 24 on
    assert (case.block_table[0, 3:5] > 0).all()
    assert case.block_table[2, 0] == 0  # position 20 sees from 11 on
    assert (case.block_table[2, 1:4] > 0).all()


def test_padding_has_no_length_no_slot_and_nan_tokens() -> None:
    case = make(pad_reqs=2, pad_tokens=3)
    host = case.host_batch()
    assert host.seq_lens.tolist()[3:] == [0, 0]
    assert host.query_start_loc.tolist()[3:] == [7, 7, 7]
    assert case.slot_mapping().tolist()[7:] == [-1, -1, -1]
    assert torch.isnan(case.step_tensors()[0][7:].float()).all()


def test_a_needle_behind_the_window_is_the_loudest_key_of_all() -> None:
    case = make(window=10, needle="behind_window")
    last = case.inputs[0]
    logits = 0.5 * last.k[:, 0].float() @ last.q[0, 0].float()
    assert logits.argmax().item() == 33 - 10
    assert last.v is not None
    assert (last.v[33 - 10].float() == 8).all()


def test_strided_tokens_hold_the_same_values() -> None:
    plain, strided = make().step_tensors(), make(strided=True).step_tensors()
    for one, other in zip(plain, strided, strict=True):
        assert one is not None
        assert other is not None
        assert not other.is_contiguous()
        assert torch.equal(one, other)


def test_a_shared_cache_is_complete_before_the_step() -> None:
    case = make(shared_kv=True)
    assert case.step_tensors()[1:] == (None, None)
    assert torch.equal(case.cache_blocks()["v"].isnan(), case.blocks_after()["v"].isnan())
    assert case.params.kv_source_layer is not None
