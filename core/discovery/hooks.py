"""`Hooks`: calls the hooks of the plugins that are turned on, and keeps what they do wrong to themselves.

A hook that raises is logged with its plugin's name, disabled and counted. One that takes longer than its budget
(``OCTAVO_HOOK_BUDGET_MS``) is reported once by name and counted every time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from octavo.core.api.errors import PluginUnavailable
from octavo.core.api.hooks import HookSpecs
from octavo.core.config import environment
from octavo.core.discovery.registry import Registry, is_named, is_on
from octavo.core.discovery.wording import error_text

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig

logger = logging.getLogger("octavo")


@dataclass(frozen=True)
class _Hook:
    """One plugin's implementation of one hook."""

    plugin: str
    call: Callable[..., Any]


class Hooks:
    """The lifecycle hooks of one engine. Without plugins every call is a look into an empty table."""

    def __init__(
        self,
        plugins: Mapping[str, Any] | None = None,
        *,
        budget_ms: float | None = None,
        origins: Mapping[str, str] | None = None,
        unasked: Collection[str] = (),
    ) -> None:
        """``plugins``: objects (or classes, constructed here) with hooks, by plugin name; ``origins``: their distributions.

        Raises `PluginUnavailable` for one that can't be used; those that nobody asked for (``unasked``) are left out instead.
        """
        self._manager = _manager()
        self._budget_s = (environment.hook_budget_ms() if budget_ms is None else budget_ms) / 1e3
        self._hooks: dict[str, list[_Hook]] = defaultdict(list)
        self._errors: Counter[str] = Counter()
        self._slow: Counter[str] = Counter()
        self._reported: set[tuple[str, str]] = set()
        self._origins = origins or {}
        instances = {}
        for name, plugin in (plugins or {}).items():
            try:
                instances[name] = self._register(name, plugin)
            except PluginUnavailable as error:
                _leave_out(error, asked=name not in unasked)
        for name, instance in instances.items():
            self._take_apart(name, instance)

    @classmethod
    def load(cls, registry: Registry, config: EngineConfig) -> Hooks:
        """The hooks that ``--plugin`` names or that autoload. Raises `PluginUnavailable` for one that was named and fails."""
        plugins, origins, unasked = {}, {}, set()
        for entry in registry.of_kind("hook"):
            if not is_on(entry, config.plugins.plugin):
                continue
            asked = is_named(entry, config.plugins.plugin)
            try:
                plugins[entry.name] = registry.load("hook", entry.name)
            except PluginUnavailable as error:
                _leave_out(error, asked=asked)
                continue
            origins[entry.name] = entry.origin
            if not asked:
                unasked.add(entry.name)
        return cls(plugins, origins=origins, unasked=unasked)

    def __bool__(self) -> bool:
        return any(self._hooks.values())

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Every plugin's answer to one hook; a plugin that raises gives none, and is disabled.

        ``octavo_metrics`` answers mappings with their keys put under ``plugin/``, and one with how often hooks raised or were
        slow, under ``hooks/``.
        """
        if hook == "octavo_metrics":
            return [self._metrics()]
        return [result for _, result in self._call(hook, **arguments)]

    def _metrics(self) -> Mapping[str, float]:
        figures: dict[str, float] = {}
        for plugin, result in self._call("octavo_metrics"):
            if not isinstance(result, Mapping) or not all(isinstance(value, (int, float)) for value in result.values()):
                self._disable(plugin, "octavo_metrics", TypeError(f"it returned {result!r}, not a mapping of numbers"))
                continue
            figures |= {f"{plugin}/{key}": float(value) for key, value in result.items()}
        figures |= {f"hooks/errors/{plugin}": float(count) for plugin, count in self._errors.items()}
        figures |= {f"hooks/slow/{plugin}": float(count) for plugin, count in self._slow.items()}
        return figures

    def _register(self, name: str, plugin: Any) -> Any:
        """The plugin's object, with the manager. Raises `PluginUnavailable`; the manager has nothing of it then."""
        who = self._who(name)
        try:
            instance = plugin() if isinstance(plugin, type) else plugin
        except (Exception, SystemExit) as error:
            raise PluginUnavailable(f"{who} failed in __init__(): {error_text(error)}") from error
        alone = _manager()  # where it fails, it leaves traces
        try:
            alone.register(instance, name)
            alone.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginUnavailable(f"{who} doesn't fit octavo.api's hooks: {error}") from error
        if not alone.get_hookcallers(instance):
            raise PluginUnavailable(f"{who} has no hook: mark its methods with octavo.api.hooks.hookimpl")
        self._manager.register(instance, name)
        return instance

    def _take_apart(self, name: str, instance: Any) -> None:
        """A caller of its own for each hook of the plugin, so that each failure has a name."""
        others = [other for other in self._manager.get_plugins() if other is not instance]
        for caller in self._manager.get_hookcallers(instance) or ():
            alone = self._manager.subset_hook_caller(caller.name, others)
            self._hooks[caller.name].append(_Hook(name, alone))

    def _who(self, name: str) -> str:
        return f"hook {name!r} ({self._origins[name]})" if name in self._origins else f"hook {name!r}"

    def _call(self, hook: str, **arguments: Any) -> Sequence[tuple[str, Any]]:
        """Answers with the names of the plugins that gave them."""
        answers = []
        for one in tuple(self._hooks[hook]):
            begin_s = time.perf_counter()
            try:
                results = one.call(**arguments)
            except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - reported here
                self._disable(one.plugin, hook, error)
                continue
            self._note_time(one.plugin, hook, time.perf_counter() - begin_s)
            answers += [(one.plugin, result) for result in results]
        return answers

    def _disable(self, plugin: str, hook: str, error: BaseException) -> None:
        """Take the plugin out of every hook."""
        self._errors[plugin] += 1
        for hooks in self._hooks.values():
            hooks[:] = [other for other in hooks if other.plugin != plugin]
        logger.error(
            "plugin %r raised in %s and is disabled: %s",
            plugin,
            hook,
            error_text(error),
            exc_info=_debugging(error),
        )

    def _note_time(self, plugin: str, hook: str, seconds: float) -> None:
        if seconds <= self._budget_s:
            return
        self._slow[plugin] += 1
        if (plugin, hook) not in self._reported:
            self._reported.add((plugin, hook))
            logger.warning(
                "plugin %r took %.0f ms in %s, its budget is %.0f ms", plugin, seconds * 1e3, hook, self._budget_s * 1e3
            )


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("octavo")
    manager.add_hookspecs(HookSpecs)
    return manager


def _leave_out(error: PluginUnavailable, *, asked: bool) -> None:
    """Go on without a plugin. Raises ``error`` again where the operator asked for it by name."""
    if asked:
        raise error
    logger.warning("%s; going on without it", error)


def _debugging(error: BaseException) -> BaseException | None:
    return error if environment.debug() or logger.isEnabledFor(logging.DEBUG) else None
