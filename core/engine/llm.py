"""`LLM`: a model in this process, driven synchronously."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo.core.api.errors import EngineError, UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import Request
from octavo.core.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from octavo.core.engine.detokenizer import TokenBytes
from octavo.core.engine.front import Front, Message, config_from_options, open_front
from octavo.core.engine.interrupt import interrupt_deferred
from octavo.core.engine.output import RequestState
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.progress import progress
from octavo.core.engine.requests import Prompt, prompt_list, sampling_list

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig
    from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["LLM"]


class LLM:
    """A model, ready to generate. Close it, or use it as a context manager, to give its memory back.

    >>> with LLM("smollm2", max_model_len=2048) as llm:
    ...     outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
    """

    def __init__(
        self,
        model: str,
        *,
        platform: str | None = None,
        attention_backend: str | Mapping[str, str] | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Every field of `EngineConfig` is a keyword; None leaves the default. Raises typed errors."""
        named = {
            "model": model,
            "platform": platform,
            "attention_backend": attention_backend,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
            "enable_prefix_caching": enable_prefix_caching,
            "seed": seed,
        }
        self._start(config_from_options({**named, **options}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self._ids = itertools.count()
        self._lock = threading.RLock()  # scheduler and output processor, when several threads call
        self.front: Front = open_front(config)
        _OPEN.add(self)

    @property
    def config(self) -> EngineConfig:
        """The configuration with every choice made explicit."""
        return self.front.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the prompts' order. No chat template is applied.

        ``sampling_params`` None takes the model's own defaults. ``use_tqdm`` shows a progress bar on a terminal's stderr.
        ``priority``, one a prompt, needs a policy that heeds it: with ``scheduling_policy="priority"`` lower ones go first.
        Raises `UsageError` before anything runs when one of the prompts or parameters is wrong, `EngineError` when the engine
        fails.
        """
        many = prompt_list(prompts)
        params = sampling_list(sampling_params, len(many), self.get_default_sampling_params())
        priorities = _priorities(priority, len(many))
        made = [
            self.front.maker.make(prompt, one, str(next(self._ids)), priority=rank)
            for prompt, one, rank in zip(many, params, priorities, strict=True)
        ]
        return self._run(made, show=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise UsageError(
                f"messages must be a list of messages or of conversations, not {type(messages).__name__}",
                hint='a message is {"role": "user", "content": "…"}',
            )
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        extra = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts = [self.front.chat_prompt(conversation, **extra) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[RequestOutput]:
        """One request's output as it grows: each item holds everything so far. Leaving the iterator aborts the request."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        request, text = self.front.maker.make(prompt, params, str(next(self._ids)), priority=priority)
        with self._running([(request, text)]) as (state,):
            finished = False
            while not finished:
                self._step_for([state])
                _ended(state)  # raises its error
                output = state.output()
                finished = output.finished
                yield output

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt] | Sequence[int] | Sequence[Sequence[int]],
        params: BeamSearchParams,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, best first. Beams share the blocks of what they have in common.

        Raises `UsageError` also while a `stream` is open: the search would take its tokens.
        """
        self._check_not_paused()
        self.front.check_process()
        if self.front.processor.requests:
            raise UsageError("beam search runs alone, but a stream is open", hint="read it to its end, or close() it, first")
        sampling = SamplingParams(max_tokens=params.max_tokens, temperature=0)
        requests = [self.front.maker.make(prompt, sampling, str(next(self._ids)))[0] for prompt in prompt_list(prompts)]
        outputs = [BeamSearchOutput([]) for _ in requests]
        pieces = TokenBytes(self.front.tokenizer)
        search = beam_search(self.front.core, requests, params, max_num_seqs=self.config.scheduler.max_num_seqs)
        with progress("Searching", len(requests), show=use_tqdm) as advance, self._lock:
            for number, sequences in search:
                for sequence in sequences:
                    sequence.tokens = [*requests[number].prompt_token_ids.tolist(), *sequence.tokens]
                    sequence.text = pieces.join(sequence.tokens)
                outputs[number].sequences = sequences
                advance(1)
        return outputs

    def get_tokenizer(self) -> Tokenizer:
        return self.front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """`SamplingParams` as the model's generation_config recommends."""
        return self.front.default_sampling_params()

    def metrics(self) -> Mapping[str, float]:
        """The scheduler's figures (`SchedulerStats`), and those of plugins under ``plugin_name/key``."""
        return self.front.core.metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False when requests still hold some."""
        with self._lock:
            return self.front.core.reset_prefix_cache()

    def pause(self) -> None:
        """Run no more steps until `resume`: a call that needs one raises `EngineError`, also an open stream that is read."""
        self.front.core.pause()

    def drain(self) -> None:
        """Take no more requests until `resume`, with `EngineError`; open streams may be read to their end."""
        self.front.core.drain()

    def resume(self) -> None:
        """Undo `pause` and `drain`."""
        self.front.core.resume()

    def close(self) -> None:
        """Stop the workers and give their memory back. May be called more than once."""
        if not self.front.left_behind:
            self.front.core.shutdown()
        _OPEN.discard(self)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, made: Sequence[tuple[Request, str | None]], *, show: bool) -> list[RequestOutput]:
        with progress("Generating", len(made), show=show) as advance, self._running(made) as states:
            pending = states
            while pending:
                if self._step_for(pending):
                    left = [state for state in pending if not _ended(state)]
                    advance(len(pending) - len(left))
                    pending = left
        return [state.output() for state in states]

    @contextmanager
    def _running(self, made: Sequence[tuple[Request, str | None]]) -> Iterator[Sequence[RequestState]]:
        """Requests in the engine; what hasn't finished at the end is aborted."""
        self.front.check_process()
        core, processor = self.front.core, self.front.processor
        states: list[RequestState] = []
        try:
            with self._lock:
                for request, text in made:
                    core.add(request)
                    states.append(processor.add(request, text))
            yield states
        finally:
            with self._lock:
                for state in states:
                    if not state.finished or state.error is not None:  # of one that failed, further completions may run
                        core.abort(state.request_id)
                        processor.abort(state.request_id)

    def _step_for(self, states: Sequence[RequestState]) -> bool:
        """One step of everything that is unfinished, unless other calls' steps have brought ``states`` to their end.

        True when a request has finished, of ``states`` or not.
        """
        with self._lock:
            return all(state.finished for state in states) or any(state.finished for state in self._step())

    def _step(self) -> Sequence[RequestState]:
        """One step; the requests that it changed."""
        core, processor = self.front.core, self.front.processor
        with interrupt_deferred():
            output = core.step()
            if output is None:
                self._check_not_paused()
                raise EngineError("requests are waiting, but the scheduler finds none that can run")
            processed = processor.process(output)
            for stop in processed.stops:
                core.finish(stop.request_id, stop.index, reason="stop", stop_reason=stop.stop_reason)
        return processed.updated

    def _check_not_paused(self) -> None:
        if self.front.core.paused:
            raise EngineError("the engine is paused and runs no steps", hint="call resume() first")


def _ended(state: RequestState) -> bool:
    """Whether a request has finished. Raises its error."""
    if state.error is not None:
        raise state.error
    return state.finished


def _priorities(priority: Any, num_prompts: int) -> Sequence[int]:
    if priority is None:
        return [0] * num_prompts
    if isinstance(priority, str) or not isinstance(priority, Sequence):
        raise UsageError(f"priority must be a list of whole numbers, one a prompt, not {priority!r}")
    if len(priority) != num_prompts:
        raise UsageError(f"{len(priority)} priorities for {num_prompts} prompts")
    return list(priority)


_OPEN: weakref.WeakSet[LLM] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for llm in list(_OPEN):
        llm.close()


def _forget_all() -> None:
    """In a forked child: the threads that the engines run on exist in the parent alone."""
    for llm in list(_OPEN):
        llm.front.left_behind = True
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget_all)
