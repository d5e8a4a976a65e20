"""Traces of requests as they come in practice, made by a seeded generator: (prompt, output) pairs in order of arrival."""

from __future__ import annotations

import random
from collections.abc import Iterator

Trace = list[tuple[list[int], list[int]]]


def words(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(30_000) for _ in range(rng.randint(low, high))]


def multi_turn(seed: int, *, conversations: int = 40, turns: int = 6) -> Trace:
    """Conversations that interleave; each turn's prompt is everything said before and a new question."""
    rng = random.Random(seed)
    system = words(rng, 40, 90)
    histories = [[*system, *words(rng, 5, 60)] for _ in range(conversations)]
    trace: Trace = []
    for _ in range(turns):
        rng.shuffle(histories)
        for history in histories:
            output = words(rng, 4, 40)
            trace.append((list(history), output))
            history += output + words(rng, 5, 60)
    return trace


def branching(seed: int, *, tasks: int = 12, width: int = 4, depth: int = 4) -> Trace:
    """Agents: each task is a tree of attempts, a branch continues what its parent got; breadth first with random gaps."""
    rng = random.Random(seed)
    system = words(rng, 150, 150)
    trace: Trace = []
    frontier = [[*system, *words(rng, 30, 120)] for _ in range(tasks)]
    for _ in range(depth):
        following = []
        for state in frontier:
            for _ in range(rng.randint(1, width)):
                output = words(rng, 3, 25)
                trace.append((list(state), output))
                following.append([*state, *output, *words(rng, 10, 50)])
        rng.shuffle(following)
        frontier = following[: 3 * tasks]
    return trace


def shared_system_prompt(seed: int, *, requests: int = 250, prompts: int = 5) -> Trace:
    """Unrelated questions behind a handful of long system prompts, some of which begin alike."""
    rng = random.Random(seed)
    common = words(rng, 70, 70)
    systems = [(common if i % 2 else []) + words(rng, 100, 400) for i in range(prompts)]
    return [(rng.choice(systems) + words(rng, 3, 80), words(rng, 2, 30)) for _ in range(requests)]


def traces() -> Iterator[tuple[str, Trace]]:
    for seed in range(2):
        yield f"multi-turn {seed}", multi_turn(seed)
        yield f"branching {seed}", branching(seed)
        yield f"shared system prompt {seed}", shared_system_prompt(seed)
