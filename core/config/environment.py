"""Every environment variable that Octavo reads. They are read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.core.api.errors import UsageError
from octavo.core.config.suggest import nearest


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable: its default as text, and what it is for."""

    default: str
    help: str


VARIABLES: Mapping[str, Variable] = {
    "OCTAVO_CACHE_DIR": Variable(default="~/.cache/octavo/models", help="folder of pulled models"),
    "OCTAVO_LOG_LEVEL": Variable(default="warning", help="log level when --log-level isn't given"),
    "OCTAVO_DEBUG": Variable(default="0", help="1: tracebacks, as with --debug"),
    "OCTAVO_PROBE_TIMEOUT_S": Variable(default="2", help="seconds that plugins' probes may take together"),
    "OCTAVO_HOOK_BUDGET_MS": Variable(default="5", help="milliseconds that a plugin's hook may take before it is reported"),
}

SPIN_COUNT = "GOMP_SPINCOUNT"
"""OpenMP's own variable: how long a thread spins at a barrier before it sleeps. Its default, some 16 ms, makes threads that
share their cores with other work wait for one another at nearly every operation; 1000 turns are about 50 microseconds."""

TORCH_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Torch's own variable: 0 keeps torch from importing vendors' packages when it is imported."""


def read(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of one of `VARIABLES`, or its default."""
    value = (os.environ if environ is None else environ).get(name, "")
    return value or VARIABLES[name].default


def given() -> Mapping[str, str]:
    """Those of `VARIABLES` that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def cache_dir() -> Path:
    """The folder of pulled models."""
    return Path(read("OCTAVO_CACHE_DIR")).expanduser()


def probe_timeout_s() -> float:
    """Seconds that probes may take. Raises `UsageError`."""
    return _positive("OCTAVO_PROBE_TIMEOUT_S")


def hook_budget_ms() -> float:
    """Milliseconds that one hook call may take. Raises `UsageError`."""
    return _positive("OCTAVO_HOOK_BUDGET_MS")


def debug() -> bool:
    """Whether tracebacks are wanted."""
    return read("OCTAVO_DEBUG").lower() not in ("0", "false", "no", "off")


def log_level() -> str:
    return read("OCTAVO_LOG_LEVEL").lower()


def torch_autoload() -> bool:
    """Whether torch would import vendors' packages by itself."""
    return os.environ.get(TORCH_AUTOLOAD, "1") == "1"


def disable_torch_autoload() -> None:
    """For this process and those that it starts."""
    os.environ[TORCH_AUTOLOAD] = "0"


def unknown(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """One line for each ``OCTAVO_…`` variable that nothing reads."""
    names = sorted(name for name in (os.environ if environ is None else environ) if name.startswith("OCTAVO_"))
    return tuple(
        f"environment variable {name} is unknown and ignored" + nearest(name, VARIABLES)
        for name in names
        if name not in VARIABLES
    )


def _positive(name: str) -> float:
    text = read(name)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{name} must be a number above 0, not {text!r}")
    return value


def limit_spinning() -> None:
    """Let the host's OpenMP threads sleep early, unless the operator said how they wait. Before torch's first import."""
    if SPIN_COUNT not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        os.environ[SPIN_COUNT] = "1000"
