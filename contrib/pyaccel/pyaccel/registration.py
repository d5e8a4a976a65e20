"""Names the device, loads its library, and adds what torch expects of a device in Python."""

from __future__ import annotations

import sys
from typing import Any

import torch

import pyaccel.device_module
from pyaccel.build import library

__all__ = ["register"]


def register(name: str) -> None:
    """Make ``torch.device(name)`` and ``torch.<name>`` this device. Once in a process."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(f"another device, {taken!r}, has the one slot that torch has for devices from outside")
    path = library()
    torch.utils.rename_privateuse1_backend(name)
    torch.ops.load_library(path)
    torch._register_device_module(name, pyaccel.device_module)
    sys.modules[f"torch.{name}"] = pyaccel.device_module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _watch_reads_in_python()


def _watch_reads_in_python() -> None:
    """``tolist`` copies by itself, unseen by the library; a ``repr`` shall not, while reads are errors."""
    tolist, to_text = torch.Tensor.tolist, torch.Tensor.__repr__

    def checked_tolist(self: torch.Tensor) -> Any:
        if self.device.type == torch._C._get_privateuse1_backend_name() and pyaccel.device_module._reads_are_errors():
            raise RuntimeError(f".tolist() makes the host wait for {self.device}, which strict mode forbids")
        return tolist(self)

    def checked_repr(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        if self.device.type == torch._C._get_privateuse1_backend_name() and pyaccel.device_module._reads_are_errors():
            return f"tensor(<{list(self.shape)} not read: strict mode>, device='{self.device}', dtype={self.dtype})"
        return to_text(self, tensor_contents=tensor_contents)

    torch.Tensor.tolist = checked_tolist  # type: ignore[method-assign, assignment]
    torch.Tensor.__repr__ = checked_repr  # type: ignore[method-assign, assignment]
