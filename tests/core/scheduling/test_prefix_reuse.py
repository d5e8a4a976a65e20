"""What the prefix cache reuses equals what a radix tree would, rounded down to whole blocks; also when it has to evict."""

from __future__ import annotations

import numpy as np
import pytest
from harness import full_group
from prefix_traces import Trace, branching, shared_system_prompt, traces
from radix_tree import RadixTree

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
            sampled = np.zeros((len(self.rows), 1), np.int32)
            for i, slot in enumerate(self.rows.tolist()):
                request_id = self.owner[slot]
                sampled[i] = self.outputs[request_id][self.given[request_id]]
            output = self.scheduler.update(StepResult(step=plan.step, sampled=sampled))
            for slot in output.slots.tolist():
                self.given[self.owner[slot]] += 1
        assert not self.scheduler.has_unfinished()


def reused(trace: Trace, num_blocks: int) -> list[int]:
    """Cached tokens of each request, one after the other."""
    replay = Replay(num_blocks)
    for number, (prompt, output) in enumerate(trace):
        replay.add(str(number), prompt, output)
        replay.run()
    return [replay.cached[str(number)] for number in range(len(trace))]


@pytest.mark.parametrize(("name", "trace"), list(traces()), ids=[name for name, _ in traces()])
def test_reused_tokens_equal_those_of_a_radix_tree(name: str, trace: Trace) -> None:
    tree, expected = RadixTree(), []
    for prompt, output in trace:
        expected.append(tree.match(prompt) // BLOCK * BLOCK)
        tree.insert(prompt + output[:-1])  # the last token is never computed
    got = reused(trace, 40_000)
    print(f"{name}: {sum(got)} of {sum(len(prompt) for prompt, _ in trace)} prompt tokens reused")
    assert got == expected


@pytest.mark.parametrize("share", [0.15, 0.4])
@pytest.mark.parametrize(("name", "trace"), list(traces()), ids=[name for name, _ in traces()])
def test_hit_rate_under_eviction_is_that_of_a_radix_tree_of_the_same_size(name: str, trace: Trace, share: float) -> None:
    whole = RadixTree()
    for prompt, output in trace:
        whole.insert(prompt + output[:-1])
    longest = max(len(prompt) + len(output) for prompt, output in trace)
    num_blocks = max(int(share * whole.size), longest + BLOCK) // BLOCK + 1
    tree, hits = RadixTree(num_blocks * BLOCK), 0
    for prompt, output in trace:
        hits += tree.match(prompt) // BLOCK * BLOCK
        tree.insert(prompt + output[:-1])
    total = sum(len(prompt) for prompt, _ in trace)
    ours, theirs = sum(reused(trace, num_blocks + 1)) / total, hits / total
    print(f"{name}, {share:.0%} of what it touches: hit rate {ours:.1%}, radix tree {theirs:.1%}")
    assert ours >= theirs - 0.02


@pytest.mark.parametrize(
    "trace", [shared_system_prompt(3, requests=60), branching(3, tasks=6, depth=1)], ids=["system", "branching"]
)
def test_requests_that_arrive_together_share_what_the_first_one_computes(trace: Trace) -> None:
    replay, tree, expected = Replay(40_000), RadixTree(), 0
    for number, (prompt, output) in enumerate(trace):
        replay.add(str(number), prompt, output)
        expected += tree.match(prompt) // BLOCK * BLOCK
        tree.insert(prompt)
    replay.run()
    assert sum(replay.cached.values()) == expected
