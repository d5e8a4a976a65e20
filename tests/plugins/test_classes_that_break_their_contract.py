"""Platforms and attention backends that answer with nothing, with something else or not at all: each fails with its name."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.api.errors import OctavoError, OutOfMemory, PluginError, Unsupported

Add = Callable[..., Path]
PLATFORM = """
import sys
from octavo.api.platform import ConfigChange, MemoryInfo
from octavo.backends.cpu.platform import CpuPlatform

class Platform(CpuPlatform):
"""
BACKEND = """
import sys
from dataclasses import replace
import torch
from octavo.plugins.attention.reference.backend import ReferenceAttention

class Attention(ReferenceAttention):
"""


def run(model: Path) -> None:
    with LLM(str(model), platform="acme", num_blocks=64) as llm:
        llm.generate("w1 w2 w3", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)


def methods(head: str, body: str) -> str:
    return head + textwrap.indent(body, "    ") + "\n"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def __init__(self): sys.exit(3)", r"platform 'acme' \(acme-octavo 1.0\) is failed-to-load: SystemExit: 3"),
        ("def devices(self): return None", r"'acme' failed in devices\(\): TypeError: 'NoneType' object is not iterable"),
        ("def devices(self): return ['x']", r"'acme' answers devices\(\) with 'x', not a DeviceInfo"),
        ("def devices(self): sys.exit(3)", r"'acme' failed in devices\(\): SystemExit: 3"),
        ("def propose(self, config): return None", r"'acme' failed in propose\(\): TypeError"),
        ("def propose(self, config): return [1]", r"'acme' answers propose\(\) with 1, not a ConfigChange"),
        ("def reject(self, config): return None", r"'acme' failed in reject\(\): TypeError"),
        ("def reject(self, config): return ['no']", r"'acme' answers reject\(\) with 'no', not a Reason"),
        ("def bind(self, index): raise OSError('gone')", r"'acme' failed in bind\(\): OSError: gone"),
        ("def memory(self): return None", r"'acme' answers memory\(\) with None, not a MemoryInfo"),
        (
            "def memory(self): return MemoryInfo(free_bytes=float('nan'), total_bytes=1, peak_bytes=0)",
            r"'acme' answers memory\(\) with MemoryInfo\(free_bytes=nan.*, not a MemoryInfo of whole numbers",
        ),
        ("def memory(self): raise OSError('gone')", r"'acme' failed in memory\(\): OSError: gone"),
        ("def worker_factory(self): return 5", "'acme' failed in making its worker: TypeError: 'int' object is not callable"),
        ("def worker_factory(self): return lambda *given: None", "'acme' made None, which is no Worker: it lacks load,"),
    ],
)
def test_a_platform_that_breaks_its_contract_is_named(
    local_plugins: Any, model: Path, add_accelerator: Add, body: str, says: str
) -> None:
    add_accelerator(local_plugins, files={"platform.py": methods(PLATFORM, body)})
    with pytest.raises(PluginError, match=says):
        run(model)


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        ("def __init__(self, *a, **k): raise OSError('x')", PluginError, r"failed in __init__\(\): OSError: x"),
        ("def kv_format(self): return None", PluginError, r"answers kv_format\(\) with None, not a KVFormat"),
        ("def kv_format(self): raise OSError('x')", PluginError, r"failed in kv_format\(\): OSError: x"),
        (
            "def kv_format(self): return replace(super().kv_format(), buffers={})",
            PluginError,
            r"kv_format\(\) with KVFormat\(buffers={}, unit='block'\), not a KVFormat with named buffers",
        ),
        (
            "def kv_format(self): return replace(super().kv_format(), buffers={'k': 7})",
            PluginError,
            r"kv_format\(\) with 7 as buffer 'k', not a BufferSpec",
        ),
        (
            "def kv_format(self): return replace(super().kv_format(), unit='page')",
            PluginError,
            r"kv_format\(\) with unit 'page', expected 'block' or 'request'",
        ),
        ("def allocate_kv(self, n): return None", PluginError, r"allocate_kv\(\) with a NoneType, expected 3: one a layer"),
        (
            "def allocate_kv(self, n): return super().allocate_kv(n)[:1]",
            PluginError,
            r"allocate_kv\(\) with 1 caches, expected 3: one a layer",
        ),
        ("def allocate_kv(self, n): raise MemoryError('full')", OutOfMemory, "no memory for the KV cache: full"),
        ("def plan(self, batch): raise OSError('x')", PluginError, r"failed in plan\(\): OSError: x"),
        ("def plan(self, batch): raise KeyboardInterrupt", OctavoError, "the worker failed in step 0: KeyboardInterrupt"),
        ("def attend(self, *a, **k): return None", Unsupported, r"gave a NoneType in layer 0, expected \(3, 4, 8\)"),
        ("def forward(self, *a, **k): return None", Unsupported, "gave a NoneType, no AttentionResult, in layer 0"),
        (
            "def forward(self, *a, **k): return super().forward(*a, **k)._replace(kv=None)",
            Unsupported,
            "gave a NoneType as its cache in layer 0",
        ),
        (
            "def attend(self, *a, **k): return super().attend(*a, **k).double()",
            Unsupported,
            r"gave \(3, 4, 8\) torch.float64 on cpu in layer 0, expected \(3, 4, 8\) torch.(bfloat16|float32) on cpu",
        ),
        ("def attend(self, *a, **k): return super().attend(*a, **k).to('meta')", Unsupported, "on meta in layer 0, expected"),
        ("def attend(self, *a, **k): sys.exit(4)", Unsupported, "failed in layer 0, .*: SystemExit: 4"),
        (
            "def attend(self, *a, **k): raise torch.OutOfMemoryError('device full')",
            OutOfMemory,
            "no memory for step 0: device full; lower --max-num-batched-tokens",
        ),
        ("@classmethod\ndef supports(cls, *a, **k): return None", PluginError, r"answers supports\(\) with None, not a"),
        ("@classmethod\ndef supports(cls, *a, **k): raise OSError('x')", PluginError, r"failed in supports\(\): OSError: x"),
    ],
)
@pytest.mark.timeout(60)
def test_a_backend_that_breaks_its_contract_is_named(
    local_plugins: Any, model: Path, add_accelerator: Add, body: str, error: type[Exception], says: str
) -> None:
    add_accelerator(local_plugins, files={"attention.py": methods(BACKEND, body)})
    with pytest.raises(error, match=says) as caught:
        run(model)
    told = str(caught.value)
    assert error not in (PluginError, Unsupported) or "attention backend 'acme-attention'" in told
    assert "\n" not in told
