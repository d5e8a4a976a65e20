"""`Replay`: a scheduler fed with recorded outputs instead of a worker's."""

from __future__ import annotations

import numpy as np
from harness import full_group

from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import Request, StepResult
from octavo.core.config.scheduler import SchedulerConfig
from octavo.core.kv_cache import KVCacheManager
from octavo.core.scheduling import FirstComeFirstServed, Scheduler

BLOCK = 16
SAMPLING = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1000)


class Replay:
    """Feeds recorded outputs to a scheduler; notes how many cached tokens each request started with."""

    def __init__(self, num_blocks: int, *, max_num_seqs: int = 64, token_budget: int = 4096) -> None:
        self.kv = KVCacheManager([full_group(num_blocks, BLOCK)], max_num_seqs=max_num_seqs, max_model_len=4096)
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget)
        self.scheduler = Scheduler(config, self.kv, max_model_len=4096, policy=FirstComeFirstServed())
        self.outputs: dict[str, list[int]] = {}
        self.given: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.owner: dict[int, str] = {}
        self.rows = np.zeros(0, np.int32)

    def add(self, request_id: str, prompt: list[int], output: list[int]) -> None:
        self.outputs[request_id], self.given[request_id] = output, 0
        tokens = np.array(prompt, np.int32)
        self.scheduler.add(Request(request_id=request_id, prompt_token_ids=tokens, sampling=SAMPLING, max_tokens=len(output)))

    def run(self) -> None:
        while (plan := self.scheduler.schedule()) is not None:
            for new in plan.new:
                self.owner[new.slot] = new.request_id
                self.cached.setdefault(new.request_id, new.num_cached_tokens)
            self.rows = self.rows if plan.rows is None else plan.rows
            output = self.scheduler.update(self.result(plan.step))
            for slot in output.slots.tolist():
                self.given[self.owner[slot]] += 1
        assert not self.scheduler.has_unfinished()

    def result(self, step: int) -> StepResult:
        """The next recorded token for every row (the scheduler takes it where the row was sampled)."""
        sampled = np.zeros((len(self.rows), 1), np.int32)
        for i, slot in enumerate(self.rows.tolist()):
            request_id = self.owner.get(slot, "")
            output = self.outputs.get(request_id, [0])
            sampled[i] = output[min(self.given.get(request_id, 0), len(output) - 1)]
        return StepResult(step=step, sampled=sampled)
