"""`EngineCore`: scheduler and executor, driven step by step. `Request` messages in, `StepOutput` messages out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from octavo.core.api.errors import EngineError, OctavoError, PluginError, UsageError
from octavo.core.api.executor import Executor, ExecutorInfo, WorkerMethod
from octavo.core.api.kv_cache import CustomSpec, KVManager
from octavo.core.api.scheduling import FinishedRequest, FinishReason, Request, SchedulerStats, StepOutput, StepPlan, StepResult
from octavo.core.discovery.loading import root_cause
from octavo.core.discovery.wording import error_text, one_line
from octavo.core.engine.checked import asked, made, policy, proposer

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig
    from octavo.core.config.scheduler import SchedulerConfig
    from octavo.core.discovery import Registry
    from octavo.core.discovery.hooks import Hooks
    from octavo.core.scheduling import Scheduler

__all__ = ["EngineCore", "assemble_core", "start_core"]

logger = logging.getLogger("octavo")

_HEALTH_CHECK_S = 1.0


class EngineCore:
    """One scheduler, one executor. Not thread-safe: one thread drives it.

    Up to ``max_in_flight`` steps are with the executor at once; with more than one, a step is planned while another runs.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        scheduler: Scheduler,
        executor: Executor,
        info: ExecutorInfo,
        max_in_flight: int = 1,
        hooks: Hooks | None = None,
    ) -> None:
        self.config = config
        self.info = info
        self.startup_s = 0.0
        self._scheduler = scheduler
        self._executor = executor
        self._max_in_flight = max_in_flight
        self._hooks = hooks
        self._in_flight: deque[tuple[Future[StepResult], int]] = deque()  # with the number of rows
        self._num_rows = 0  # of the step submitted last
        self._failure: OctavoError | None = None
        self._stopped = False
        self.paused = False

    def add(self, request: Request) -> None:
        """Queue a request. Raises `UsageError` when it could never fit, `EngineError` when the engine has stopped."""
        self._check_alive()
        self._scheduler.add(request)

    def abort(self, request_id: str) -> list[FinishedRequest]:
        """End a request wherever it is; what ended. Nothing when it isn't known."""
        return self._scheduler.abort(request_id)

    def finish(self, request_id: str, index: int, *, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a completion from outside (a stop string). Nothing happens when it has ended already."""
        self._or_stop(partial(self._scheduler.finish, request_id, index, reason=reason, stop_reason=stop_reason))

    def fork(self, request_id: str, index: int, *, new_index: int, token_id: int) -> None:
        """Start a completion of a stepwise request as a copy of another, with another last token (beam search)."""
        self._or_stop(partial(self._scheduler.fork, request_id, index, new_index=new_index, token_id=token_id))

    def advance(self, request_id: str, index: int) -> None:
        """Let a completion of a stepwise request go on with the token it sampled."""
        self._or_stop(partial(self._scheduler.advance, request_id, index))

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    def has_work(self) -> bool:
        """Whether steps are with the executor."""
        return bool(self._in_flight)

    def pause(self) -> None:
        """Plan no more steps until `resume`; those with the executor end. Requests stay, and may be added and aborted."""
        self.paused = True
        self._scheduler.pause()

    def drain(self) -> None:
        """Take no more requests until `resume` (`add` raises `EngineError`); those that are here run to their end."""
        self._scheduler.drain()

    def resume(self) -> None:
        """Undo `pause` and `drain`."""
        self.paused = False
        self._scheduler.resume()

    def step(self) -> StepOutput | None:
        """Submit what can run, wait for the oldest step and apply it. None when there was nothing to run.

        Raises `EngineError` when a worker failed; the engine is then stopped.
        """
        self._check_alive()
        started_s = time.perf_counter()
        while len(self._in_flight) < self._max_in_flight and (plan := self._plan()) is not None:
            self._in_flight.append(self._submit(plan))
        if not self._in_flight:
            return None
        output = self._land()
        if self._hooks:
            self._hooks.call("octavo_step_finished", stats=self._scheduler.stats(), step_s=time.perf_counter() - started_s)
        return output

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def metrics(self) -> Mapping[str, float]:
        """The scheduler's figures, and those of plugins under ``plugin_name/key``."""
        stats = self._scheduler.stats()
        figures = {name: float(getattr(stats, name)) for name in (*stats.__struct_fields__, "prefix_hit_rate")}
        for more in self._hooks.call("octavo_metrics") if self._hooks is not None else ():
            figures.update(more)
        return figures

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False when requests still hold some."""
        stats = self._scheduler.stats()
        if stats.num_running == stats.num_waiting == 0:
            while self._in_flight:  # planned ahead for requests that have ended since
                self._land()
        return self._scheduler.reset_prefix_cache()

    def call(self, method: WorkerMethod, **arguments: Any) -> list[Any]:
        """Ask every worker; answers by rank."""
        self._check_alive()
        return self._executor.call(method, **arguments)

    def shutdown(self) -> None:
        """Stop the workers. May be called more than once, and from another thread than the one that steps."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._executor.shutdown()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an outsider's: the engine ends all the same
            logger.error("%s failed in shutdown(): %s", self._who, error_text(error))
        if self._hooks:
            self._hooks.call("octavo_engine_stopped")

    def _plan(self) -> StepPlan | None:
        """The next step. A policy or proposer that fails leaves it half planned: the engine is then stopped."""
        try:
            return self._scheduler.schedule()
        except Exception as error:  # noqa: BLE001 - raised as a typed error
            self._fail(error)

    def _or_stop(self, call: Callable[[], None]) -> None:
        """A policy that gives no key for a completion that has to wait would leave it behind: the engine is then stopped."""
        try:
            call()
        except PluginError as error:
            self._fail(error)

    def _submit(self, plan: StepPlan) -> tuple[Future[StepResult], int]:
        """Hand a plan to the executor; what will be its result, and how many rows that has.

        A plan that it doesn't take can't be made again: the engine is then stopped.
        """
        try:
            future: Any = self._executor.execute(plan)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised as a typed error
            self._fail(error)
        if not isinstance(future, Future):
            self._fail(PluginError(f"{self._who} answers execute() with {future!r}, not a Future"))
        if plan.rows is not None:
            self._num_rows = len(plan.rows)
        return future, self._num_rows

    def _land(self) -> StepOutput:
        """Wait for the oldest step and apply its result."""
        try:
            failure = self._wait_for(self._in_flight[0][0])  # may be interrupted: the step stays in flight then
        except CancelledError as error:
            failure = error
        future, num_rows = self._in_flight.popleft()
        if failure is not None:
            self._fail(failure)
        result = future.result()
        self._check(result, num_rows)
        try:
            return self._scheduler.update(result)
        except EngineError as error:  # not the oldest step's result, or a row that lacks its token
            self._fail(PluginError(f"{self._who} gave a wrong result: {error}", hint="report this to its vendor"))
        except Exception as error:  # noqa: BLE001 - raised as a typed error; the scheduler has taken in half of the step
            self._fail(error)

    def _wait_for(self, future: Future[StepResult]) -> BaseException | None:
        """What a step failed with, once it has ended. An executor that has lost it may never end it: it is asked meanwhile."""
        while True:
            try:
                return future.exception(timeout=_HEALTH_CHECK_S)
            except TimeoutError:  # not suppress(), which would cost every step 2 µs
                pass
            self._check_health()  # not above: what it raises has nothing to do with the time that is up

    def _check_health(self) -> None:
        try:
            asked(self._who, "check_health()", self._executor.check_health)
        except OctavoError as error:
            self._fail(error)

    def _check(self, result: Any, num_rows: int) -> None:
        """Stop for anything but a `StepResult` of token ids: they index arrays later, of which any would take a wrong one."""
        sampled = result.sampled if isinstance(result, StepResult) else None
        if not isinstance(sampled, np.ndarray) or sampled.dtype.kind != "i" or sampled.ndim != 2 or not sampled.size:
            given = one_line(repr(result))
            self._fail(PluginError(f"{self._who} completes a step with {given}, not a StepResult of token ids"))
        if sampled.shape[1] > 1 and result.num_accepted is None:
            self._fail(PluginError(f"{self._who} completes a step with {sampled.shape[1]} tokens a row and no num_accepted"))
        failed = result.failed
        if not isinstance(failed, dict) or not all(row in range(num_rows) for row in failed):
            given = one_line(repr(failed))
            self._fail(PluginError(f"{self._who} completes a step of {num_rows} rows with failed={given}, not {{row: why}}"))
        if len(sampled) != num_rows:
            self._fail(PluginError(f"{self._who} completes a step of {num_rows} rows with tokens for {len(sampled)}"))
        # Half of what min() and max() take: those are Python functions.
        lowest, highest = sampled.item(sampled.argmin()), sampled.item(sampled.argmax())
        if lowest < -1 or highest >= self.info.vocab_size:
            self._fail(
                PluginError(
                    f"{self._who} completes a step with token id {lowest if lowest < -1 else highest}, expected one from 0 to "
                    f"{self.info.vocab_size - 1}, or -1 for none",
                    hint="report this to its vendor",
                )
            )

    @property
    def _who(self) -> str:
        return f"executor {self.config.plugins.executor!r}"

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has stopped: {self._failure}")
        if self._stopped:
            raise EngineError("the engine has been shut down")

    def _fail(self, failure: BaseException) -> NoReturn:
        """Stop for good; raises the failure as a typed error."""
        known = isinstance(failure, OctavoError)
        error = failure if known else EngineError(f"a step failed: {root_cause(failure)}")
        assert isinstance(error, OctavoError)
        self._failure = error
        self._in_flight.clear()
        self.shutdown()
        raise error from (None if known else failure)


def start_core(config: EngineConfig, *, hooks: Hooks | None = None) -> EngineCore:
    """Start workers for a resolved configuration. Raises typed errors; nothing is left behind then."""
    from octavo.core.discovery import installed
    from octavo.core.discovery.hooks import Hooks

    started_s = time.perf_counter()
    hooks = Hooks.load(installed(), config) if hooks is None else hooks
    hooks.call("octavo_configure", config=config)
    name = config.plugins.executor
    executor: Executor = made(installed(), "executor", name)
    try:
        info: Any = asked(f"executor {name!r}", "start()", lambda: executor.start(config))
        if not isinstance(info, ExecutorInfo):
            raise PluginError(f"executor {name!r} answers start() with {info!r}, not an ExecutorInfo")
        core = assemble_core(config, executor, info, hooks)
    except BaseException:
        executor.shutdown()
        raise
    core.startup_s = time.perf_counter() - started_s
    about = {
        "platform": config.plugins.platform,
        "attention": info.attention,
        "num_blocks": [group.num_blocks for group in info.kv],
        "startup_s": core.startup_s,
    }
    hooks.call("octavo_engine_started", config=config, info=about)
    return core


def assemble_core(config: EngineConfig, executor: Executor, info: ExecutorInfo, hooks: Hooks | None = None) -> EngineCore:
    """A core on an executor that has started: its cache manager, policy, proposer and scheduler."""
    from octavo.core.discovery import installed
    from octavo.core.kv_cache import KVCacheManager
    from octavo.core.scheduling import Scheduler

    registry = installed()
    max_model_len = config.model.max_model_len
    assert max_model_len is not None, "resolve() makes every choice explicit"
    max_in_flight = _max_in_flight(config, info)
    _warn_of_a_small_budget(config.scheduler)
    kv = KVCacheManager(
        info.kv,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        prefix_hash=config.cache.prefix_hash,
        managers=_kv_managers(registry, info),
    )
    guesser = config.scheduler.speculative
    scheduler = Scheduler(
        config.scheduler,
        kv,
        max_model_len=max_model_len,
        policy=policy(registry, config.scheduler.scheduling_policy),
        proposer=None if guesser is None else proposer(registry, guesser, info.vocab_size),
        max_in_flight=max_in_flight,
    )
    return EngineCore(
        config=config, scheduler=scheduler, executor=executor, info=info, max_in_flight=scheduler.max_in_flight, hooks=hooks
    )


def _warn_of_a_small_budget(config: SchedulerConfig) -> None:
    if config.max_num_batched_tokens < config.max_num_seqs:
        logger.warning(
            "max_num_batched_tokens (%d) is below max_num_seqs (%d): when that many requests run, some get no token in a step "
            "and prompts wait; raise the one or lower the other",
            config.max_num_batched_tokens,
            config.max_num_seqs,
        )


def _kv_managers(registry: Registry, info: ExecutorInfo) -> Mapping[str, type[KVManager]]:
    """The KV managers that groups name. Raises `PluginError` for one whose manifest doesn't list the group's spec."""
    managers = {}
    for group in info.kv:
        if group.manager is None:
            continue
        kind = group.spec.kind if isinstance(group.spec, CustomSpec) else type(group.spec).__name__
        entry = registry.find("kv_manager", group.manager)
        if entry.table is not None and kind not in entry.table.specs:
            raise PluginError(
                f"KV manager {entry.name!r} ({entry.origin}) doesn't manage {kind}; its manifest lists "
                f"{', '.join(entry.table.specs) or 'no specs'}",
                hint="the attention backend names it: report this to its vendor",
            )
        managers[group.manager] = registry.load("kv_manager", group.manager)
    return managers


def _max_in_flight(config: EngineConfig, info: ExecutorInfo) -> int:
    wanted = config.scheduler.async_scheduling
    if config.scheduler.speculative is not None and wanted and "async_scheduling" in config.given:
        raise UsageError(
            f"steps can't be planned ahead with speculative={config.scheduler.speculative}: guesses follow known tokens",
            hint="leave async_scheduling out, or speculative",
        )
    if wanted and info.max_in_flight < 2:
        raise UsageError(
            f"executor {config.plugins.executor!r} runs one step at a time: it can't schedule asynchronously",
            hint="leave async_scheduling out, or choose another executor",
        )
    return 1 if wanted is False else info.max_in_flight
