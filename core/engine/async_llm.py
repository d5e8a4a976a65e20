"""`AsyncLLM`: a model that many coroutines share.

Two threads stand between them and the workers. The engine thread takes commands (add, abort, pause, …) and steps the core; it
does nothing else, so that workers never wait for text. The output thread turns each step's output into text and wakes the
coroutines whose requests changed. Prompts become tokens on the event loop's own threads, so that a long one delays nobody.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.core.api.errors import EngineError, OctavoError, RequestAborted, UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import Request, StepOutput
from octavo.core.engine.front import Front, Message, config_from_options, open_front
from octavo.core.engine.output import RequestState
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.requests import Prompt

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig
    from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["AsyncLLM"]

log = logging.getLogger(__name__)

_IDLE_S = 0.01  # how long to wait for a command when requests wait but none can run


@dataclass(slots=True)
class _Stream:
    """A coroutine that waits for its request to change."""

    state: RequestState
    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, frozen=True)
class _Refused:
    """The scheduler refused a request."""

    request_id: str
    error: OctavoError


class AsyncLLM:
    """A model, ready to generate for many coroutines, of one event loop or several."""

    def __init__(self, model: str, **options: Any) -> None:
        """Every field of `EngineConfig` is a keyword, as for `LLM`. Raises typed errors."""
        self._start(open_front(config_from_options({"model": model, **options})))

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        return cls.from_front(open_front(config))

    @classmethod
    def from_front(cls, front: Front) -> AsyncLLM:
        llm = cls.__new__(cls)
        llm._start(front)
        return llm

    def _start(self, front: Front) -> None:
        self.front = front
        self._lock = threading.Lock()  # guards the processor, the streams, _replies and _ended
        self._streams: dict[str, _Stream] = {}
        self._serials = itertools.count()  # a request id may come again while the core still ends its first use
        self._ended: OctavoError | None = None
        self._replies: set[Future[None]] = set()  # of commands that somebody waits for; whoever takes one out answers it
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[StepOutput | _Refused | OctavoError] = queue.SimpleQueue()
        self._engine_thread = threading.Thread(target=self._run_engine, name="octavo-engine", daemon=True)
        self._output_thread = threading.Thread(target=self._run_outputs, name="octavo-output", daemon=True)
        self._engine_thread.start()
        self._output_thread.start()
        _OPEN.add(self)

    @property
    def config(self) -> EngineConfig:
        """The configuration with every choice made explicit."""
        return self.front.config

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's output as it grows: each item holds everything so far. Leaving the iterator aborts the request.

        A consumer that is slower than the engine misses no text, only intermediate items. Raises `UsageError` for a wrong
        request, `EngineError` when the engine fails or is shut down.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        make = partial(self.front.maker.make, prompt, params, f"{request_id}/{next(self._serials)}", priority=priority)
        request, text = make() if _has_token_ids(prompt) else await asyncio.to_thread(make)
        stream = self._open(request_id, request, text)
        state, finished = stream.state, False
        try:
            while not finished:
                await stream.changed.wait()
                stream.changed.clear()
                with self._lock:
                    error, output = state.error, state.output()
                if error is not None:
                    raise error
                finished = output.finished
                yield output
        finally:
            self._leave(request_id, stream)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` through the model's chat template."""
        prompt = await asyncio.to_thread(self.front.chat_prompt, messages, **template)
        outputs = self.generate(prompt, sampling_params, request_id, priority=priority)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gives what there is, with finish reason "abort". Nothing when it isn't known."""
        with self._lock:
            if request_id in self._streams:
                self._end(self._streams[request_id].state)

    async def pause(self) -> None:
        """Plan no more steps until `resume`; in effect when this returns. Requests stay, and may come and be aborted.

        Steps that run already still end, and give their tokens. Raises `EngineError` when the engine has stopped.
        """
        await self._in_engine(self.front.core.pause)

    async def drain(self) -> None:
        """Take no more requests until `resume` (`generate` raises `EngineError`); in effect when this returns.

        Those that are here run to their end. Raises `EngineError` when the engine has stopped.
        """
        await self._in_engine(self.front.core.drain)

    async def resume(self) -> None:
        """Undo `pause` and `drain`. Raises `EngineError` when the engine has stopped."""
        await self._in_engine(self.front.core.resume)

    def get_tokenizer(self) -> Tokenizer:
        return self.front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """`SamplingParams` as the model's generation_config recommends."""
        return self.front.default_sampling_params()

    def metrics(self) -> Mapping[str, float]:
        """The scheduler's figures (`SchedulerStats`), and those of plugins under ``plugin_name/key``."""
        return self.front.core.metrics()

    def check_health(self) -> None:
        """Raises the `EngineError` that stopped the engine, if any."""
        if self._ended is not None:
            raise self._ended

    def shutdown(self, *, timeout_s: float = 30.0) -> None:
        """Stop. Requests that are still open end with `RequestAborted`. May be called more than once, from any thread.

        A step that runs is waited for, at most ``timeout_s``; then its worker is stopped under it.
        """
        if self.front.left_behind:
            return
        self._commands.put(None)
        self._engine_thread.join(timeout_s)
        if self._engine_thread.is_alive():
            self.front.core.shutdown()
            self._engine_thread.join()
        self._output_thread.join()
        _OPEN.discard(self)

    def _open(self, request_id: str, request: Request, text: str | None) -> _Stream:
        self.front.check_process()  # before the lock, which the parent may have held
        with self._lock:
            self._check_running()
            if request_id in self._streams:
                raise UsageError(f"request id {request_id!r} is in use")
            state = self.front.processor.add(request, text, public_id=request_id)
            stream = self._streams[request_id] = _Stream(state, asyncio.get_running_loop())
            self._commands.put(lambda: self._add(request))
        return stream

    async def _in_engine(self, do: Callable[[], None]) -> None:
        """Have the engine thread do something that can't fail; returns when it has."""
        reply: Future[None] = Future()
        with self._lock:
            self._check_running()
            self._replies.add(reply)
            self._commands.put(lambda: self._answer(reply, do))
        await asyncio.wrap_future(reply)

    def _check_running(self) -> None:
        if self._ended is not None:
            raise EngineError(f"the engine has stopped: {self._ended}")

    def _leave(self, request_id: str, stream: _Stream) -> None:
        """The consumer is gone: abort the request if it hasn't finished."""
        with self._lock:
            self._end(stream.state)
            self._streams.pop(request_id, None)

    def _end(self, state: RequestState) -> None:
        """Abort what hasn't finished: here at once, in the core when its thread gets to it.

        Of a request that failed, the core may still run further completions.
        """
        if not state.finished or state.error is not None:
            self.front.processor.abort(state.request_id)
            self._commands.put(lambda: self._abort_in_core(state.request_id))
            self._wake([state])

    # What follows up to _run_outputs runs on the engine thread.

    def _run_engine(self) -> None:
        core = self.front.core
        end: OctavoError = RequestAborted("the engine was shut down before the request finished")
        stalled = False
        try:
            while self._take_commands(stalled):
                output = core.step()
                stalled = output is None
                if output is not None:
                    self._outputs.put(output)
        except OctavoError as error:
            end = error
        except Exception as error:
            log.exception("the engine loop failed")
            end = EngineError(f"the engine loop failed: {type(error).__name__}: {error}")
        finally:
            self._outputs.put(end)
            core.shutdown()

    def _take_commands(self, stalled: bool) -> bool:
        """Run the commands that wait; wait for one when there is nothing else to do. False: stop."""
        core = self.front.core
        while True:
            busy = core.has_work() or (core.has_unfinished() and not core.paused)
            try:
                command = self._commands.get(block=stalled or not busy, timeout=_IDLE_S if busy else None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            stalled = False

    def _add(self, request: Request) -> None:
        try:
            self.front.core.add(request)
        except OctavoError as error:
            self._outputs.put(_Refused(request.request_id, error))

    def _abort_in_core(self, request_id: str) -> None:
        self.front.core.abort(request_id)

    def _answer(self, reply: Future[None], do: Callable[[], None]) -> None:
        with self._lock:
            if reply not in self._replies:  # the output loop failed meanwhile, and has answered
                return
            self._replies.remove(reply)
        if reply.set_running_or_notify_cancel():
            do()
            reply.set_result(None)

    # What follows runs on the output thread.

    def _run_outputs(self) -> None:
        while True:
            item = self._outputs.get()
            with self._lock:
                try:
                    updated = self._apply(item)
                except Exception as error:
                    log.exception("the output loop failed")
                    item = EngineError(f"the output loop failed: {type(error).__name__}: {error}")
                    updated = self._apply(item)
                    self._commands.put(None)
                self._wake(updated)
            if isinstance(item, OctavoError):
                return

    def _apply(self, item: StepOutput | _Refused | OctavoError) -> Iterable[RequestState]:
        processor, core = self.front.processor, self.front.core
        if isinstance(item, OctavoError):
            self._ended = item
            for reply in self._replies:  # of commands that the engine thread didn't get to
                if reply.set_running_or_notify_cancel():
                    reply.set_exception(EngineError(f"the engine has stopped: {item}"))
            self._replies.clear()
            return processor.fail(item)
        if isinstance(item, _Refused):
            return processor.fail(item.error, item.request_id)
        processed = processor.process(item)
        for stop in processed.stops:
            finish = partial(core.finish, stop.request_id, stop.index, reason="stop", stop_reason=stop.stop_reason)
            self._commands.put(finish)
        return processed.updated

    def _wake(self, states: Iterable[RequestState]) -> None:
        """Wake the coroutines of these requests, each loop once."""
        loops: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for state in states:
            stream = self._streams.get(state.public_id)
            if stream is not None and stream.state is state:
                loops.setdefault(stream.loop, []).append(stream.changed)
        for loop, events in loops.items():
            try:
                loop.call_soon_threadsafe(_set_all, events)
            except RuntimeError:  # the loop is closed: nobody waits any more
                log.debug("an event loop was closed before its requests finished")


def _has_token_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


_OPEN: weakref.WeakSet[AsyncLLM] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for llm in list(_OPEN):
        llm.shutdown()


def _forget_all() -> None:
    """In a forked child: the threads that the engines run on exist in the parent alone."""
    for llm in list(_OPEN):
        llm.front.left_behind = True
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget_all)
