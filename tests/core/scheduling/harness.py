"""`Harness`: a scheduler with a `FakeWorker` behind it, and the invariants that hold between any two calls."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np
from fake_worker import FakeModel, FakeWorker, expected_tokens, fingerprints, forbidden_ids

from octavo.core.api.kv_cache import FullAttention, KVGroupInfo, KVManager
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
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    stepwise: bool = False,
) -> Request:
    sampling = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop_token_ids=stop,
        ignore_eos=ignore_eos,
        temperature=0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=np.array(prompt, np.int32),
        sampling=sampling,
        eos_token_ids=eos,
        max_tokens=max_tokens,
        priority=priority,
        cache_salt=salt,
        stepwise=stepwise,
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
        prefix_hash: str = "sha256",
        long_prefill_token_threshold: int = 0,
        num_speculative_tokens: int = 3,
        enable_chunked_prefill: bool = True,
        model: FakeModel | None = None,
        managers: Mapping[str, type[KVManager]] | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(
            groups,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            prefix_hash=prefix_hash,
            managers=managers,
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
            model=model or FakeModel(),
        )
        self.plans: deque[tuple[StepPlan, list[int]]] = deque()  # with the slots that ran when it was planned
        self.requests: dict[str, Request] = {}
        self.owner: dict[int, tuple[str, int]] = {}  # slot → completion, as an output processor keeps it
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishedRequest] = {}
        self.sequences: dict[tuple[str, int], list[int]] = {}  # prompt and output of each completion
        self.awaiting: set[tuple[str, int]] = set()  # stepwise completions whose next step is to be chosen
        self.children: set[tuple[str, int]] = set()  # made by `fork`
        self.logprobs: dict[tuple[str, int], list[int]] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.num_plans_without_rows = 0

    def add(self, request: Request) -> None:
        self.worker.salts[request.request_id] = request.cache_salt
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        for index in range(request.sampling.n):
            self.sequences[request.request_id, index] = request.prompt_token_ids.tolist()

    def abort(self, request_id: str) -> None:
        for ended in self.scheduler.abort(request_id):
            self._end(ended)

    def stop(self, key: tuple[str, int]) -> None:
        """End a completion from outside, as for a stop string."""
        self.scheduler.finish(*key, reason="stop", stop_reason="outside")
        self._end(FinishedRequest(slot=-1, request_id=key[0], index=key[1], reason="abort"))

    def fork(self, key: tuple[str, int], new_index: int, token: int) -> None:
        self.scheduler.fork(*key, new_index=new_index, token_id=token)
        child = key[0], new_index
        self.children.add(child)
        self.sequences[child] = [*self.sequences[key][:-1], token]

    def advance(self, key: tuple[str, int]) -> None:
        self.scheduler.advance(*key)
        self.awaiting.discard(key)

    def unfinished(self) -> list[tuple[str, int]]:
        return [key for key in self.sequences if key not in self.finished]

    def _end(self, ended: FinishedRequest) -> None:
        key = ended.request_id, ended.index
        assert key not in self.finished, f"{key} ends twice"
        self.finished[key] = ended
        self.awaiting.discard(key)

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
            self._take_tokens(key, [token for token in row if token != -1])
        self._take_logprobs(output)
        for ended in output.finished:
            assert self.owner[ended.slot] == (ended.request_id, ended.index)
            self._end(ended)
        return output

    def _take_tokens(self, key: tuple[str, int], tokens: list[int]) -> None:
        """Each token is the one that follows; nothing about scheduling can change it."""
        request, sequence = self.requests[key[0]], self.sequences[key]
        for token in tokens:
            num_output = len(sequence) - len(request.prompt_token_ids)
            banned = forbidden_ids(request.sampling, request.eos_token_ids, num_output)
            fingerprint = fingerprints(sequence, request.cache_salt)[-1]
            assert token == self.worker.model.next_token(sequence, fingerprint, key[1], banned), key
            sequence.append(token)
        self.tokens.setdefault(key, []).extend(tokens)
        if request.stepwise:
            self.awaiting.add(key)

    def _take_logprobs(self, output: StepOutput) -> None:
        if output.logprobs is not None:
            for row, token in zip(output.logprobs.rows.tolist(), output.logprobs.token_ids[:, 0].tolist(), strict=True):
                self.logprobs.setdefault(self.owner[int(output.slots[row])], []).append(token)
        if output.prompt_logprobs is not None:
            for slot, token in zip(
                output.prompt_logprobs.rows.tolist(), output.prompt_logprobs.token_ids[:, 0].tolist(), strict=True
            ):
                self.prompt_logprobs.setdefault(self.owner[slot][0], []).append(token)

    def run(self, limit: int = 10_000) -> int:
        """Steps until everything has ended; the number of steps."""
        steps = 0
        while self.scheduler.has_unfinished():
            planned = self.plan()
            if not planned and not self.plans and self.awaiting:
                assert not self.scheduler.stats().num_waiting, "parked completions keep others from running"
                for key in sorted(self.awaiting):
                    self.advance(key)
                continue
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
                if key in self.children:
                    continue
                want, reason, stop_reason = expected_tokens(request, index, self.max_model_len, self.worker.model)
                got = self.tokens.get(key, [])
                if ended.reason == "abort":
                    assert got == want[: len(got)], (key, got, want)
                else:
                    assert (got, ended.reason, ended.stop_reason) == (want, reason, stop_reason), key
                    if request.sampling.logprobs is not None:
                        assert self.logprobs[key] == want
                    if request.sampling.prompt_logprobs is not None and self.finished[key[0], 0].reason != "abort":
                        assert self.prompt_logprobs.get(key[0], []) == request.prompt_token_ids.tolist()[1:]

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
            assert pool.ref_count[block] == counts[block], (
                f"block {block}: {pool.ref_count[block]} references, {counts[block]} held"
            )
        free = pool.free_blocks().tolist()
        assert len(free) == pool.num_free == len(set(free))
        assert 0 not in free
        assert all(pool.ref_count[block] == 0 for block in free)
        assert pool.num_free + pool.num_held + pool.num_limbo == pool.num_blocks - 1
        assert pool.num_held == len(counts)
        for number, index in enumerate(pool.indexes):
            for key, block in index.items():
                assert pool.key_of(block) == (number, key)
        assert sum(len(index) for index in pool.indexes) == sum(key is not None for key in pool._keys)
