"""A model, a backend and a platform small enough to be checked by hand."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.core.api.attention import (
    AttentionBackend,
    AttentionGroup,
    AttentionSpec,
    BufferSpec,
    GroupBatch,
    KVFormat,
    LayerParams,
)
from octavo.core.api.kv_cache import FullAttention, KVGroupInfo
from octavo.core.api.manifest import AttentionManifest, IntRange
from octavo.core.api.platform import DeviceInfo, MemoryInfo, Platform, PlatformCapabilities
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import NewRequest, StepPlan
from octavo.core.layers.ops import Ops
from octavo.core.worker.caches import GroupCaches
from octavo.core.worker.model_runner import ModelRunner, RunnerLimits

VOCAB_SIZE = 61
BLOCK_SIZE = 4
NUM_BLOCKS = 64


class CountingPlatform(Platform):
    """Host memory, but every copy is a copy, and is counted. With ``streams`` nothing is fetched before somebody waits."""

    name = "counting"
    device_type = "cpu"

    def __init__(self, *, streams: bool = False) -> None:
        self.capabilities = PlatformCapabilities(streams=streams)
        self.uploads = 0
        self.waits = 0

    def devices(self) -> Sequence[DeviceInfo]:
        return (DeviceInfo(index=0, name="counting", total_bytes=1 << 30, dtypes=("float32",)),)

    def bind(self, index: int) -> None: ...

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free_bytes=1 << 29, total_bytes=1 << 30, peak_bytes=0)

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def from_host(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        self.uploads += 1
        return tensor.clone()

    def to_host(self, array: Tensor) -> Tensor:
        self.waits += 1
        return array.clone()

    def fetch(self, array: Tensor) -> Callable[[], Tensor]:
        if not self.capabilities.streams:
            return super().fetch(array)
        arrived = array.clone()

        def wait() -> Tensor:
            self.waits += 1
            return arrived

        return wait


class TokenAttention(AttentionBackend):
    """Caches token ids; the output is a fingerprint of every token from the first to the query's, in order."""

    manifest = AttentionManifest(
        name="tokens", platforms=("counting",), dtypes=("float32",), kv_dtypes=("float32",), head_sizes=IntRange(values=(1,)),
        block_sizes=IntRange(multiple_of=1), features=("causal",),
    )  # fmt: skip
    copied: ClassVar[list[list[tuple[int, int]]]] = []

    def kv_format(self) -> KVFormat:
        return KVFormat(buffers={"tokens": BufferSpec(shape=(self.group.block_size,), dtype="float32")})

    def copy_blocks(self, kv: Any, pairs: Any) -> Any:
        for source, target in pairs.tolist():
            kv["tokens"][target] = kv["tokens"][source]
        return kv

    def read_blocks(self, kv: Any, ids: Any) -> Mapping[str, Tensor]:
        return {"k": kv["tokens"][torch.from_numpy(ids).long()]}

    def write_blocks(self, kv: Any, ids: Any, data: Any) -> Any:
        kv["tokens"][torch.from_numpy(ids).long()] = data["k"]
        return kv

    def plan(self, batch: GroupBatch) -> GroupBatch:
        return batch

    def write_kv(self, kv: Any, k: Tensor, v: Tensor, plan: GroupBatch, layer: LayerParams) -> Any:
        real = plan.slot_mapping >= 0
        kv["tokens"].view(-1)[plan.slot_mapping[real]] = k.view(-1)[real]
        return kv

    def attend(
        self, q: Tensor, kv: Any, plan: GroupBatch, layer: LayerParams, out: Tensor, *, lse_out: Tensor | None = None
    ) -> Tensor:
        starts = plan.query_start_loc.tolist()
        for row, end in enumerate(plan.seq_lens.tolist()):
            tokens = kv["tokens"][plan.block_table[row].long()].view(-1)[:end].tolist()
            for token in range(starts[row], starts[row + 1]):
                out[token] = fingerprint(tokens[: int(plan.positions[token]) + 1])
        return out


