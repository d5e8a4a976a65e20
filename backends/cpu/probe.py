"""The CPU's probe: there always is one."""

from __future__ import annotations

from octavo.api.manifest import ProbedDevice, ProbeResult
from octavo.backends.cpu.host import architecture, cpu_allowance, cpu_name, total_bytes

__all__ = ["probe"]


def probe() -> ProbeResult:
    """One device: the processors that this process may use, as one."""
    device = ProbedDevice(
        index=0, name=cpu_name(), arch=architecture(), total_bytes=total_bytes(), properties={"threads": cpu_allowance()}
    )
    return ProbeResult(devices=(device,))
