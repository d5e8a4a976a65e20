"""The torch defaults against float64 definitions written here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.core.api.errors import UsageError
from octavo.core.layers import atoms
from octavo.core.layers.dtypes import TORCH_DTYPES, dtype_word, torch_dtype


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rms_norm_is_computed_in_float32_whatever_comes_in() -> None:
    x, weight = draw(7, 64), draw(64, seed=1)
    torch.testing.assert_close(atoms.rms_norm(x, weight, 1e-5).double(), norm64(x, weight, 1e-5), rtol=0, atol=2e-6)
    large = (300 * x).half()  # squares overflow float16
    got = atoms.rms_norm(large, weight, 1e-5)
    assert got.dtype is torch.float16
    torch.testing.assert_close(got.double(), norm64(large, weight, 1e-5), rtol=1e-3, atol=1e-6)


def test_add_rms_norm_gives_the_sum_too() -> None:
    x, residual, weight = draw(3, 16), draw(3, 16, seed=1), draw(16, seed=2)
    normed, total = atoms.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), norm64(x + residual, weight, 1e-6), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_turns_pairs_by_their_angle_and_leaves_the_rest(rotary_dim: int) -> None:
    q, positions = draw(3, 2, 8), torch.tensor([0, 5, 2])
    angles = torch.rand(6, rotary_dim // 2, generator=torch.Generator().manual_seed(3))
    turned, nothing = atoms.rotary(positions, q, None, torch.cat([angles.cos(), angles.sin()], -1))
    assert nothing is None
    half = rotary_dim // 2
    before = torch.complex(q[..., :half].double(), q[..., half:rotary_dim].double())
    after = before * torch.exp(1j * angles.double()[positions])[:, None]
    torch.testing.assert_close(turned[..., :half].double(), after.real, rtol=0, atol=1e-6)
    torch.testing.assert_close(turned[..., half:rotary_dim].double(), after.imag, rtol=0, atol=1e-6)
    assert torch.equal(turned[..., rotary_dim:], q[..., rotary_dim:])


def test_rotary_keeps_the_dtype_and_treats_k_like_q() -> None:
    x = draw(3, 2, 8).bfloat16()
    table = torch.rand(9, 8, generator=torch.Generator().manual_seed(3))
    q, k = atoms.rotary(torch.arange(3), x, x[:, :1], table)
    assert q.dtype is torch.bfloat16
    assert k is not None
    assert torch.equal(k, q[:, :1])


def test_gated_activations() -> None:
    x = 3 * draw(5, 12)
    gate, up = x[:, :6].double(), x[:, 6:].double()
    silu = gate / (1 + (-gate).exp()) * up
    gelu = 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up
    torch.testing.assert_close(atoms.silu_and_mul(x).double(), silu, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(atoms.gelu_and_mul(x).double(), gelu, rtol=1e-6, atol=1e-6)


def test_rows_are_picked() -> None:
    table = draw(9, 4)
    assert torch.equal(atoms.embedding(torch.tensor([8, 0, 8]), table), table[[8, 0, 8]])
    assert torch.equal(atoms.gather_last(table, torch.tensor([3])), table[3:4])


def test_dtype_words_go_both_ways_and_others_are_refused() -> None:
    assert all(dtype_word(torch_dtype(word)) == word for word in TORCH_DTYPES)
    with pytest.raises(UsageError, match="no dtype 'bf16'"):
        torch_dtype("bf16")
    with pytest.raises(UsageError, match=r"torch\.complex64"):
        dtype_word(torch.complex64)
