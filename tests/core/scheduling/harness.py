"""`Harness`: a scheduler with a `FakeWorker` behind it, and the invariants that hold between any two calls."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from fake_worker import FakeWorker, expected_tokens

from octavo.core.api.kv_cache import FullAttention, KVGroupInfo
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import FinishedRequest, Proposer, Request, SchedulingPolicy, StepOutput, StepPlan
from octavo.core.config.scheduler import SchedulerConfig
from octavo.core.kv_cache import KVCacheManager
from octavo.core.kv_cache.recurrent import RecurrentStateManager
from octavo.core.scheduling import FirstComeFirstServed, Scheduler


def full_group(num_blocks: int, block_size: int = 4, pool_id: int = 0) -> KVGroupInfo:
    return KVGroupInfo(spec=FullAttention(block_size=block_size, bytes_per_block=1), num_blocks=num_blocks, pool_id=pool_id)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    n: int = 1,
    eos: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
    ignore_eos: bool = False,
    priority: int = 0,
    salt: str | None = None,
) -> Request:
    sampling = SamplingParams(
        n=n, max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop, ignore_eos=ignore_eos, temperature=0
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=np.array(prompt, np.int32),
        sampling=sampling,
        eos_token_ids=eos,
        max_tokens=max_tokens,
        priority=priority,
        cache_salt=salt,
    )


class Harness:
    """Plans and executes in order; up to ``max_in_flight`` plans wait for `finish_step`."""

    def __init__(
        self,
        groups: Sequence[KVGroupInfo],
        *,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        token_budget: int = 32,
        policy: SchedulingPolicy | None = None,
        proposer: Proposer | None = None,
        max_in_flight: int = 1,
        enable_prefix_caching: bool = True,
        long_prefill_token_threshold: int = 0,
        num_speculative_tokens: int = 3,
        enable_chunked_prefill: bool = True,
    ) -> None:
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(
            groups, max_num_seqs=max_num_seqs, max_model_len=max_model_len, enable_prefix_caching=enable_prefix_caching
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            long_prefill_token_threshold=long_prefill_token_threshold,
            num_speculative_tokens=num_speculative_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self.scheduler = Scheduler(
            config,
            self.kv,
            max_model_len=max_model_len,
            policy=policy or FirstComeFirstServed(),
            proposer=proposer,
            max_in_flight=max_in_flight,
        )
        self.worker = FakeWorker(
            groups,
            max_num_seqs,
            max_model_len,
            token_budget,
            decode_query_len=1 + (num_speculative_tokens if proposer else 0),
        )
        self.plans: deque[tuple[StepPlan, list[int]]] = deque()  # with the slots that ran when it was planned
        self.requests: dict[str, Request] = {}
        self.owner: dict[int, tuple[str, int]] = {}  # slot → completion, as an output processor keeps it
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishedRequest] = {}
        self.num_plans_without_rows = 0

    def add(self, request: Request) -> None:
        self.worker.salts[request.request_id] = request.cache_salt
        self.scheduler.add(request)
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        for ended in self.scheduler.abort(request_id):
            self.finished[ended.request_id, ended.index] = ended

    def plan(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.num_plans_without_rows += plan.rows is None
        self.plans.append((plan, self.running_slots()))
        return True

    def running_slots(self) -> list[int]:
        """Slots whose completions run and that the worker knows of (or learns of with the last plan)."""
        unknown = {state.slot for state in self.scheduler._roster.fresh}
        return [slot for slot in self.scheduler._roster.order.tolist() if slot not in unknown]

    def finish_step(self) -> StepOutput | None:
        if not self.plans:
            return None
        output = self.scheduler.update(self.worker.execute(*self.plans.popleft()))
        for started in output.started:
            self.owner[started.slot] = started.request_id, started.index
        for slot, row in zip(output.slots.tolist(), output.token_ids.tolist(), strict=True):
            key = self.owner[slot]
            assert key not in self.finished, f"{key} has ended, and got {row}"
            self.tokens.setdefault(key, []).extend(token for token in row if token != -1)
        for ended in output.finished:
            key = ended.request_id, ended.index
            assert key not in self.finished
            assert self.owner[ended.slot] == key
            self.finished[key] = ended
        return output

    def run(self, limit: int = 10_000) -> int:
        """Steps until everything has ended; the number of steps."""
        steps = 0
        while self.scheduler.has_unfinished():
            planned = self.plan()
            assert planned or self.plans, "unfinished requests, nothing planned and nothing in flight: a deadlock"
            if len(self.plans) == self.scheduler.max_in_flight or not planned:
                self.finish_step()
                steps += 1
            assert steps < limit
        self.check_idle()
        return steps

    def check_outputs(self) -> None:
        """Every completion that wasn't aborted gave exactly what `expected_tokens` says."""
        for request in self.requests.values():
            for index in range(request.sampling.n):
                key = request.request_id, index
                ended = self.finished[key]
                want, reason, stop_reason = expected_tokens(request, index, self.max_model_len)
                got = self.tokens.get(key, [])
                if ended.reason == "abort":
                    assert got == want[: len(got)], (key, got, want)
                else:
                    assert (got, ended.reason, ended.stop_reason) == (want, reason, stop_reason), key

    def check_invariants(self) -> None:
        check_pools(self.kv)

    def check_idle(self) -> None:
        """Nothing runs: no block is lost."""
        self.kv.set_in_flight(0, 0) if not self.plans else None
        self.check_invariants()
        for pool in self.kv.pools:
            assert pool.num_held == 0, f"{pool.num_held} blocks are held by nobody"
            assert not pool.ref_count.any()


def check_pools(kv: KVCacheManager) -> None:
    """Reference counts equal the table entries; every block is free, held or in limbo, once; indexes and keys agree."""
    held: list[Counter[int]] = [Counter() for _ in kv.pools]
    for manager, pool in zip(kv.managers, kv._pool_of, strict=True):
        held[pool].update(manager.table[manager.table > 0].tolist())
        if isinstance(manager, RecurrentStateManager):
            held[pool].update(manager.left[manager.left > 0].tolist())
    for pool, counts in zip(kv.pools, held, strict=True):
        for block in range(pool.num_blocks):
            assert pool.ref_count[block] == counts[block], f"block {block}: {pool.ref_count[block]} references, {counts[block]} held"
        free = pool._free.blocks().tolist()
        assert len(free) == pool.num_free == len(set(free))
        assert 0 not in free
        assert all(pool.ref_count[block] == 0 for block in free)
        assert pool.num_free + pool.num_held + pool.num_limbo == pool.num_blocks - 1
        assert pool.num_held == len(counts)
        for number, index in enumerate(pool.indexes):
            for key, block in index.items():
                assert pool.key_of(block) == (number, key)
        assert sum(len(index) for index in pool.indexes) == sum(key is not None for key in pool._keys)
