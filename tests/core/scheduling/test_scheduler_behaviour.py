"""What the scheduler promises, one promise a test."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Harness, full_group, make_request

from octavo.core.api.errors import EngineError, UsageError
from octavo.core.api.kv_cache import KVGroupInfo, RecurrentState
from octavo.core.api.scheduling import SchedulingPolicy, StepPlan, StepResult
from octavo.core.scheduling import FirstComeFirstServed, Priority


def rows_of(plan: StepPlan) -> dict[int, int]:
    assert plan.rows is not None
    assert plan.num_scheduled_tokens is not None
    return dict(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True))


def started(harness: Harness) -> list[str]:
    """Ids in the order in which they got a slot."""
    return [new.request_id for plan, _ in harness.plans for new in plan.new]


def test_a_decode_step_in_which_nothing_happens_is_a_number() -> None:
    harness = Harness([full_group(50, 16)])
    for i in range(4):
        harness.add(make_request(str(i), [i, 1, 2], max_tokens=12))
    for _ in range(3):
        harness.plan()
        harness.finish_step()
    harness.plan()
    plan = harness.plans[-1][0]
    assert plan == StepPlan(step=3)


def test_rows_are_repeated_while_blocks_are_added() -> None:
    harness = Harness([full_group(50, 2)])
    harness.add(make_request("a", [1, 2, 3], max_tokens=30))
    harness.run()
    assert harness.num_plans_without_rows == 29


def test_a_long_prompt_is_cut_by_the_budget() -> None:
    harness = Harness([full_group(50)], token_budget=10)
    harness.add(make_request("a", range(25), max_tokens=2))
    counts = []
    while harness.plan():
        counts.append(sum(rows_of(harness.plans[-1][0]).values()) if harness.plans[-1][0].rows is not None else 1)
        harness.finish_step()
    assert counts == [10, 10, 5, 1]


def test_decodes_come_first_and_are_never_starved_by_a_long_prompt() -> None:
    harness = Harness([full_group(80)], token_budget=8)
    harness.add(make_request("decode", [1, 2], max_tokens=30))
    harness.plan()
    harness.finish_step()
    harness.add(make_request("long", range(40), max_tokens=2))
    for _ in range(5):
        harness.plan()
        plan = harness.plans[-1][0]
        assert rows_of(plan) == {0: 1, 1: 7}
        assert plan.rows is not None
        assert plan.rows.tolist() == [0, 1]
        assert plan.num_decodes == 1
        harness.finish_step()


def test_the_cap_leaves_room_for_other_prompts() -> None:
    harness = Harness([full_group(80)], token_budget=16, long_prefill_token_threshold=5)
    harness.add(make_request("long", range(40), max_tokens=2))
    harness.add(make_request("short", [1, 2, 3], max_tokens=2))
    harness.plan()
    assert rows_of(harness.plans[-1][0]) == {0: 5, 1: 3}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    harness = Harness([full_group(80)], token_budget=40, enable_chunked_prefill=False)
    harness.add(make_request("a", range(25), max_tokens=2))
    harness.add(make_request("b", range(10, 40), max_tokens=2))
    harness.plan()
    assert rows_of(harness.plans[-1][0]) == {0: 25}
    harness.finish_step()
    harness.plan()
    assert rows_of(harness.plans[-1][0]) == {0: 1, 1: 30}


def test_first_come_first_served_keeps_the_order_of_arrival() -> None:
    harness = Harness([full_group(80)], max_num_seqs=1)
    for name in "abc":
        harness.add(make_request(name, [1, 2], max_tokens=1, priority=-ord(name)))
    order = []
    while harness.scheduler.has_unfinished():
        harness.plan()
        order += started(harness)
        harness.finish_step()
    assert order == ["a", "b", "c"]


def test_priority_serves_low_numbers_first_and_preempts_high_ones() -> None:
    harness = Harness([full_group(9, 2)], max_num_seqs=2, policy=Priority(), enable_prefix_caching=False)
    harness.add(make_request("late", [1, 2, 3], max_tokens=12, priority=5))
    harness.add(make_request("first", [4, 5, 6], max_tokens=12, priority=1))
    harness.plan()
    assert started(harness) == ["first", "late"]
    while not harness.scheduler.stats().preemptions_total:
        harness.plan()
        harness.finish_step()
    assert [harness.scheduler._roster.state(slot).request_id for slot in harness.scheduler._roster.order] == ["first"]
    harness.run()
    harness.check_outputs()


def test_the_last_to_come_is_preempted_first_and_ends_with_the_same_tokens() -> None:
    harness = Harness([full_group(8, 2)], max_num_seqs=2)
    harness.add(make_request("a", [1, 2, 3], max_tokens=10))
    harness.add(make_request("b", [4, 5, 6], max_tokens=10))
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().preemptions_total >= 1
    assert list(harness.finished) == [("a", 0), ("b", 0)]


def test_a_preempted_request_does_not_come_back_to_be_preempted_at_once() -> None:
    harness = Harness([full_group(40, 4)], max_num_seqs=8, enable_prefix_caching=False)
    for i in range(8):
        harness.add(make_request(str(i), [i], max_tokens=50))
    steps = harness.run()
    preemptions = harness.scheduler.stats().preemptions_total
    print(f"{preemptions} preemptions in {steps} steps")
    assert 0 < preemptions <= 16


class ShortestRemainingFirst(SchedulingPolicy):
    """An out-of-tree policy."""

    name = "srf"

    def key(self, request) -> tuple[float, ...]:
        return (request.num_prompt_tokens + request.max_tokens - request.num_tokens, request.arrival)


def test_a_policy_from_outside_decides_the_order() -> None:
    harness = Harness([full_group(80)], max_num_seqs=1, policy=ShortestRemainingFirst())
    for name, max_tokens in (("long", 9), ("short", 2), ("middle", 5)):
        harness.add(make_request(name, [1, 2], max_tokens=max_tokens))
    harness.run()
    assert [key for key, _ in harness.finished] == ["short", "middle", "long"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 4, ["empty"]),
        (range(64), 4, ["64 tokens", "room for 63"]),
        (range(30), 30, ["15 KV blocks", "30 prompt tokens", "30 new", "has 9"]),
    ],
)
def test_what_could_never_run_is_refused_at_once_with_the_numbers(prompt, max_tokens, words) -> None:
    harness = Harness([full_group(10)], max_model_len=64)
    with pytest.raises(UsageError) as caught:
        harness.add(make_request("a", prompt, max_tokens=max_tokens))
    assert all(word in str(caught.value) for word in words), caught.value
    assert not harness.scheduler.has_unfinished()


def test_what_just_fits_is_accepted_and_runs() -> None:
    harness = Harness([full_group(10)], max_model_len=64)
    harness.add(make_request("a", range(30), max_tokens=7))  # 36 positions are written: 9 blocks of 4
    harness.run()
    harness.check_outputs()
    with pytest.raises(UsageError):
        harness.add(make_request("b", range(30), max_tokens=8))


def test_an_id_in_use_is_refused() -> None:
    harness = Harness([full_group(20)])
    harness.add(make_request("a", [1]))
    with pytest.raises(UsageError, match="in use"):
        harness.scheduler.add(make_request("a", [1]))


@pytest.mark.parametrize("when", range(6))
def test_abort_at_any_moment_gives_everything_back(when: int) -> None:
    harness = Harness([full_group(40)], max_in_flight=2, token_budget=5)
    harness.add(make_request("a", range(12), max_tokens=9, n=3))
    harness.add(make_request("b", range(9), max_tokens=4))
    for _ in range(when):
        harness.plan()
        harness.finish_step() if len(harness.plans) == 2 else None
    harness.abort("a")
    assert harness.scheduler.abort("a") == []
    harness.run()
    harness.check_outputs()


def test_pause_holds_everything_and_resume_goes_on() -> None:
    harness = Harness([full_group(40)])
    harness.add(make_request("a", [1, 2, 3]))
    harness.plan()
    harness.finish_step()
    harness.scheduler.pause()
    assert not harness.plan()
    harness.scheduler.resume()
    harness.run()
    harness.check_outputs()


def test_drain_takes_no_new_requests_and_finishes_the_others() -> None:
    harness = Harness([full_group(40)])
    harness.add(make_request("a", [1, 2, 3]))
    harness.scheduler.drain()
    with pytest.raises(EngineError, match="draining"):
        harness.add(make_request("b", [1]))
    harness.run()
    harness.scheduler.resume()
    harness.add(make_request("b", [1]))
    harness.run()
    harness.check_outputs()


def test_reset_forgets_prefixes_only_when_nothing_runs() -> None:
    harness = Harness([full_group(40)])
    harness.add(make_request("a", range(20)))
    harness.plan()
    assert not harness.scheduler.reset_prefix_cache()
    harness.run()
    assert harness.kv.pools[0].indexes[0]
    assert harness.scheduler.reset_prefix_cache()
    harness.add(make_request("b", range(20)))
    harness.run()
    assert harness.scheduler.stats().prefix_hits_total == 0
    harness.check_outputs()


def test_a_full_hit_computes_only_its_last_token_again_and_writes_nothing() -> None:
    harness = Harness([full_group(40)])
    harness.add(make_request("a", range(16), max_tokens=1))
    harness.run()
    written = harness.worker.num_written
    harness.add(make_request("b", range(16), max_tokens=1))
    harness.plan()
    new = harness.plans[-1][0].new[0]
    assert (new.num_computed_tokens, new.num_cached_tokens) == (15, 16)
    harness.run()
    assert harness.worker.num_written == written
    harness.check_outputs()


def test_prefixes_are_shared_only_under_one_salt() -> None:
    harness = Harness([full_group(40)])
    hits = []
    for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", None)):
        before = harness.scheduler.stats().prefix_hits_total
        harness.add(make_request(name, range(16), max_tokens=1, salt=salt))
        harness.run()
        hits.append(harness.scheduler.stats().prefix_hits_total - before)
    assert hits == [0, 0, 15, 15]
    harness.check_outputs()


def test_prompt_logprobs_need_every_position_computed() -> None:
    harness = Harness([full_group(40)])
    harness.add(make_request("a", range(16), max_tokens=1))
    harness.run()
    harness.add(make_request("b", range(16), max_tokens=1, prompt_logprobs=0))
    harness.run()
    harness.check_outputs()
    assert harness.prompt_logprobs["b"] == list(range(1, 16))


def test_prompt_logprobs_are_given_once_though_the_prompt_is_computed_twice() -> None:
    harness = Harness([full_group(9, 2)], max_num_seqs=2, token_budget=5)
    harness.add(make_request("a", [1, 2, 3], max_tokens=10))
    harness.plan()
    harness.finish_step()
    harness.add(make_request("b", range(8), max_tokens=2, prompt_logprobs=0))
    harness.plan()
    harness.finish_step()
    given = harness.prompt_logprobs["b"]
    assert given == [1, 2, 3, 4]
    victim = harness.scheduler._roster.choose_victim()
    assert victim.request_id == "b"
    harness.scheduler._roster.preempt(victim)
    harness.run()
    harness.check_outputs()
    assert harness.prompt_logprobs["b"] == [1, 2, 3, 4, 5, 6, 7]


def test_a_stop_token_before_min_tokens_does_not_end_a_completion() -> None:
    """Whatever the worker samples: it should not have."""
    harness = Harness([full_group(20)])
    harness.add(make_request("a", [1], max_tokens=9, eos=(3,), stop=(5,), min_tokens=3))
    ends = []
    for step, token in enumerate((3, 5, 7, 8, 5)):
        assert harness.scheduler.schedule() is not None
        output = harness.scheduler.update(StepResult(step=step, sampled=np.array([[token]], np.int32)))
        ends += [(step, end.reason, end.stop_reason) for end in output.finished]
    assert ends == [(4, "stop", 5)]


def test_results_out_of_order_are_refused() -> None:
    harness = Harness([full_group(40)], max_in_flight=2)
    harness.add(make_request("a", [1, 2]))
    harness.plan()
    harness.plan()
    with pytest.raises(EngineError, match="step 1 came when step 0's was due"):
        harness.scheduler.update(StepResult(step=1, sampled=np.zeros((1, 1), np.int32)))


def test_async_steps_plan_ahead_of_results_and_change_no_token() -> None:
    sync, ahead = (Harness([full_group(60, 2)], max_in_flight=n) for n in (1, 2))
    for harness in (sync, ahead):
        for i in range(5):
            harness.add(make_request(str(i), [i, i + 1], max_tokens=6 + i, eos=(3,), n=1 + i % 2))
        harness.run()
        harness.check_outputs()
    assert sync.tokens == ahead.tokens


def test_stats_count_what_happened() -> None:
    harness = Harness([full_group(10, 2)], max_num_seqs=2)
    for name in "ab":
        harness.add(make_request(name, range(6), max_tokens=8))
    harness.plan()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.steps_total) == (1, 1, 1)  # b lets a fill the cache first
    assert stats.kv_usage == pytest.approx(3 / 9)
    steps = harness.run() + 1
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.prefix_queries_total >= 12
    assert stats.prefix_hits_total >= 5
    assert stats.steps_total in (steps - 1, steps)
    assert stats.scheduled_tokens_total > 14
    assert stats.preemptions_total == harness.scheduler._roster.num_preemptions > 0


@pytest.mark.parametrize("policy", [FirstComeFirstServed, Priority])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_every_request_is_served_in_its_turn_under_constant_pressure(
    policy: type[SchedulingPolicy], max_in_flight: int
) -> None:
    """No feasible request starves: one that needs nearly the whole cache gets in though small ones keep coming.

    The small ones end at different times, so that there is always room for another small one, never for the large one.
    """
    harness = Harness([full_group(20, 2)], max_num_seqs=4, max_model_len=40, policy=policy(), max_in_flight=max_in_flight)
    for i in range(400):
        if i == 20:
            harness.add(make_request("large", range(30), max_tokens=8))
        harness.add(make_request(f"small {i}", [i % 7], max_tokens=3 + i % 5))
        harness.plan()
        harness.finish_step()
        if ("large", 0) in harness.finished:
            break
    assert ("large", 0) in harness.finished
    assert sum(request_id.startswith("small") for request_id, _ in harness.finished) > 10, "others ran all the while"
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("size", [4, 16])
def test_eight_completions_hold_one_copy_of_the_prompt(size: int) -> None:
    prompt = 1000
    harness = Harness([full_group(400, size)], max_num_seqs=8, max_model_len=1100, token_budget=2048)
    harness.add(make_request("a", np.arange(prompt) % 97, max_tokens=3, n=8))
    harness.plan()
    pool, whole = harness.kv.pools[0], -(-prompt // size)
    assert pool.num_held == whole
    harness.finish_step()
    harness.plan()  # completion 0 writes its first token, the others compute the prompt's last one again
    partial = prompt % size > 0
    assert pool.num_held == whole + 1
    harness.finish_step()
    harness.plan()
    assert pool.num_held == whole + (7 if partial else 8)
    harness.finish_step()
    assert harness.worker.num_copies == (7 if partial else 0)
    harness.run()
    harness.check_outputs()
    assert harness.worker.num_copies == (7 if partial else 0)


def test_completions_without_a_slot_wait_and_find_the_prompt_in_the_cache() -> None:
    harness = Harness([full_group(60)], max_num_seqs=2)
    harness.add(make_request("a", range(21), max_tokens=4, n=5))
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().prefix_hits_total >= 3 * 20


def test_recurrent_completions_start_from_the_last_checkpoint() -> None:
    group = KVGroupInfo(spec=RecurrentState(block_size=8, bytes_per_block=1), num_blocks=20, pool_id=0)
    harness = Harness([group], max_num_seqs=4)
    harness.add(make_request("a", range(21), max_tokens=3, n=3))
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().prefix_hits_total == 2 * 16


def test_beams_share_blocks_and_copy_only_what_they_write() -> None:
    prompt, width = 1001, 4
    harness = Harness([full_group(400, 16)], max_num_seqs=2 * width, max_model_len=1100, token_budget=2048)
    harness.add(make_request("a", np.arange(prompt) % 97, max_tokens=20, stepwise=True, ignore_eos=True))
    pool, whole = harness.kv.pools[0], -(-prompt // 16)
    harness.plan()
    harness.finish_step()
    for step in range(8):
        assert not harness.plan()  # every beam waits for its next token to be chosen
        first, *others = sorted(harness.awaiting)
        for token in range(width - 1):
            harness.fork(first, 100 * (step + 1) + token, token)
        harness.advance(first)
        for key in others:
            harness.stop(key)
        copies = harness.worker.num_copies
        harness.plan()
        harness.finish_step()
        assert harness.worker.num_copies - copies == (width - 1 if (prompt + step) % 16 else 0)
        assert pool.num_held <= whole + 2 * width
        harness.check_invariants()
    for key in sorted(harness.awaiting):
        harness.stop(key)
    harness.run()


def test_only_a_parked_completion_can_be_forked() -> None:
    harness = Harness([full_group(40)], max_in_flight=2)
    harness.add(make_request("a", range(5), stepwise=True))
    for call in (lambda: harness.scheduler.fork("a", 0, new_index=1, token_id=3), lambda: harness.scheduler.advance("a", 0)):
        with pytest.raises(UsageError, match="isn't waiting"):
            call()
        harness.plan()  # its token isn't known yet
        with pytest.raises(UsageError, match="isn't waiting"):
            call()
    harness.finish_step()
    harness.fork(("a", 0), 1, 3)
    with pytest.raises(UsageError, match="exists already"):
        harness.scheduler.fork("a", 0, new_index=1, token_id=4)


def test_default_victims_follow_the_policy_key() -> None:
    assert FirstComeFirstServed().victim_key.__func__ is SchedulingPolicy.victim_key


@pytest.mark.parametrize("priority", ["high", 0.5, float("nan"), None])
def test_a_priority_that_has_no_order_is_refused(priority: object) -> None:
    harness = Harness([full_group(20)], policy=Priority())
    with pytest.raises(UsageError, match="priority must be a whole number"):
        harness.add(make_request("a", [1, 2], priority=priority))  # type: ignore[arg-type]
    assert not harness.scheduler.has_unfinished()
