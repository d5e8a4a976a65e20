"""The scheduler's state machine for hypothesis: anything an engine may do, in any order, on any small configuration."""

from __future__ import annotations

from fake_worker import FakeModel
from harness import Harness, make_request
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.api.errors import UsageError
from octavo.core.api.kv_cache import MLA, FullAttention, KVGroupInfo, RecurrentState, SlidingWindow
from octavo.core.scheduling import FirstComeFirstServed, Priority
from octavo.core.scheduling.ngram import NgramProposer

MAX_MODEL_LEN = 40
PROMPTS = tuple(tuple((7 * k + i * i) % 6 for i in range(24)) for k in range(3))  # what requests have in common


@st.composite
def kv_groups(draw: st.DrawFn) -> list[KVGroupInfo]:
    """One to three groups of any spec, in pools of their own or shared ones."""
    size = draw(st.sampled_from([1, 2, 4]))
    groups = []
    for number in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        spec = draw(
            st.sampled_from(
                [
                    FullAttention(block_size=size, bytes_per_block=1),
                    MLA(block_size=2 * size, bytes_per_block=1),
                    SlidingWindow(block_size=size, bytes_per_block=1, window=1),
                    SlidingWindow(block_size=size, bytes_per_block=1, window=7),
                    RecurrentState(block_size=4 * size, bytes_per_block=1),
                ]
            )
        )
        num_blocks = draw(st.integers(12, 60))
        groups.append(KVGroupInfo(spec=spec, num_blocks=num_blocks, pool_id=draw(st.sampled_from([0, number]))))
    return groups


REQUESTS = st.fixed_dictionaries(
    {
        "start": st.sampled_from(PROMPTS),
        "shared": st.integers(0, 24),
        "own": st.lists(st.integers(0, 3), min_size=1, max_size=6),
        "max_tokens": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "eos": st.sampled_from([(), (3,), (3, 4)]),
        "stop": st.sampled_from([(), (5,), tuple(range(5, 30))]),
        "min_tokens": st.sampled_from([0, 0, 2]),
        "ignore_eos": st.booleans(),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, None, "a"]),
        "logprobs": st.sampled_from([None, 0]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "stepwise": st.sampled_from([False, False, True]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """`Harness` and `FakeWorker` check every step; the invariants are checked after every rule."""

    @initialize(
        groups=kv_groups(),
        max_num_seqs=st.integers(1, 6),
        token_budget=st.sampled_from([1, 3, 7, 16, 64]),
        max_in_flight=st.sampled_from([1, 1, 2, 2, 3]),
        caching=st.sampled_from([True, True, True, False]),
        prefix_hash=st.sampled_from(["sha256", "sha256", "xxh3"]),
        cap=st.sampled_from([0, 0, 4]),
        chunked=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from([FirstComeFirstServed, Priority]),
        speculative=st.sampled_from([False, False, True]),
        first=st.lists(REQUESTS, min_size=1, max_size=4),  # hypothesis leaves the rule `add` out of many examples
    )
    def start(self, groups, policy, speculative, caching, cap, chunked, first, **options) -> None:
        speculative = speculative and not any(isinstance(group.spec, RecurrentState) for group in groups)
        self.harness = Harness(
            groups,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=cap,
            enable_chunked_prefill=chunked,
            policy=policy(),
            proposer=NgramProposer() if speculative else None,
            model=FakeModel(vocab=8, memory=2) if speculative else FakeModel(),
            **options,
        )
        self.paused = False
        for request in first:
            self.add(request)

    @rule(options=REQUESTS)
    def add(self, options) -> None:
        start, shared, own = (options[name] for name in ("start", "shared", "own"))
        more = {name: value for name, value in options.items() if name not in ("start", "shared", "own")}
        more["n"] = 1 if options["stepwise"] else options["n"]
        try:
            self.harness.add(make_request(str(len(self.harness.requests)), [*start[:shared], *own], **more))
        except UsageError as error:
            assert any(word in str(error) for word in ("KV blocks", "context", "chunked prefill is off")), error  # noqa: PT017 (either is right)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.requests))))

    @precondition(lambda self: self.harness.unfinished())
    @rule(data=st.data())
    def stop_from_outside(self, data) -> None:
        self.harness.stop(data.draw(st.sampled_from(self.harness.unfinished())))

    @precondition(lambda self: self.harness.awaiting)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 5), max_size=3, unique=True), keep=st.booleans())
    def step_beam(self, data, tokens, keep) -> None:
        key = data.draw(st.sampled_from(sorted(self.harness.awaiting)))
        for token in tokens:
            self.harness.fork(key, 100 + len(self.harness.children), token)
        if keep:
            self.harness.advance(key)
        else:
            self.harness.stop(key)

    @rule()
    def plan(self) -> None:
        planned = self.harness.plan()
        assert not (planned and self.paused)

    @rule()
    def plan_again(self) -> None:
        self.plan()

    @rule()
    def finish_step(self) -> None:
        self.harness.finish_step()

    @rule()
    def finish_step_too(self) -> None:
        self.finish_step()

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused) -> None:
        self.harness.scheduler.pause() if paused else self.harness.scheduler.resume()
        self.paused = paused

    @rule()
    def reset_prefix_cache(self) -> None:
        if self.harness.scheduler.reset_prefix_cache():
            assert not any(index for pool in self.harness.kv.pools for index in pool.indexes)

    @invariant()
    def pools_and_tables_agree(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.resume()
            self.harness.run()
            self.harness.check_outputs()
