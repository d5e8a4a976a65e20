"""Output processing: from step outputs made by hand to request outputs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from octavo.core.api.errors import EngineError
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import FinishedRequest, Logprobs, Request, StartedRequest, StepOutput
from octavo.core.engine.detokenizer import TokenBytes
from octavo.core.engine.output import OutputProcessor, RequestState

END = 256


class Bench:
    """A processor with requests ``"0"``, ``"1"``, …, each completion in a slot of its own, in order."""

    def __init__(self, tokenizer: Any, *sampling: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(TokenBytes(tokenizer))
        self.states: list[RequestState] = []
        started = []
        for number, params in enumerate(sampling):
            ids = np.array(tokenizer.encode("prompt"), np.int32)
            request = Request(request_id=str(number), prompt_token_ids=ids, sampling=params, max_tokens=50)
            self.states.append(self.processor.add(request, "prompt"))
            for index in range(params.n):
                started.append(
                    StartedRequest(slot=len(started), request_id=str(number), index=index, num_cached_tokens=number * 16)
                )
        self.step({}, started=started)

    def step(self, rows: dict[int, Sequence[int]], **more: Any) -> Any:
        width = max(map(len, rows.values()), default=1)
        tokens = np.full((len(rows), width), -1, np.int32)
        for row, ids in enumerate(rows.values()):
            tokens[row, : len(ids)] = ids
        return self.processor.process(StepOutput(slots=np.array(list(rows), np.int32), token_ids=tokens, **more))

    def say(self, text: str, slot: int = 0, **more: Any) -> Any:
        """One token a step, one byte a token."""
        result = None
        for token_id in self.tokenizer.encode(text):
            result = self.step({slot: [token_id]}, **more)
        return result

    def text(self, number: int = 0, index: int = 0) -> str:
        return self.states[number].output().outputs[index].text


def end(request_id: str = "0", index: int = 0, slot: int = 0, **more: Any) -> FinishedRequest:
    return FinishedRequest(**{"slot": slot, "request_id": request_id, "index": index, "reason": "stop", **more})


def test_text_grows_by_whole_characters(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams())
    shown = []
    for token_id in byte_tokenizer.encode("né😀!"):
        bench.step({0: [token_id]})
        shown.append(bench.text())
    assert shown == ["n", "n", "né", "né", "né", "né", "né😀", "né😀!"]
    assert not bench.states[0].finished


def test_the_stop_token_is_among_the_ids_but_not_in_the_text(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(), SamplingParams(include_stop_str_in_output=True, stop_token_ids=[33]))
    bench.say("hi", slot=0)
    bench.say("hi", slot=1)
    stop = byte_tokenizer.encode("!")[0]
    bench.step({0: [END], 1: [stop]}, finished=[end(), end("1", slot=1, stop_reason=stop)])
    first, second = (state.output() for state in bench.states)
    assert first.finished
    assert second.finished
    assert first.outputs[0].text == "hi"
    assert first.outputs[0].token_ids[-1] == END
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("stop", None)
    assert second.outputs[0].text == "hi!"
    assert second.outputs[0].stop_reason == stop
    assert not bench.processor.requests


def test_a_stop_string_across_tokens_ends_the_request_and_was_never_shown(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(stop=["END"]))
    bench.say("one EN")
    assert bench.text() == "one "
    bench.say("T EN")
    assert bench.text() == "one ENT "
    result = bench.say("D")
    output = bench.states[0].output()
    assert output.finished
    assert output.outputs[0].text == "one ENT "
    assert output.outputs[0].stop_reason == "END"
    assert output.outputs[0].token_ids == byte_tokenizer.encode("one ENT END")
    assert [(stop.request_id, stop.index, stop.stop_reason) for stop in result.stops] == [("0", 0, "END")]
    bench.say("more")
    assert bench.states[0].output().outputs[0].text == "one ENT "


def test_a_stop_string_is_kept_when_asked_for(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(stop=["END"], include_stop_str_in_output=True))
    bench.say("one END")
    assert bench.text() == "one END"


def test_a_held_back_beginning_of_a_stop_string_is_shown_at_the_end(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(stop=["END"]))
    bench.say("one EN")
    bench.step({}, finished=[end(reason="length")])
    assert bench.text() == "one EN"
    assert bench.states[0].output().outputs[0].finish_reason == "length"


def test_a_stop_string_within_the_minimum_does_not_count(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(stop=["ab"], min_tokens=2))
    bench.say("abc")
    assert bench.text() == "abc"
    bench.say("ab")
    assert bench.states[0].finished
    assert bench.text() == "abc"


def test_several_tokens_in_a_step_stop_at_the_first_stop_string(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(stop=["b"]))
    result = bench.step({0: byte_tokenizer.encode("abcd")})
    output = bench.states[0].output().outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == ("a", byte_tokenizer.encode("ab"), "b")
    assert len(result.stops) == 1


def test_a_stop_string_on_the_last_token_needs_no_word_to_the_scheduler(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(stop=["b"]))
    result = bench.say("b", finished=[end(reason="length")])
    assert bench.states[0].output().outputs[0].finish_reason == "stop"
    assert result.stops == []


def test_an_unfinished_character_is_replaced_at_the_end_only(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams())
    bench.step({0: byte_tokenizer.encode("é")[:1]})
    assert bench.text() == ""
    bench.step({}, finished=[end(reason="length")])
    assert bench.text() == "\ufffd"


def test_completions_of_one_request_are_kept_apart(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(n=2), SamplingParams())
    bench.step({slot: byte_tokenizer.encode(text) for slot, text in enumerate("abc")})
    result = bench.step({0: [END], 2: byte_tokenizer.encode("d")}, finished=[end()])
    assert (bench.text(0, 0), bench.text(0, 1), bench.text(1)) == ("a", "b", "cd")
    assert not bench.states[0].finished
    assert [state.request_id for state in result.updated] == ["0", "1"]
    bench.step({1: [END]}, finished=[end(index=1, slot=1)])
    assert bench.states[0].finished
    assert [output.index for output in bench.states[0].output().outputs] == [0, 1]


def test_what_has_ended_is_kept_nowhere(byte_tokenizer: Any) -> None:
    params = SamplingParams(stop=["b"])
    bench = Bench(byte_tokenizer, *[params] * 5, SamplingParams(n=2))
    bench.step({}, started=[StartedRequest(slot=20, request_id="1", index=0, num_cached_tokens=0)])  # it was preempted
    gone = [weakref.ref(state) for state in bench.states]
    bench.step({0: [END], 20: [END]}, finished=[end(), end("1", slot=20)])
    bench.say("ab", slot=2)
    bench.processor.abort("3")
    bench.processor.fail(EngineError("refused"), "4")
    bench.step({5: [END]}, finished=[end("5", slot=5)])
    in_flight = dict.fromkeys((0, 1, 20, 2, 3, 4, 5), byte_tokenizer.encode("x"))
    assert not bench.step(in_flight).updated, "steps in flight say nothing to them"
    assert len(bench.states[5].output().outputs[1].token_ids) == 0
    bench.states.clear()
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 5 + [False], "only a request with a completion that runs is left"
    (left,) = bench.processor.requests.values()
    bench.step({6: [END]}, finished=[end("5", index=1, slot=6)])
    assert left.finished
    del left
    gc.collect()
    assert gone[5]() is None


def test_a_slot_goes_to_its_next_owner(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(), SamplingParams())
    bench.step({0: [END]}, finished=[end()])
    bench.step({}, started=[StartedRequest(slot=0, request_id="1", index=0, num_cached_tokens=0)])
    bench.say("x", slot=0)
    assert (bench.text(0), bench.text(1)) == ("", "x")
    assert bench.states[1].num_cached_tokens == 16  # as it first started


def test_a_slots_former_owner_gets_nothing_of_an_aborted_request_that_took_the_slot(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(), SamplingParams())
    bench.say("a", slot=0)
    bench.processor.abort("1")  # request 0 is preempted meanwhile, and request 1 starts in its slot before the abort arrives
    started = [StartedRequest(slot=0, request_id="1", index=0, num_cached_tokens=0)]
    bench.step({0: byte_tokenizer.encode("x")}, started=started)
    assert bench.text(0) == "a"
    bench.step({}, started=[StartedRequest(slot=0, request_id="0", index=0, num_cached_tokens=0)])
    bench.say("b", slot=0)
    assert bench.text(0) == "ab"


def test_logprobs_have_the_token_first_then_the_best(byte_tokenizer: Any) -> None:
    a, b, c = byte_tokenizer.encode("abc")
    bench = Bench(byte_tokenizer, SamplingParams(logprobs=1), SamplingParams(), SamplingParams(logprobs=0))
    logprobs = Logprobs(
        rows=np.array([0, 0, 2], np.int32),
        token_ids=np.array([[a, b, c], [b, b, a], [c, a, b]], np.int32),
        logprobs=np.array([[-2.0, -0.5, -3.0], [-0.25, -0.25, -4.0], [-1.0, -0.1, -0.2]], np.float32),
        ranks=np.array([2, 1, 3], np.int32),
    )
    bench.step({0: [a, b], 1: [a], 2: [c]}, logprobs=logprobs)
    first, second, third = (state.output().outputs[0] for state in bench.states)
    assert first.logprobs == [{a: (-2.0, 2, "a"), b: (-0.5, 1, "b")}, {b: (-0.25, 1, "b")}]
    assert first.cumulative_logprob == -2.25
    assert second.logprobs is None
    assert second.cumulative_logprob is None
    assert third.logprobs == [{c: (-1.0, 3, "c")}]


def test_prompt_logprobs_begin_with_none_and_come_in_chunks(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(prompt_logprobs=0), SamplingParams())
    ids = byte_tokenizer.encode("prompt")
    for chunk in (ids[1:3], ids[3:]):
        entries = len(chunk)
        logprobs = Logprobs(
            rows=np.zeros(entries, np.int32),
            token_ids=np.array([chunk], np.int32).T.copy(),
            logprobs=np.full((entries, 1), -0.5, np.float32),
            ranks=np.full(entries, 7, np.int32),
        )
        bench.step({}, prompt_logprobs=logprobs)
    found = bench.states[0].output().prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert [next(iter(entry)) for entry in found[1:] if entry] == ids[1:]
    assert found[1] == {ids[1]: (-0.5, 7, "r")}
    assert bench.states[1].output().prompt_logprobs is None


def test_without_detokenisation_there_are_only_ids(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(detokenize=False))
    bench.say("hi", finished=())
    output = bench.states[0].output().outputs[0]
    assert (output.text, len(output.token_ids)) == ("", 2)


def test_an_aborted_request_keeps_what_it_had_and_takes_no_more(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(n=2))
    bench.say("hi")
    bench.processor.abort("0")
    bench.processor.abort("unknown")
    bench.say("!")
    output = bench.states[0].output()
    assert output.finished
    assert [(one.text, one.finish_reason) for one in output.outputs] == [("hi", "abort"), ("", "abort")]


def test_an_error_ends_the_request_with_its_message(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(), SamplingParams())
    bench.step({}, finished=[end(reason="error", message="no block left")])
    assert bench.states[0].finished
    assert str(bench.states[0].error) == "no block left"
    failed = bench.processor.fail(EngineError("the worker died"))
    assert [state.request_id for state in failed] == ["1"]
    assert not bench.processor.requests


def test_metrics_count_from_the_arrival(byte_tokenizer: Any) -> None:
    bench = Bench(byte_tokenizer, SamplingParams())
    metrics = bench.states[0].metrics
    assert (metrics.ttft_s, metrics.latency_s) == (None, None)
    bench.say("hi", finished=())
    first = metrics.first_token_s
    bench.step({0: [END]}, finished=[end()])
    assert metrics.first_token_s == first
    assert metrics.ttft_s is not None
    assert metrics.latency_s is not None
    assert 0 < metrics.ttft_s <= metrics.latency_s


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_skipped_unless_asked_for(byte_tokenizer: Any, skip: bool) -> None:
    bench = Bench(byte_tokenizer, SamplingParams(ignore_eos=True, skip_special_tokens=skip))
    bench.step({0: [END]})
    assert bench.text() == ("" if skip else "<end>")


class Words:
    """Whole words without a decoder: the library puts spaces between tokens."""

    special_ids = frozenset({1, 2})

    def __init__(self) -> None:
        self.raw = RawTokenizer(models.WordLevel({"word": 0, "<a>": 1, "<b>": 2, "prompt": 3}, unk_token="word"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.raw.encode(text).ids
        return ids


@pytest.mark.parametrize(("spaces", "text"), [(True, " word <a> <b>"), (False, " word <a><b>")])
def test_text_continues_the_prompts_and_special_tokens_stand_as_asked_for(spaces: bool, text: str) -> None:
    bench = Bench(Words(), SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces))
    for token_id in (0, 1, 2):
        bench.step({0: [token_id]})
    assert bench.text() == text
