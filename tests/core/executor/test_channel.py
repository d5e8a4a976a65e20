from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from octavo.core.api.errors import EngineError, OctavoError, OutOfMemory, UsageError, WorkerDied
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import NewRequest, StepPlan, StepResult
from octavo.core.config import EngineConfig
from octavo.core.executor.channel import Answer, Call, Channel, Failure, Ping, Start, Stop


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    left, right = socket.socketpair()
    channels = Channel(left), Channel(right)
    yield *channels, left
    for channel in channels:
        channel.close()


def test_messages_arrive_as_they_were_sent(ends: tuple[Channel, Channel, socket.socket]) -> None:
    ours, theirs, _ = ends
    request = NewRequest(
        slot=1, request_id="a", index=0, token_ids=np.arange(5, dtype=np.int32), num_prompt_tokens=5, num_computed_tokens=0,
        num_cached_tokens=0, block_ids=(np.array([3], np.int32),), sampling=SamplingParams(seed=2, logit_bias={4: 1.5}),
    )  # fmt: skip
    plan = StepPlan(step=7, new=[request], rows=np.array([1], np.int32))
    result = StepResult(step=7, sampled=np.array([[3]], np.int32), failed={0: "why"})
    for message in (plan, result, Call(method="counters", arguments={"x": b"\0"}), Answer(values=[{1: "a"}]), Ping(number=2)):
        ours.send(message)
        got = theirs.receive()
        assert type(got) is type(message)
    ours.send(plan)
    got = theirs.receive()
    assert isinstance(got, StepPlan)
    assert got.new[0].token_ids.tolist() == [0, 1, 2, 3, 4]
    assert got.new[0].sampling == request.sampling
    ours.send(result)
    got = theirs.receive()
    assert isinstance(got, StepResult)
    assert got.failed == {0: "why"}


def test_a_large_message_arrives_in_pieces(ends: tuple[Channel, Channel, socket.socket]) -> None:
    ours, theirs, _ = ends
    sent = StepResult(step=1, sampled=np.arange(2_000_000, dtype=np.int32).reshape(-1, 1))
    sender = threading.Thread(target=ours.send, args=(sent,))
    sender.start()
    got = theirs.receive()
    sender.join()
    assert isinstance(got, StepResult)
    assert np.array_equal(got.sampled, sent.sampled)


def test_the_other_ends_death_is_none_even_within_a_frame(ends: tuple[Channel, Channel, socket.socket]) -> None:
    _, theirs, raw = ends
    raw.sendall(struct.pack("<QB", 100, 1) + b"half")
    raw.shutdown(socket.SHUT_WR)
    assert theirs.receive() is None
    assert theirs.receive() is None


def test_closing_wakes_a_reader() -> None:
    left, right = socket.socketpair()
    channel = Channel(left)
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.append(channel.receive()))
    reader.start()
    channel.close()
    reader.join(5)
    right.close()
    assert got == [None]


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<QB", 1 << 60, 0),  # a length that nobody would allocate
        struct.pack("<QB", 0, 0),
        struct.pack("<QB", 2, 200) + b"x",  # no such kind
        struct.pack("<QB", 4, 1) + b"\xc1\xc1\xc1",  # not MessagePack
    ],
    ids=["length", "empty", "kind", "payload"],
)
def test_what_is_no_message_is_refused(ends: tuple[Channel, Channel, socket.socket], frame: bytes) -> None:
    _, theirs, raw = ends
    raw.sendall(frame)
    with pytest.raises(EngineError, match=r"no message|not a StepPlan message"):
        theirs.receive()


def test_a_configuration_travels_whole() -> None:
    config = EngineConfig.from_flat(
        model="m", attention_backend={"full_attention": "reference"}, op={"rms_norm": "x"}, plugin=("a", "b"), num_blocks=9
    )
    again = Start.of(config).config()
    assert again == config
    assert again.given == config.given


def test_errors_keep_their_type_message_and_hint() -> None:
    class Special(OutOfMemory):
        pass

    for error in (UsageError("m", hint="h"), WorkerDied("gone"), Special("s", hint="t")):
        again = Failure.of(error, 3).error()
        assert isinstance(again, OctavoError)
        assert isinstance(error, type(again))
        assert (again.message, again.hint) == (error.message, error.hint)
    untyped = Failure.of(KeyError("k"))
    assert type(untyped.error()) is EngineError
    assert "KeyError" in untyped.message
    assert type(Failure(kind="os.system", message="x").error()) is EngineError


def test_stop_has_nothing_to_say(ends: tuple[Channel, Channel, socket.socket]) -> None:
    ours, theirs, _ = ends
    ours.send(Stop())
    assert isinstance(theirs.receive(), Stop)
