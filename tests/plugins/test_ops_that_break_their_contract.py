"""Ops, linear layers and backends that answer wrongly or with NaN, in any step: the error says what from outside was in use."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.api.errors import EngineError, OctavoError, OutOfMemory, PluginError, UsageError

Add = Callable[..., Path]
OPS = """
import sys
import numpy as np
import torch
from octavo.api.errors import UsageError
from octavo.core.layers import atoms, blocks
from octavo.core.layers.linear import DenseLinear
from octavo.core.worker.sampler import Sampled

class Linear(DenseLinear):
    count = 0
    def after(self, steps):
        # the step's first linear layer is the 1st, 14th, 27th, … call: 3 layers of 4, and the head
        Linear.count += 1
        return Linear.count > 13 * steps

"""
BACKEND = """
import sys
import torch
from octavo.plugins.attention.reference.backend import ReferenceAttention

class Attention(ReferenceAttention):
    count = 0
    def after(self, steps):
        Attention.count += 1
        return Attention.count > 3 * steps

"""
WHO = r"ops plugin 'acme-it' \(acme-ops 1.0\) for {op}"


def install(box: Any, op: str, code: str) -> None:
    box.add(
        "acme-ops",
        manifest=f'[plugin]\nname = "acme-ops"\napi = "1.0"\n[ops.acme-it]\nimplements = ["{op}"]\nplatforms = ["*"]\n',
        files={"it.py": OPS + textwrap.dedent(code)},
        entry_points={"octavo.ops": {"acme-it": "acme_ops.it:make"}},
    )


def run(model: Path, **options: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(model), dtype="float32", num_blocks=64, **{"platform": "cpu", **options}) as llm:
        llm.generate(["w1 w2 w3", "w1"], params, use_tqdm=False)


def linear(body: str) -> str:
    return f"    {body}\n\ndef make(platform): return {{'linear': Linear(platform)}}\n"


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        ("def apply(self, x, w, b=None): return super().apply(x, w, b)[:, :-1]", EngineError, "RuntimeError: shape"),
        ("def apply(self, x, w, b=None): return None", EngineError, "TypeError: 'NoneType' object is not subscriptable"),
        ("def apply(self, x, w, b=None): return np.zeros((2, 2))", EngineError, r"it ran with"),
        (
            "def apply(self, x, w, b=None): return super().apply(x, w, b).double()",
            EngineError,
            r"failed in step 0: RuntimeError: .*same dtype",
        ),
        (
            "def apply(self, x, w, b=None): return None if self.after(2) else super().apply(x, w, b)",
            EngineError,
            "in step 2: TypeError: 'NoneType' object is not subscriptable",
        ),
        ("def apply(self, x, w, b=None): raise OSError('x')", PluginError, "failed in step 0: OSError: x$"),
        ("def apply(self, x, w, b=None): sys.exit(3)", PluginError, "failed in step 0: SystemExit: 3$"),
        ("def apply(self, x, w, b=None): raise UsageError('no')", UsageError, "^no$"),
        ("def apply(self, x, w, b=None): raise torch.OutOfMemoryError('full')", OutOfMemory, "no memory for step 0: full"),
        ("def prepare(self, *a, **k): raise OSError('x')", PluginError, "failed in loading the model: OSError: x$"),
        (
            "def prepare(self, weight, *a, **k): return weight.nothing",
            PluginError,
            "failed in loading the model: AttributeError",
        ),
    ],
)
@pytest.mark.timeout(60)
def test_a_linear_implementation(local_plugins: Any, model: Path, body: str, error: type[OctavoError], says: str) -> None:
    install(local_plugins, "linear", linear(body))
    with pytest.raises(error, match=says) as caught:
        run(model, plugin="acme-ops")
    assert type(caught.value) is error
    if error in (PluginError, EngineError):
        caught.match(WHO.format(op="linear"))


@pytest.mark.parametrize(
    ("op", "body", "error", "says"),
    [
        ("rms_norm", "lambda x, w, e: None", EngineError, "it ran with"),
        ("rms_norm", "lambda x, w, e: atoms.rms_norm(x, w, e)[:, :5]", EngineError, "it ran with"),
        ("rms_norm", "lambda x, w, e: atoms.rms_norm(x, w, e).double()", EngineError, "it ran with"),
        ("rms_norm", "lambda x, w, e: 1 / 0", PluginError, "failed in step 0: ZeroDivisionError"),
        ("mlp_block", "lambda *a: None", EngineError, "cannot unpack non-iterable NoneType"),
        ("decoder_layer", "lambda *a: blocks.decoder_layer(*a)[0]", EngineError, "it ran with"),
        ("lm_head", "lambda *a: None", PluginError, r"the logits are a NoneType, expected \(2, 64\) torch.float32"),
        (
            "lm_head",
            "lambda *a: blocks.lm_head(*a)[:, :9]",
            PluginError,
            r"are \(2, 9\) torch.float32 on cpu, expected \(2, 64\)",
        ),
        (
            "lm_head",
            "lambda *a: blocks.lm_head(*a).double()",
            PluginError,
            r"are \(2, 64\) torch.float64 on cpu, expected",
        ),
        (
            "verify_and_sample",
            "lambda logits, batch: Sampled(token_ids=torch.full((2, 1), 64, dtype=torch.int32))",
            PluginError,
            "gives token id 64 in step 0, expected one from 0 to 63",
        ),
        (
            "verify_and_sample",
            "lambda logits, batch: Sampled(token_ids=torch.full((2, 1), -7, dtype=torch.int32))",
            PluginError,
            "gives token id -1 in step 0, expected one from 0 to 63",
        ),
        ("verify_and_sample", "lambda logits, batch: None", PluginError, "gives a NoneType, not a Sampled"),
        (
            "verify_and_sample",
            "lambda logits, batch: Sampled(token_ids=torch.zeros(3, 1))",
            PluginError,
            r"gives tokens \(3, 1\) torch.float32 on cpu, expected \(2, 1\) torch.int32 on cpu",
        ),
        ("linear", "5", PluginError, "op 'linear' must be a LinearImpl, not int"),
        ("rotary", "5", PluginError, "op 'rotary' must be callable, not int"),
    ],
)
@pytest.mark.timeout(60)
def test_an_op(local_plugins: Any, model: Path, op: str, body: str, error: type[OctavoError], says: str) -> None:
    install(local_plugins, op, f"def make(platform): return {{'{op}': {body}}}\n")
    with pytest.raises(error, match=says) as caught:
        run(model, plugin="acme-ops")
    assert type(caught.value) is error
    caught.match(WHO.format(op=op))
    assert "\n" not in str(caught.value)


def test_nan_of_a_backend_is_not_blamed_on_the_model_alone(local_plugins: Any, model: Path, add_accelerator: Add) -> None:
    body = "    def attend(self, *a, **k): return super().attend(*a, **k).mul_(float('nan') if self.after(2) else 1)\n"
    add_accelerator(local_plugins, files={"attention.py": BACKEND + body})
    says = (
        r"NaN or infinite.*; the step ran with attention backend 'acme-attention' \(acme-octavo 1.0\), platform 'acme' "
        r"\(acme-octavo 1.0\); Octavo's own: model architecture 'llama', every op$"
    )
    with pytest.raises(EngineError, match=says):
        run(model, platform="acme")


def test_nan_of_a_linear_layer_names_it_first(local_plugins: Any, model: Path) -> None:
    install(local_plugins, "linear", linear("def apply(self, x, w, b=None): return super().apply(x, w, b) * float('nan')"))
    says = (
        rf"NaN or infinite.*; the step ran with {WHO.format(op='linear')}; Octavo's own: attention backend 'reference', "
        r"model architecture 'llama', platform 'cpu', every other op$"
    )
    with pytest.raises(EngineError, match=says):
        run(model, plugin="acme-ops")


def test_a_backend_that_fails_after_its_first_run_is_named_too(local_plugins: Any, model: Path, add_accelerator: Add) -> None:
    body = "    def attend(self, *a, **k): return 1 / 0 if self.after(2) else super().attend(*a, **k)\n"
    add_accelerator(local_plugins, files={"attention.py": BACKEND + body})
    says = r"attention backend 'acme-attention' \(acme-octavo 1.0\) failed in step 2: ZeroDivisionError"
    with pytest.raises(PluginError, match=says):
        run(model, platform="acme")


def test_good_ones_from_outside_change_nothing(local_plugins: Any, model: Path) -> None:
    install(local_plugins, "linear", linear("pass"))
    run(model, plugin="acme-ops")
