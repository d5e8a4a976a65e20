"""pyaccel behaves as a device: memory of its own, several devices, streams, events, generators, pinned memory."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyaccel
import pytest
import torch

MIB = 1 << 20


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    settings = pyaccel.install()
    torch.pyaccel.set_device(0)
    yield
    pyaccel.install(memory_bytes=settings.memory_bytes)
    torch.pyaccel.set_device(0)
    torch.pyaccel.synchronize(0)
    torch.pyaccel.synchronize(1)


def allocated() -> tuple[int, int]:
    return torch.pyaccel.memory_allocated(0), torch.pyaccel.memory_allocated(1)


# ---- memory


def test_memory_is_booked_on_the_tensors_device_and_given_back() -> None:
    before = allocated()
    tensor = torch.empty(MIB, dtype=torch.uint8, device="pyaccel:1")
    assert allocated() == (before[0], before[1] + MIB)
    view = tensor[10:]
    del tensor
    assert allocated() == (before[0], before[1] + MIB)
    del view
    assert allocated() == before


def test_results_of_ops_are_booked_like_allocations() -> None:
    tensor = torch.ones(MIB // 4, device="pyaccel:0")
    before = allocated()
    result = tensor * 2
    assert allocated()[0] - before[0] == MIB
    tensor.add_(1)
    tensor.view(2, -1)
    assert allocated()[0] - before[0] == MIB
    del result
    assert allocated() == before


def test_peak_remembers_the_most_held_until_it_is_reset() -> None:
    torch.pyaccel.reset_peak_memory_stats(1)
    held = torch.pyaccel.memory_allocated(1)
    del_me = torch.empty(3 * MIB, dtype=torch.uint8, device="pyaccel:1")
    del del_me
    assert torch.pyaccel.max_memory_allocated(1) == held + 3 * MIB
    torch.pyaccel.reset_peak_memory_stats(1)
    assert torch.pyaccel.max_memory_allocated(1) == held


def test_allocation_over_the_limit_is_an_out_of_memory_error() -> None:
    pyaccel.install(memory_bytes=8 * MIB)
    held = torch.empty(6 * MIB, dtype=torch.uint8, device="pyaccel:1")
    with pytest.raises(torch.OutOfMemoryError, match=r"pyaccel:1 is out of memory: 4194304 bytes wanted, \d+ of 8388608 free"):
        torch.empty(4 * MIB, dtype=torch.uint8, device="pyaccel:1")
    torch.empty(4 * MIB, dtype=torch.uint8, device="pyaccel:0")  # the other device has its own
    with pytest.raises(torch.OutOfMemoryError):
        held + 1  # an op's result counts too
    del held
    torch.empty(4 * MIB, dtype=torch.uint8, device="pyaccel:1")


def test_one_device_may_have_less_than_the_other() -> None:
    pyaccel.memory_limit(1, MIB)
    assert torch.pyaccel.mem_get_info(1)[1] == MIB
    assert torch.pyaccel.mem_get_info(0)[1] > MIB
    free, total = torch.pyaccel.mem_get_info(1)
    assert free == total - torch.pyaccel.memory_allocated(1)


def test_torchs_own_memory_functions_agree() -> None:
    kept = torch.empty(MIB, dtype=torch.uint8, device="pyaccel:1")
    accelerator = torch.accelerator
    assert accelerator.memory_allocated(1) == torch.pyaccel.memory_allocated(1) >= kept.nbytes
    assert accelerator.max_memory_allocated(1) == torch.pyaccel.max_memory_allocated(1)
    assert accelerator.get_memory_info(1) == torch.pyaccel.mem_get_info(1)
    accelerator.reset_peak_memory_stats(1)
    accelerator.empty_cache()
    assert accelerator.max_memory_allocated(1) == accelerator.memory_allocated(1)


def test_no_address_is_handed_out_twice() -> None:
    addresses = {torch.empty(100, device="pyaccel:1").data_ptr() for _ in range(50)}
    assert len(addresses) == 50
    assert 0 not in addresses


def test_resized_storage_is_booked_and_keeps_its_values() -> None:
    tensor = torch.arange(4, dtype=torch.float32, device="pyaccel:1")
    before = torch.pyaccel.memory_allocated(1)
    tensor.untyped_storage().resize_(4 * MIB)
    assert torch.pyaccel.memory_allocated(1) == before - 512 + 4 * MIB
    assert tensor.tolist() == [0, 1, 2, 3]
    tensor.untyped_storage().resize_(0)
    assert torch.pyaccel.memory_allocated(1) == before - 512


# ---- devices


def test_two_devices_are_there_and_the_current_one_is_the_default() -> None:
    assert torch.pyaccel.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("pyaccel")
    assert torch.empty(1, device="pyaccel").device.index == 0
    torch.pyaccel.set_device(1)
    assert torch.empty(1, device="pyaccel").device.index == 1
    with torch.pyaccel.device(0):
        assert torch.ones(1).to("pyaccel").device.index == 0
    assert torch.pyaccel.current_device() == torch.accelerator.current_device_index() == 1


def test_each_thread_has_its_own_current_device() -> None:
    torch.pyaccel.set_device(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.pyaccel.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="there is no pyaccel:2; there are 2"):
        torch.empty(1, device="pyaccel:2")
    with pytest.raises(RuntimeError, match="there is no pyaccel:2"):
        torch.pyaccel.set_device(2)


def test_results_stay_on_their_arguments_device_not_the_current_one() -> None:
    tensor = torch.ones(3, device="pyaccel:1")
    assert torch.pyaccel.current_device() == 0
    assert (tensor + 1).device.index == tensor.sum().device.index == torch.cat([tensor, tensor]).device.index == 1


def test_tensors_copy_between_devices() -> None:
    one = torch.arange(6.0, device="pyaccel:1")
    with pyaccel.count() as counts:
        zero = one.to("pyaccel:0")
    assert zero.device.index == 0
    assert counts[0].device_to_device == 1
    assert counts[0].device_to_host == counts[0].host_to_device == 0
    assert zero.tolist() == one.tolist()


def add(a: torch.Tensor, b: torch.Tensor) -> Any:
    return a + b


@pytest.mark.parametrize(
    "function",
    [
        add,
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.matmul(a, b),
        lambda a, b: torch.stack([a, b]),
        lambda a, b: a.index_add_(0, torch.zeros(4, dtype=torch.long, device=a.device), b),
        lambda a, b: torch.mul(a, 2, out=b),
        lambda a, b: a.masked_fill(b > 0, 1),
        lambda a, b: a.scatter(0, b.long(), 1.0),
        lambda a, b: torch.nn.functional.embedding(b.long(), a[:, None]),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "pyaccel:0"])
def test_mixing_devices_in_one_op_is_an_error(function: Any, other: str) -> None:
    a, b = torch.ones(4, device="pyaccel:1"), torch.ones(4, device=other)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)devices?"):
        function(a, b)
    if other != "cpu":
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)devices?"):
            function(b, a)


def test_host_scalars_and_host_indices_may_come_along() -> None:
    tensor = torch.arange(4.0, device="pyaccel:1")
    assert (tensor * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert tensor[torch.tensor([3, 1])].tolist() == [3, 1]
    with pytest.raises(RuntimeError, match="devices"):
        torch.tensor(2.0).add_(tensor[0])


# ---- the host can't read


def test_the_host_is_refused_politely_where_torch_can_tell() -> None:
    tensor = torch.ones(3, device="pyaccel:1")
    with pytest.raises(TypeError, match="pyaccel"):
        tensor.numpy()
    with pytest.raises(TypeError, match="pyaccel"):
        np.asarray(tensor)
    with pytest.raises((TypeError, BufferError, RuntimeError)):
        np.from_dlpack(tensor)
    with pytest.raises((TypeError, AttributeError)):
        memoryview(tensor)  # type: ignore[arg-type]


# ---- copies, streams, events


def test_non_blocking_copy_to_the_host_arrives_when_waited_for() -> None:
    tensor = torch.arange(4.0, device="pyaccel:1")
    target = tensor.to("cpu", non_blocking=True)
    assert bool(target.isnan().all())
    torch.pyaccel.synchronize(0)  # another device's
    assert bool(target.isnan().all())
    torch.pyaccel.synchronize(1)
    assert target.tolist() == [0, 1, 2, 3]


def test_non_blocking_copy_carries_the_values_of_its_moment() -> None:
    tensor = torch.ones(4, dtype=torch.int64, device="pyaccel:1")
    target = torch.empty(4, dtype=torch.int64, pin_memory=True)
    target.copy_(tensor, non_blocking=True)
    tensor.fill_(2)
    torch.pyaccel.synchronize(1)
    assert target.tolist() == [1, 1, 1, 1]


def test_changing_pinned_memory_under_a_copy_is_an_error() -> None:
    source = torch.ones(4, pin_memory=True)
    source.to("pyaccel:1", non_blocking=True)
    source.zero_()
    with pytest.raises(RuntimeError, match="pinned memory was changed before"):
        torch.pyaccel.synchronize(1)
    source.to("pyaccel:1", non_blocking=True)
    torch.pyaccel.synchronize(1)
    source.fill_(2)
    torch.pyaccel.synchronize(1)


def test_event_waits_for_what_was_queued_before_it_and_no_more() -> None:
    torch.pyaccel.set_device(1)
    tensor = torch.ones(2, device="pyaccel:1")
    event = torch.pyaccel.Event()
    first = tensor.to("cpu", non_blocking=True)
    event.record(torch.pyaccel.current_stream())
    second = (tensor + 1).to("cpu", non_blocking=True)
    assert not event.query()
    event.synchronize()
    assert first.tolist() == [1, 1]
    assert bool(second.isnan().all())
    torch.pyaccel.synchronize()
    assert second.tolist() == [2, 2]


def test_query_of_unfinished_work_is_false_once() -> None:
    torch.pyaccel.set_device(1)
    stream = torch.pyaccel.current_stream()
    assert stream.query()
    target = torch.ones(2, device="pyaccel:1").to("cpu", non_blocking=True)
    assert [stream.query(), stream.query()] == [False, True]
    assert target.tolist() == [1, 1]


def test_streams_are_independent_until_one_waits_for_another() -> None:
    torch.pyaccel.set_device(1)
    side, other = torch.pyaccel.Stream(), torch.pyaccel.Stream()
    assert side != other
    tensor = torch.ones(2, device="pyaccel:1")
    with torch.pyaccel.stream(side):
        assert torch.pyaccel.current_stream() == side
        target = tensor.to("cpu", non_blocking=True)
        event = side.record_event()
    assert torch.pyaccel.current_stream() == torch.pyaccel.default_stream(1)
    other.synchronize()
    assert bool(target.isnan().all())
    other.wait_event(event)
    other.synchronize()
    assert target.tolist() == [1, 1]


def test_blocking_copy_waits_for_its_own_stream() -> None:
    torch.pyaccel.set_device(1)
    tensor = torch.ones(2, device="pyaccel:1")
    early = tensor.to("cpu", non_blocking=True)
    tensor.cpu()
    assert early.tolist() == [1, 1]


def test_events_measure_time() -> None:
    torch.pyaccel.set_device(1)
    start, end = torch.pyaccel.Event(enable_timing=True), torch.pyaccel.Event(enable_timing=True)
    start.record()
    end.record()
    end.synchronize()
    assert 0 <= start.elapsed_time(end) < 1000


def test_pinned_memory_is_known_as_such() -> None:
    pinned = torch.ones(1000).pin_memory()
    assert pinned.is_pinned()
    assert pinned[10:].is_pinned()
    assert not torch.ones(1000).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert pinned.sum().item() == 1000


# ---- generators


def test_generators_are_reproducible_and_each_device_has_its_own() -> None:
    torch.manual_seed(7)
    zero, one = torch.rand(5, device="pyaccel:0").tolist(), torch.rand(5, device="pyaccel:1").tolist()
    more = torch.rand(5, device="pyaccel:1").tolist()
    assert zero == one != more
    torch.manual_seed(7)
    assert torch.rand(5, device="pyaccel:1").tolist() == one


def test_device_draws_leave_the_hosts_generator_alone() -> None:
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    torch.rand(3, device="pyaccel:1")
    torch.dropout(torch.ones(100, device="pyaccel:1"), 0.5, True)
    torch.bernoulli(torch.full((100,), 0.5, device="pyaccel:1"))
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: torch.randn(6, device=d),
        lambda d: torch.randint(0, 1000, (6,), device=d),
        lambda d: torch.randperm(20, device=d),
        lambda d: torch.empty(6, device=d).exponential_(),
        lambda d: torch.multinomial(torch.ones(50, device=d), 6),
        lambda d: torch.dropout(torch.ones(50, device=d), 0.5, True),
        lambda d: torch.bernoulli(torch.full((50,), 0.5, device=d)),
        lambda d: torch.rand_like(torch.ones(6, device=d)),
    ],
)
def test_seeded_draws_repeat_and_equal_the_cpus(draw: Any) -> None:
    def drawn(device: str) -> list[float]:
        torch.manual_seed(11)
        first: list[float] = draw(device).tolist()
        assert draw(device).tolist() != first
        return first

    assert drawn("pyaccel:1") == drawn("pyaccel:1") == drawn("cpu")


def test_explicit_generator_is_used_and_its_state_can_be_kept() -> None:
    generator = torch.Generator("pyaccel:1").manual_seed(3)
    state = generator.get_state()
    first = torch.rand(4, device="pyaccel:1", generator=generator).tolist()
    generator.set_state(state)
    assert torch.rand(4, device="pyaccel:1", generator=generator).tolist() == first
    assert generator.initial_seed() == 3
    with pytest.raises(RuntimeError, match=r"(?i)generator"):
        torch.rand(4, device="pyaccel:1", generator=torch.Generator("cpu"))


def test_fork_rng_restores_the_device_state() -> None:
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[0, 1], device_type="pyaccel"):
        inside = torch.rand(3, device="pyaccel:1").tolist()
    assert torch.rand(3, device="pyaccel:1").tolist() == inside


# ---- copies of whole objects


def test_tensors_deepcopy_and_save() -> None:
    tensor = torch.arange(4.0, device="pyaccel:1")[1:]
    duplicate = copy.deepcopy(tensor)
    assert duplicate.device == tensor.device
    assert duplicate.data_ptr() != tensor.data_ptr()
    file = io.BytesIO()
    torch.save({"tensor": tensor}, file)
    file.seek(0)
    loaded = torch.load(file)["tensor"]
    assert loaded.device == tensor.device
    assert loaded.tolist() == duplicate.tolist() == [1, 2, 3]
    file.seek(0)
    assert torch.load(file, map_location="cpu")["tensor"].tolist() == [1, 2, 3]
