"""An override holds wherever its op is used; everything else keeps its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.backends.cpu.platform import CpuPlatform
from octavo.core.api.errors import PluginError
from octavo.core.api.ops import COMPOSITES, OPS, LinearImpl, LinearWeight, ParallelContext, WeightPart
from octavo.core.layers import atoms, blocks
from octavo.core.layers.blocks import AttentionBlock, DecoderLayer, LmHead, MlpBlock, Norm
from octavo.core.layers.linear import Linear
from octavo.core.layers.ops import Ops

PLATFORM = CpuPlatform()
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 12, 4, 2, 6, 10, 17


def linear(ops: Ops, outputs: int, inputs: int, seed: int) -> Linear:
    matrix = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    weight = LinearWeight(parts=(WeightPart(format="dense", data=matrix, shape=(outputs, inputs)),))
    return Linear(ops.linear, ops.linear.prepare(weight, ParallelContext(), dtype="float32"))


def norm(size: int, seed: int) -> Norm:
    return Norm(torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.5, 1e-6)


def layer_of(ops: Ops) -> DecoderLayer:
    attention = AttentionBlock(
        layer=0, norm=norm(HIDDEN, 1), qkv=linear(ops, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, 2),
        output=linear(ops, HIDDEN, HEADS * HEAD_DIM, 3), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM, cos_sin=torch.rand(32, 4, generator=torch.Generator().manual_seed(4)), q_norm=norm(HEAD_DIM, 5),
        k_norm=norm(HEAD_DIM, 6), post_norm=norm(HIDDEN, 7),
    )  # fmt: skip
    mlp = MlpBlock(norm=norm(HIDDEN, 8), gate_up=linear(ops, 2 * INNER, HIDDEN, 9), down=linear(ops, HIDDEN, INNER, 10))
    return DecoderLayer(attention=attention, mlp=mlp)


def step_of(ops: Ops) -> Any:
    """A step whose attention repeats v for the heads that share it, so that q, k and v all reach the output."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        shared = HEADS // KV_HEADS
        return q.tanh() * k.repeat_interleave(shared, 1) + v.repeat_interleave(shared, 1)

    return SimpleNamespace(ops=ops, positions=torch.arange(5), attend=attend)


def run(ops: Ops) -> Tensor:
    step = step_of(ops)
    x = ops.embedding(torch.arange(5), torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(11)))
    x, residual = ops.decoder_layer(x, None, layer_of(ops), step)
    x, residual = ops.decoder_layer(x, residual, layer_of(ops), step)
    head = LmHead(norm=norm(HIDDEN, 12), projection=linear(ops, VOCAB, HIDDEN, 13))
    return ops.lm_head(x, residual, head, torch.tensor([1, 4]), step)


def counting(calls: list[str], name: str) -> Any:
    default = getattr(atoms, name, None) or getattr(blocks, name)

    def counted(*arguments: Any) -> Any:
        calls.append(name)
        return default(*arguments)

    return counted


