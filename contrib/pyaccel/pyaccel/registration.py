"""Names the device, loads its library, and adds what torch expects of a device in Python."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from pyaccel import device_module
from pyaccel.build import library

__all__ = ["register"]


def register(name: str) -> None:
    """Make ``torch.device(name)`` and ``torch.<name>`` this device. Once in a process."""
    if name == "hpu":  # torch knows this name: it has a slot of its own
        torch.ops.load_library(library("HPU"))  # type: ignore[no-untyped-call]
        torch.Tensor.hpu = _to_hpu  # type: ignore[attr-defined]
        torch.Tensor.is_hpu = property(lambda self: self.device.type == name)  # type: ignore[attr-defined]
    else:
        _take_the_outsiders_slot(name)
    torch._register_device_module(name, device_module)  # type: ignore[no-untyped-call]
    sys.modules[f"torch.{name}"] = device_module
    device_module.device_type = name
    _watch_reads_in_python()


def _to_hpu(self: torch.Tensor, device: torch.device | int | None = None, non_blocking: bool = False) -> torch.Tensor:
    """What torch gives the tensors of an outsider's device by itself."""
    index = device.index if isinstance(device, torch.device) else device
    return self.to("hpu" if index is None else f"hpu:{index}", non_blocking=non_blocking)


def _take_the_outsiders_slot(name: str) -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(f"another device, {taken!r}, has the one slot that torch has for devices from outside")
    path = library()
    rename_privateuse1_backend(name)
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_storage=True)


def _watch_reads_in_python() -> None:
    """``tolist`` copies by itself, unseen by the library; a ``repr`` shall not, while reads are errors."""
    tolist = torch.Tensor.tolist
    to_text: Any = torch.Tensor.__repr__

    def is_refused(tensor: torch.Tensor) -> bool:
        mine = tensor.device.type == device_module.device_type
        return mine and device_module.reads_are_errors()

    def checked_tolist(self: torch.Tensor) -> Any:
        if is_refused(self):
            raise RuntimeError(f".tolist() makes the host wait for {self.device}, which strict mode forbids")
        return tolist(self)

    def checked_repr(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        if is_refused(self):
            return f"tensor(<{list(self.shape)} not read: strict mode>, device='{self.device}', dtype={self.dtype})"
        return str(to_text(self, tensor_contents=tensor_contents))

    torch.Tensor.tolist = checked_tolist  # type: ignore[method-assign, assignment]
    torch.Tensor.__repr__ = checked_repr  # type: ignore[method-assign, assignment]
