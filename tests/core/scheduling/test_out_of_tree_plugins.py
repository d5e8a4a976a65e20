"""A scheduling policy, a proposer and a KV manager that come in a distribution of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, full_group, make_request

from octavo.core.api.errors import PluginError
from octavo.core.api.kv_cache import FullAttention, KVGroupInfo
from octavo.core.api.scheduling import SchedulingPolicy

MANIFEST = """
[plugin]
name = "outsider"
api = "1.0"
[scheduling_policy.shortest]
help = "fewest tokens left first"
[proposer.echo]
help = "guesses that the last token comes again"
[kv_manager.keeper]
help = "full attention"
specs = ["FullAttention"]
"""

PLUGIN = """
import numpy as np
from octavo.api.kv_cache import KVManager
from octavo.api.scheduling import Proposer, SchedulingPolicy


class Shortest(SchedulingPolicy):
    name = "shortest"

    def key(self, request):
        return (request.num_prompt_tokens + request.max_tokens - request.num_tokens, request.arrival)


class Echo(Proposer):
    def propose(self, tokens, num_speculative_tokens):
        return [np.repeat(sequence[-1:], 2) for sequence in tokens]


class Keeper(KVManager):
    '''One block for every block_size tokens, written from nothing but the contract.'''

    def __init__(self, info, pool, index, *, max_num_seqs, max_model_len):
        super().__init__(info, pool, index, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.table = np.zeros((max_num_seqs, -(-max_model_len // self.block_size)), np.int32)

    def used(self, slot):
        return int(np.count_nonzero(self.table[slot]))

    def peak_blocks(self, num_tokens, max_chunk):
        return -(-num_tokens // self.block_size)

    def next_change(self, slots):
        return np.array([self.used(slot) * self.block_size for slot in slots], np.int32)

    def demand(self, slots, starts, ends):
        return np.array([max(-(-int(e) // self.block_size) - self.used(s), 0) for s, e in zip(slots, ends)], np.int32)

    def extend(self, slots, starts, ends, changes):
        for slot, count in zip(slots.tolist(), self.demand(slots, starts, ends).tolist()):
            if count:
                columns = np.arange(self.used(slot), self.used(slot) + count, dtype=np.int32)
                self.table[slot, columns] = self.pool.allocate(count)
                changes.set_entries(np.full(count, slot, np.int32), columns, self.table[slot, columns])

    def match(self, keys, limit, last_query):
        found = []
        for key in keys[: limit // self.block_size]:
            if key not in self.pool.indexes[self.index]:
                break
            found.append(self.pool.indexes[self.index][key])
        return len(found) * self.block_size, np.array(found, np.int32)

    def adopt(self, slot, hit, num_cached_tokens, changes):
        self.pool.acquire(hit)
        self.table[slot, : len(hit)] = hit

    def commit(self, slots, columns, keys):
        self.pool.register(self.index, keys, self.table[slots, columns])

    def fork(self, parent, child, num_tokens, changes):
        raise NotImplementedError

    def free(self, slot):
        blocks = self.entries(slot)[::-1]
        self.table[slot] = 0
        self.pool.release(blocks)

    def entries(self, slot):
        return self.table[slot, : self.used(slot)].copy()
"""


@pytest.fixture
def registry(local_plugins: Any) -> Any:
    local_plugins.add(
        "outsider",
        manifest=MANIFEST,
        files={"plugin.py": PLUGIN},
        entry_points={
            "octavo.scheduling_policies": {"shortest": "outsider.plugin:Shortest"},
            "octavo.proposers": {"echo": "outsider.plugin:Echo"},
            "octavo.kv_managers": {"keeper": "outsider.plugin:Keeper"},
        },
    )
    return local_plugins.registry()


def group(manager: str | None = None) -> KVGroupInfo:
    return KVGroupInfo(spec=FullAttention(block_size=4, bytes_per_block=1), num_blocks=30, pool_id=0, manager=manager)


def test_shortest_remaining_first(registry: Any) -> None:
    harness = Harness([group()], max_num_seqs=1, policy=registry.load("scheduling_policy", "shortest")())
    for name, max_tokens in (("long", 9), ("short", 2), ("middle", 5)):
        harness.add(make_request(name, [1, 2], max_tokens=max_tokens))
    harness.run()
    harness.check_outputs()
    assert [request_id for request_id, _ in harness.finished] == ["short", "middle", "long"]


def test_a_proposer_changes_no_token(registry: Any) -> None:
    harness = Harness([group()], proposer=registry.load("proposer", "echo")())
    harness.add(make_request("a", [1, 2], max_tokens=20))
    harness.run()
    harness.check_outputs()


def test_a_kv_manager_keeps_its_group_by_the_contract(registry: Any) -> None:
    managers = {"keeper": registry.load("kv_manager", "keeper")}
    harness = Harness([group("keeper"), group()], managers=managers, max_num_seqs=3)
    for i in range(8):
        harness.add(make_request(str(i), np.arange(3 * i + 1) % 5, max_tokens=9))
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().prefix_hits_total > 0


def test_our_own_policies_and_proposer_are_plugins_too() -> None:
    from octavo.core.discovery import installed

    names = {("scheduling_policy", "fcfs"), ("scheduling_policy", "priority"), ("proposer", "ngram")}
    assert names <= {(entry.kind, entry.name) for entry in installed().entries}
    assert installed().load("proposer", "ngram").location == "engine"
    assert installed().load("scheduling_policy", "priority").name == "priority"


class KeylessPolicy(SchedulingPolicy):
    name = "keyless"

    def key(self, request: object) -> tuple[float, ...]:
        raise KeyError("deadline")


def test_a_policy_that_fails_refuses_the_request_with_a_typed_error_and_leaves_nothing() -> None:
    harness = Harness([full_group(20)], policy=KeylessPolicy())
    with pytest.raises(PluginError, match="scheduling policy KeylessPolicy gave no key for request 'a': KeyError: 'deadline'"):
        harness.add(make_request("a", [1, 2]))
    assert not harness.scheduler.has_unfinished()
    assert not harness.scheduler.stats().num_waiting