def fingerprint(tokens: Sequence[float]) -> int:
    """A number below 2¹⁶ that tells sequences apart, exact in float32."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) & 0xFFFF


def logits_of(prints: Tensor) -> Tensor:
    """Fingerprints [n] → logits [n, VOCAB_SIZE] float32 that look random."""
    waves = torch.arange(1, VOCAB_SIZE + 1, dtype=torch.float32)
    return 3 * torch.sin(prints.unsqueeze(1) * 0.7 + waves * waves)


class TokenModel:
    """One layer of `TokenAttention`; what it answers depends on the whole sequence and nothing else."""

    nan_after: ClassVar[int | None] = None  # a sequence with this last token has NaN logits

    def layer_params(self) -> Sequence[LayerParams]:
        return [LayerParams(index=0)]

    def forward(self, token_ids: Tensor, step: Any) -> tuple[Tensor, Tensor]:
        values = token_ids.to(torch.float32).view(-1, 1, 1)
        out = torch.empty_like(values)
        return step.attend(0, values, values, values, out).view(-1, 1), token_ids.view(-1, 1)

    def logits(self, x: Tensor, residual: Tensor, rows: Tensor, step: Any) -> Tensor:
        logits = logits_of(x[rows].view(-1))
        if self.nan_after is not None:
            logits[:, 3] = torch.where(residual[rows].view(-1) == self.nan_after, torch.nan, logits[:, 3])
        return logits


class Bench:
    """A `ModelRunner` on the model above, and requests with blocks of their own."""

    def __init__(self, *, streams: bool = False, num_speculative_tokens: int = 0, max_num_seqs: int = 8) -> None:
        self.platform = CountingPlatform(streams=streams)
        spec = AttentionSpec(
            num_heads=1, num_kv_heads=1, head_dim=1, head_dim_v=1, scale=1.0, dtype="float32", kv_dtype="float32"
        )
        group = AttentionGroup(name="full_attention", spec=spec, layers=(0,), block_size=BLOCK_SIZE, kv_group=0)
        backend = TokenAttention(group, self.platform, enforce=False)
        kv = KVGroupInfo(
            spec=FullAttention(block_size=BLOCK_SIZE, bytes_per_block=4 * BLOCK_SIZE), num_blocks=NUM_BLOCKS, pool_id=0
        )
        self.model = TokenModel()
        self.caches = GroupCaches(group, backend, self.model.layer_params(), NUM_BLOCKS)
        self.runner = ModelRunner(
            self.model,  # type: ignore[arg-type]
            [self.caches],
            [kv],
            Ops(platform=self.platform),
            self.platform,
            RunnerLimits(
                max_num_seqs=max_num_seqs,
                max_model_len=64,
                vocab_size=VOCAB_SIZE,
                num_speculative_tokens=num_speculative_tokens,
            ),
        )
        self._free = np.random.default_rng(3).permutation(np.arange(1, NUM_BLOCKS)).astype(np.int32)

    def blocks(self, num_tokens: int) -> np.ndarray[Any, Any]:
        count = -(-num_tokens // BLOCK_SIZE)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, blocks: np.ndarray[Any, Any]) -> None:
        self._free = np.concatenate([self._free, blocks])

    def request(
        self, slot: int, tokens: Sequence[int], sampling: SamplingParams | None = None, *, room: int = 12, **more: Any
    ) -> NewRequest:
        """A request with blocks for ``room`` more tokens."""
        fields: dict[str, Any] = {
            "request_id": f"r{slot}",
            "index": 0,
            "num_prompt_tokens": len(tokens),
            "num_computed_tokens": 0,
            "num_cached_tokens": 0,
            "block_ids": (self.blocks(len(tokens) + room),),
            "sampling": sampling or SamplingParams(temperature=0),
        }
        return NewRequest(slot=slot, token_ids=np.array(tokens, np.int32), **(fields | more))

    def prefill(self, *requests: NewRequest, step: int = 0) -> StepPlan:
        """The plan that runs all of each request's tokens."""
        return StepPlan(
            step=step,
            new=requests,
            rows=np.array([request.slot for request in requests], np.int32),
            num_scheduled_tokens=np.array(
                [len(request.token_ids) - request.num_computed_tokens for request in requests], np.int32
            ),
        )

    def generate(self, request: NewRequest, num_tokens: int) -> list[int]:
        """The request alone, one token a step."""
        results = [self.runner.launch(self.prefill(request)).result()]
        results += [self.runner.launch(StepPlan(step=step)).result() for step in range(1, num_tokens)]
        return [int(result.sampled[0, 0]) for result in results]


def greedy_by_hand(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """What the model above says, without any of the worker's parts."""
    known = list(tokens)
    for _ in range(num_tokens):
        known.append(int(logits_of(torch.tensor([float(fingerprint(known))]))[0].argmax()))
    return known[len(tokens) :]


class _NoHostReads(TorchDispatchMode):
    """Fails on operations that make the host wait for the device, or whose result's shape depends on its values."""

    _FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "is_nonzero", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.lstrip("_")
        assert name not in {word.lstrip("_") for word in self._FORBIDDEN}, f"{func} makes the host wait"
        if name in ("index", "index_put_", "index_put"):
            dtypes = [index.dtype for index in args[1] if index is not None]
            assert torch.bool not in dtypes, f"{func} with a boolean mask makes the host wait"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    with _NoHostReads():
        yield


@pytest.fixture
def bench() -> type[Bench]:
    return Bench


@pytest.fixture
def by_hand() -> Callable[[Sequence[int], int], list[int]]:
    return greedy_by_hand


@pytest.fixture
def without_host_reads() -> Callable[[], Any]:
    return no_host_reads
