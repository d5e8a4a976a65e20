"""Messages survive the wire unchanged, and bytes that aren't a message are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.api.errors import EngineError
from octavo.core.api.executor import ExecutorInfo, WorkerInfo
from octavo.core.api.kv_cache import MLA, FullAttention, KVGroupInfo, RecurrentState, SlidingWindow
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import (
    Drafts,
    FinishedRequest,
    Logprobs,
    NewRequest,
    Request,
    SchedulerStats,
    StartedRequest,
    StepOutput,
    StepPlan,
    StepResult,
    TableUpdate,
)
from octavo.core.engine.wire import MESSAGES, decode, encode


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


SAMPLING = SamplingParams(temperature=0.5, stop=["a", "b"], stop_token_ids=[7], logit_bias={3: -1.5}, logprobs=2)
LOGPROBS = Logprobs(
    rows=ints(0, 1),
    token_ids=np.array([[1, 2], [3, -1]], np.int32),
    logprobs=np.array([[-0.5, -1.5], [-0.1, -np.inf]], np.float32),
    ranks=ints(1, 4),
)
KV = tuple(
    KVGroupInfo(spec=spec, num_blocks=9, pool_id=index, manager=None)
    for index, spec in enumerate(
        [
            FullAttention(block_size=16, bytes_per_block=64),
            SlidingWindow(block_size=16, bytes_per_block=64, window=32),
            MLA(block_size=8, bytes_per_block=32),
            RecurrentState(block_size=256, bytes_per_block=1024),
        ]
    )
)
EXAMPLES = [
    Request(
        request_id="r", prompt_token_ids=ints(1, 2, 3), sampling=SAMPLING, eos_token_ids=(2,), max_tokens=5, cache_salt="salt"
    ),
    StepPlan(step=1),
    StepPlan(
        step=2,
        released=ints(4),
        new=[
            NewRequest(
                slot=1,
                request_id="r",
                index=0,
                token_ids=ints(1, 2, 3),
                num_prompt_tokens=3,
                num_computed_tokens=0,
                num_cached_tokens=0,
                block_ids=(ints(1, 2), ints()),
                sampling=SAMPLING,
                eos_token_ids=(2,),
            )
        ],
        tables=(TableUpdate(slots=ints(1), columns=ints(0), block_ids=ints(3)), None),
        block_copies=(np.array([[1, 2]], np.int32), None),
        rows=ints(0, 1),
        num_scheduled_tokens=ints(1, 3),
        num_decodes=1,
        drafts=Drafts(rows=ints(0), counts=ints(2), token_ids=ints(8, 9)),
    ),
    StepResult(
        step=3,
        sampled=np.array([[1, -1], [2, 3]], np.int32),
        num_accepted=ints(0, 1),
        logprobs=LOGPROBS,
        prompt_logprobs=LOGPROBS,
    ),
    StepOutput(
        slots=ints(0, 1),
        token_ids=np.array([[1], [2]], np.int32),
        started=[StartedRequest(slot=0, request_id="r", index=0, num_cached_tokens=16)],
        finished=[
            FinishedRequest(slot=0, request_id="r", index=0, reason="stop", stop_reason="###"),
            FinishedRequest(slot=1, request_id="s", index=1, reason="stop", stop_reason=7),
            FinishedRequest(slot=-1, request_id="t", index=0, reason="error", message="no room"),
        ],
        logprobs=LOGPROBS,
    ),
    SchedulerStats(num_running=3, kv_usage=0.25),
    WorkerInfo(kv=KV, vocab_size=11, weights_bytes=2**40, attention={"full_attention": "reference"}),
    ExecutorInfo(kv=KV, vocab_size=11, num_workers=1, max_in_flight=2, attention={"full_attention": "reference"}),
]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(equal(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_every_message_kind_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(MESSAGES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: msgspec.Struct) -> None:
    assert equal(message, decode(encode(message), type(message)))


def test_a_decoded_array_cannot_be_changed_in_place() -> None:
    back = decode(encode(EXAMPLES[0]), Request)
    with pytest.raises(ValueError, match="read-only"):
        back.prompt_token_ids[0] = 5


def test_an_array_that_is_not_contiguous_keeps_its_values() -> None:
    plan = StepPlan(step=0, rows=np.arange(10, dtype=np.int32)[::3])
    assert decode(encode(plan), StepPlan).rows.tolist() == [0, 3, 6, 9]  # type: ignore[union-attr]


def test_an_array_of_another_dtype_is_refused_by_the_receiver() -> None:
    plan = StepPlan(step=0, rows=np.arange(3, dtype=np.int64))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="expected an array of int32, got int64"):
        decode(encode(plan), StepPlan)


@pytest.mark.parametrize("value", [np.array(["a"], object), np.zeros(2, np.complex64), {1, 2}.__iter__(), np.int32(3)])
def test_what_cannot_travel_is_refused_by_the_sender(value: Any) -> None:
    with pytest.raises(EngineError, match="can't encode a Request"):
        encode(Request(request_id="r", prompt_token_ids=value, sampling=SamplingParams(), max_tokens=1))


@given(data=st.binary(max_size=200))
def test_random_bytes_are_never_a_plan(data: bytes) -> None:
    with pytest.raises(EngineError, match="not a StepPlan message"):
        decode(data, StepPlan)


@settings(max_examples=300)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), index=st.integers(0, len(EXAMPLES) - 1))
def test_a_damaged_message_is_refused_or_still_well_typed(position: int, value: int, index: int) -> None:
    message = EXAMPLES[index]
    data = bytearray(encode(message))
    data[position % len(data)] = value
    try:
        back = decode(data, type(message))
    except EngineError:
        return
    assert type(back) is type(message)
