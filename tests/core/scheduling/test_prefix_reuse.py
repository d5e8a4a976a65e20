"""What the prefix cache reuses equals what a radix tree would, rounded down to whole blocks; also when it has to evict."""

from __future__ import annotations

import pytest
from prefix_traces import Trace, branching, shared_system_prompt, traces
from radix_tree import RadixTree
from replay import BLOCK, Replay


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