ATOM_CALLS = {  # in two layers, one embedding and one head
    "embedding": 1, "rms_norm": 1 + 2 * 3, "add_rms_norm": 1 + 2 + 1, "rotary": 2, "silu_and_mul": 2, "gather_last": 2,
    "attention_block": 2, "mlp_block": 2, "decoder_layer": 2, "lm_head": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", ATOM_CALLS)
def test_an_override_is_used_everywhere(name: str) -> None:
    calls: list[str] = []
    got = run(Ops({name: counting(calls, name)}, platform=PLATFORM))
    assert len(calls) == ATOM_CALLS[name]
    torch.testing.assert_close(got, run(Ops(platform=PLATFORM)), rtol=0, atol=0)


def test_an_atom_that_computes_something_else_changes_the_result() -> None:
    changed = run(Ops({"silu_and_mul": atoms.gelu_and_mul}, platform=PLATFORM))
    assert (changed - run(Ops(platform=PLATFORM))).abs().max() > 1e-3


def test_a_composite_override_replaces_the_atoms_inside() -> None:
    calls: list[str] = []

    def no_mlp(x: Tensor, residual: Tensor | None, params: MlpBlock, step: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), x if residual is None else x + residual

    run(Ops({"mlp_block": no_mlp, "silu_and_mul": counting(calls, "silu_and_mul")}, platform=PLATFORM))
    assert calls == []


def test_a_linear_override_holds_every_weight() -> None:
    class Doubling(LinearImpl):
        prepared = 0

        def prepare(self, weight: LinearWeight, parallel: ParallelContext, *, dtype: str) -> Tensor:
            self.prepared += 1
            return 2 * weight.parts[0].data

        def apply(self, x: Tensor, prepared: Tensor, bias: Tensor | None = None) -> Tensor:
            return x @ (prepared / 2).t()

    impl = Doubling()
    got = run(Ops({"linear": impl}, platform=PLATFORM))
    assert impl.prepared == 2 * 4 + 1
    torch.testing.assert_close(got, run(Ops(platform=PLATFORM)))


def test_a_layer_that_shares_a_cache_brings_no_k_and_v() -> None:
    ops = Ops(platform=PLATFORM)
    seen: list[Any] = []

    def attend(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor) -> Tensor:
        seen.extend((k, v))
        return q

    params = replace(
        layer_of(ops).attention, qkv=linear(ops, HEADS * HEAD_DIM, HIDDEN, 2), shared_kv=True, k_norm=None, cos_sin=None
    )
    step = SimpleNamespace(ops=ops, positions=torch.arange(5), attend=attend)
    x, residual = ops.attention_block(torch.ones(5, HIDDEN), None, params, step)
    assert seen == [None, None]
    assert x.shape == residual.shape == (5, HIDDEN)


def test_a_soft_cap_bounds_the_logits() -> None:
    ops = Ops(platform=PLATFORM)
    x = 9 * torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    plain, capped = (
        ops.lm_head(
            x,
            None,
            LmHead(norm=norm(HIDDEN, 1), projection=linear(ops, VOCAB, HIDDEN, 2), soft_cap=cap),
            torch.tensor([2]),
            step_of(ops),
        )
        for cap in (None, 1.5)
    )
    assert plain.abs().max() > 3
    torch.testing.assert_close(capped, 1.5 * torch.tanh(plain / 1.5))


def test_every_op_has_a_default() -> None:
    ops = Ops(platform=PLATFORM)
    assert all(hasattr(ops, name) for name in OPS)
    assert set(COMPOSITES) < set(OPS)


def names_used(function: Any) -> Iterator[str]:
    yield from function.__code__.co_names
    for constant in function.__code__.co_consts:
        if hasattr(constant, "co_names"):
            yield from constant.co_names


@pytest.mark.parametrize("composite", COMPOSITES)
def test_a_composite_default_calls_the_ops_that_the_api_lists(composite: str) -> None:
    """An outsider's atom inside a fused composite is found by this list, so it has to be complete."""
    seen: set[str] = set()
    pending = [getattr(blocks, composite)]
    while pending:
        for name in names_used(pending.pop()):
            helper = getattr(blocks, name, None)
            if name.startswith("_") and callable(helper):
                pending.append(helper)
            seen.add(name)
    called = {name for name in seen if name in OPS} | ({"linear"} if seen & {"qkv", "gate_up", "projection"} else set())
    assert called == set(COMPOSITES[composite])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_nrom": atoms.rms_norm}, "no op 'rms_nrom'; did you mean 'rms_norm'"),
        ({"linear": atoms.rms_norm}, "must be a LinearImpl, not function"),
        ({"rotary": 3}, "op 'rotary' must be callable, not int"),
    ],
)
def test_what_is_no_implementation_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        Ops(overrides, platform=PLATFORM)
