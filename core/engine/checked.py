"""Plugins that the engine asks in the middle of its work, held to what `octavo.api` says that they answer.

What comes from outside is wrapped when it is made: an answer that can't be used, and whatever is raised, becomes a
`PluginError` that names the plugin. Core's own policies and proposers are called directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from octavo.core.api.errors import OctavoError, PluginError
from octavo.core.api.scheduling import IntArray, Proposer, SchedulingPolicy
from octavo.core.discovery.loading import root_cause
from octavo.core.discovery.wording import one_line

if TYPE_CHECKING:
    from octavo.core.api.manifest import PluginKind
    from octavo.core.discovery import Registry
    from octavo.core.scheduling.state import RequestView

__all__ = ["CheckedPolicy", "CheckedProposer", "asked", "made", "policy", "proposer"]

_T = TypeVar("_T")


def asked(who: str, what: str, call: Callable[[], _T]) -> _T:
    """``call()``. Raises `PluginError` naming ``who`` for whatever isn't a typed error already."""
    try:
        return call()
    except OctavoError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{who} failed in {what}: {root_cause(error)}") from error


def made(registry: Registry, kind: PluginKind, name: str) -> Any:
    """An instance of the plugin's class."""
    cls = registry.load(kind, name)
    return asked(_who(registry, kind, name), "__init__()", cls)


def policy(registry: Registry, name: str) -> SchedulingPolicy:
    found: SchedulingPolicy = made(registry, "scheduling_policy", name)
    if registry.find("scheduling_policy", name).is_own:
        return found
    return CheckedPolicy(found, _who(registry, "scheduling_policy", name))


def proposer(registry: Registry, name: str, vocab_size: int) -> Proposer:
    found: Proposer = made(registry, "proposer", name)
    if registry.find("proposer", name).is_own or found.location != "engine":
        return found  # what runs in a worker isn't asked here
    return CheckedProposer(found, _who(registry, "proposer", name), vocab_size)


class CheckedPolicy(SchedulingPolicy):
    """A policy whose keys can be compared: tuples of numbers, none of them NaN."""

    def __init__(self, inner: SchedulingPolicy, who: str) -> None:
        self._inner = inner
        self._who = who

    def key(self, request: RequestView) -> tuple[float, ...]:
        return self._checked("key()", lambda: self._inner.key(request))

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        return self._checked("victim_key()", lambda: self._inner.victim_key(request))

    def _checked(self, method: str, call: Callable[[], Any]) -> tuple[float, ...]:
        key = asked(self._who, method, call)
        if not isinstance(key, tuple) or not all(isinstance(part, int | float) and not math.isnan(part) for part in key):
            raise PluginError(f"{self._who} answers {method} with {one_line(repr(key))}, not a tuple of numbers")
        return key


class CheckedProposer(Proposer):
    """A proposer whose guesses are token ids of the model, one list for each sequence."""

    def __init__(self, inner: Proposer, who: str, vocab_size: int) -> None:
        self._inner = inner
        self._who = who
        self._vocab_size = vocab_size

    def propose(self, tokens: Sequence[IntArray], num_speculative_tokens: int) -> Sequence[IntArray]:
        guesses = asked(
            self._who, "propose()", lambda: [np.asarray(guess) for guess in self._inner.propose(tokens, num_speculative_tokens)]
        )
        if len(guesses) != len(tokens):
            raise PluginError(f"{self._who} answers propose() with {len(guesses)} guesses for {len(tokens)} sequences")
        for guess in guesses:
            if guess.shape == (0,):
                continue
            if guess.ndim != 1 or guess.dtype.kind not in "iu" or guess.min() < 0 or guess.max() >= self._vocab_size:
                raise PluginError(
                    f"{self._who} answers propose() with {one_line(repr(guess.tolist()))}, "
                    f"not a list of token ids below {self._vocab_size}"
                )
        return guesses


def _who(registry: Registry, kind: PluginKind, name: str) -> str:
    return registry.find(kind, name).who
