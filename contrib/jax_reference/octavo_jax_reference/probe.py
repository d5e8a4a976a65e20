"""Whether JAX is there, without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from octavo.api.manifest import ProbedDevice, ProbeResult


def probe() -> ProbeResult:
    if find_spec("jax") is None:
        return ProbeResult(reason="jax is not installed", hint="pip install jax")
    return ProbeResult(devices=[ProbedDevice(index=0, name="host, through JAX")])
