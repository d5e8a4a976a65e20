"""pyaccel computes what the CPU computes, bit for bit, and every result stays on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyaccel
import pytest
import torch
from torch import Tensor
from torch.nn import functional

DEVICE = "pyaccel:1"


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    pyaccel.install()
    before = torch.pyaccel.current_device()
    torch.pyaccel.set_device(0)  # what is asked of device 1 must not fall on the current one
    yield
    torch.pyaccel.set_device(before)


def x() -> Tensor:
    return torch.linspace(-2, 2, 24).view(4, 6).contiguous()


def y() -> Tensor:
    return torch.linspace(0.5, 3, 24).flip(0).view(4, 6).contiguous()


def square() -> Tensor:
    return torch.linspace(-1, 1, 16).view(4, 4) + 2 * torch.eye(4)


def index() -> Tensor:
    return torch.tensor([[0, 2, 1, 0, 3, 2], [1, 0, 0, 3, 2, 1]])


def rows() -> Tensor:
    return torch.tensor([3, 0, 2])


def images() -> Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


def filters() -> Tensor:
    return torch.linspace(-1, 1, 4 * 3 * 3 * 3).view(4, 3, 3, 3)


def heads() -> Tensor:
    return torch.linspace(-1, 1, 2 * 4 * 5 * 8).view(2, 4, 5, 8).sin()


# (what, function of tensors, the tensors' makers)
CASES: list[tuple[str, Callable[..., Any], list[Callable[[], Tensor]]]] = [
    # elementwise
    ("add", torch.add, [x, y]),
    ("add_alpha", lambda a, b: torch.add(a, b, alpha=0.5), [x, y]),
    ("add_scalar", lambda a: a + 2, [x]),
    ("sub", torch.sub, [x, y]),
    ("rsub", lambda a: 1 - a, [x]),
    ("mul", torch.mul, [x, y]),
    ("mul_broadcast", lambda a, b: a * b[:, :1], [x, y]),
    ("div", torch.div, [x, y]),
    ("floor_divide", lambda a, b: a // b, [x, y]),
    ("remainder", lambda a, b: a % b, [x, y]),
    ("pow", lambda a: a**2, [x]),
    ("neg_abs", lambda a: (-a).abs(), [x]),
    ("exp_log", lambda a: a.exp().log(), [y]),
    ("sqrt_rsqrt", lambda a: a.sqrt() + a.rsqrt(), [y]),
    ("sin_cos", lambda a: a.sin() * a.cos(), [x]),
    ("tanh_sigmoid", lambda a: a.tanh() + a.sigmoid(), [x]),
    ("erf", torch.erf, [x]),
    ("clamp", lambda a: a.clamp(-1, 1), [x]),
    ("minimum_maximum", lambda a, b: torch.minimum(a, b) + torch.maximum(a, b), [x, y]),
    ("where", lambda a, b: torch.where(a > 0, a, b), [x, y]),
    ("where_scalar", lambda a: torch.where(a > 0, a, 0.0), [x]),
    ("lerp", lambda a, b: torch.lerp(a, b, 0.3), [x, y]),
    ("addcmul_addcdiv", lambda a, b: torch.addcmul(a, b, b) + torch.addcdiv(a, a, b), [x, y]),
    ("comparisons", lambda a, b: (a < b) ^ (a >= b) | (a == b), [x, y]),
    ("bitwise", lambda a: (a & 1) | (a << 2) ^ (a >> 1), [index]),
    ("isnan_isfinite", lambda a: a.log().isnan() | a.isfinite(), [x]),
    ("nan_to_num", lambda a: a.log().nan_to_num(7.0), [x]),
    ("round_floor_ceil", lambda a: a.round() + a.floor() + a.ceil() + a.trunc(), [x]),
    # activations
    ("silu", functional.silu, [x]),
    ("gelu", functional.gelu, [x]),
    ("gelu_tanh", lambda a: functional.gelu(a, approximate="tanh"), [x]),
    ("relu", functional.relu, [x]),
    ("softplus", functional.softplus, [x]),
    ("softmax", lambda a: a.softmax(-1), [x]),
    ("log_softmax", lambda a: a.log_softmax(0), [x]),
    # reductions
    ("sum", lambda a: a.sum(), [x]),
    ("sum_dim", lambda a: a.sum(1, keepdim=True), [x]),
    ("mean_var_std", lambda a: (a.mean(0), a.var(0), a.std(1)), [x]),
    ("amax_amin", lambda a: (a.amax(0), a.amin(1)), [x]),
    ("max_dim", lambda a: a.max(1), [x]),
    ("argmax_argmin", lambda a: (a.argmax(-1), a.argmin(0)), [x]),
    ("any_all", lambda a: ((a > 1).any(1), (a > -3).all()), [x]),
    ("prod", lambda a: a.prod(0), [y]),
    ("norm", lambda a: torch.linalg.vector_norm(a, dim=-1), [x]),
    ("logsumexp", lambda a: a.logsumexp(1), [x]),
    ("cumsum_cumprod", lambda a: (a.cumsum(1), a.cumprod(0)), [x]),
    ("cummax", lambda a: a.cummax(1), [x]),
    ("count_nonzero", lambda a: a.count_nonzero(1), [index]),
    # ordering
    ("sort", lambda a: a.sort(0, descending=True), [x]),
    ("argsort", lambda a: a.argsort(dim=1, stable=True), [index]),
    ("topk", lambda a: a.topk(3, dim=1), [x]),
    ("kthvalue", lambda a: a.kthvalue(2, dim=1), [x]),
    ("searchsorted", lambda a: torch.searchsorted(a.flatten(), a[:, 0].contiguous()), [x]),
    ("unique", lambda a: a.unique(return_inverse=True, return_counts=True), [index]),
    ("bincount", lambda a: a.flatten().bincount(minlength=6), [index]),
    ("nonzero", torch.nonzero, [index]),
    # matrices
    ("matmul", lambda a, b: a @ b.T, [x, y]),
    ("bmm", lambda a: a[0] @ a[1].transpose(-1, -2), [heads]),
    ("mv_dot", lambda a, b: (a @ b[0], a[0].dot(b[0])), [x, y]),
    ("addmm", lambda a, b: torch.addmm(b, a, a.T @ b), [x, y]),
    ("linear", lambda a, b: functional.linear(a, b, a[:, 0]), [x, y]),
    ("einsum", lambda a: torch.einsum("bhqd,bhkd->bhqk", a, a), [heads]),
    ("outer", lambda a: torch.outer(a[0], a[1]), [x]),
    ("tril_triu", lambda a: a.tril() + a.triu(1), [square]),
    ("cholesky", lambda a: torch.linalg.cholesky(a @ a.T + torch.eye(4, device=a.device)), [square]),
    ("inverse", torch.linalg.inv, [square]),
    ("svd", torch.linalg.svdvals, [square]),
    ("scaled_dot_product_attention", lambda a: functional.scaled_dot_product_attention(a, a, a, is_causal=True), [heads]),
    ("attention_with_mask", lambda a: functional.scaled_dot_product_attention(a, a, a, attn_mask=(a @ a.mT) > 0), [heads]),
    ("grouped_attention", lambda a: functional.scaled_dot_product_attention(a, a[:, :2], a[:, :2], enable_gqa=True), [heads]),
    # shapes and views
    ("view", lambda a: a.view(3, 8), [x]),
    ("reshape_copying", lambda a: a.T.reshape(8, 3), [x]),
    ("view_dtype", lambda a: a.view(torch.int32), [x]),
    ("transpose_permute", lambda a: a.transpose(1, 2).permute(3, 0, 2, 1), [heads]),
    ("expand", lambda a: a[:1].expand(3, -1) + 0, [x]),
    ("squeeze_unsqueeze", lambda a: a[None, :, None].squeeze(0), [x]),
    ("split", lambda a: a.split([1, 3]), [x]),
    ("chunk_stack", lambda a: torch.stack(a.chunk(3, dim=1)), [x]),
    ("unbind", lambda a: a.unbind(0), [x]),
    ("cat", lambda a, b: torch.cat((a, b), dim=1), [x, y]),
    ("slice_step", lambda a: a[1:, ::2], [x]),
    ("narrow_select", lambda a: a.narrow(1, 2, 3).select(0, 1), [x]),
    ("as_strided", lambda a: a.as_strided((3, 3), (6, 2), 1), [x]),
    ("unfold", lambda a: a.unfold(1, 3, 2), [x]),
    ("diagonal", torch.diagonal, [square]),
    ("flip_roll", lambda a: a.flip(0).roll(1, 1), [x]),
    ("repeat_tile", lambda a: a.repeat(2, 1).tile(1, 2), [x]),
    ("repeat_interleave", lambda a: a.repeat_interleave(2, dim=0), [x]),
    ("pad", lambda a: functional.pad(a, (1, 2, 0, 1), value=3.0), [x]),
    ("view_as_complex", lambda a: torch.view_as_real(torch.view_as_complex(a.view(4, 3, 2)).conj() * 2), [x]),
    ("meshgrid", lambda a: torch.meshgrid(a[0], a[1], indexing="ij"), [x]),
    # indexing
    ("index_select", lambda a, i: a.index_select(0, i), [x, rows]),
    ("index", lambda a, i: a[i], [x, rows]),
    ("index_two", lambda a, i: a[i, i], [square, rows]),
    ("boolean_mask", lambda a: a[a > 0], [x]),
    ("masked_select", lambda a: a.masked_select(a > 0), [x]),
    ("masked_fill", lambda a: a.masked_fill(a > 0, -1), [x]),
    ("gather", lambda a, i: a.gather(1, i.clamp(max=5)), [x, index]),
    ("take_along_dim", lambda a, i: a.take_along_dim(i, dim=0), [x, index]),
    ("scatter", lambda a, i: a.clone().scatter_(0, i, 9.0), [x, index]),
    ("scatter_add", lambda a, i: torch.zeros_like(a).scatter_add_(0, i, a), [x, index]),
    ("index_add", lambda a, i: a.clone().index_add_(0, i, a[:3]), [x, rows]),
    ("index_copy", lambda a, i: a.clone().index_copy_(0, i, a[:3] * 2), [x, rows]),
    ("index_put", lambda a, i: a.clone().index_put_((i,), a[:3] * 2), [x, rows]),
    ("index_put_accumulate", lambda a, i: a.clone().index_put_((i,), a[:3], accumulate=True), [x, rows]),
    ("index_fill", lambda a, i: a.clone().index_fill_(1, i, 5), [x, rows]),
    ("one_hot", lambda i: functional.one_hot(i, 4), [rows]),
    ("embedding", lambda a, i: functional.embedding(i, a), [x, rows]),
    # making
    ("arange", lambda a: torch.arange(1, 20, 3, device=a.device), [x]),
    ("linspace", lambda a: torch.linspace(0, 1, 7, device=a.device), [x]),
    ("eye_full", lambda a: torch.eye(3, device=a.device) + torch.full((3,), 2.0, device=a.device), [x]),
    ("zeros_ones_like", lambda a: torch.zeros_like(a) + torch.ones_like(a), [x]),
    ("new_tensor", lambda a: a.new_tensor([1, 2]) + a.new_zeros(2) + a.new_full((2,), 3), [x]),
    ("tril_indices", lambda a: torch.tril_indices(3, 3, device=a.device), [x]),
    ("tensor_from_list", lambda a: torch.tensor([1.5, 2.5], device=a.device), [x]),
    # dtypes
    ("to_bfloat16", lambda a: a.bfloat16() @ a.bfloat16().T, [x]),
    ("to_float16", lambda a: a.half() * 3, [x]),
    ("to_float8", lambda a: a.to(torch.float8_e4m3fn).float(), [x]),
    ("to_int8", lambda a: (a * 10).to(torch.int8), [x]),
    ("to_double", lambda a: a.double().exp(), [x]),
    ("to_bool", lambda a: (a * 0 + 1).bool(), [x]),
    # layers
    ("rms_norm", lambda a: functional.rms_norm(a, (6,), a[0]), [x]),
    ("layer_norm", lambda a: functional.layer_norm(a, (6,), a[0], a[1]), [x]),
    ("batch_norm", lambda a: functional.batch_norm(a, a[0], a[1].abs(), training=False), [y]),
    ("group_norm", lambda a: functional.group_norm(a, 3), [images]),
    ("conv2d", lambda a, w: functional.conv2d(a, w, padding=1), [images, filters]),
    ("conv_bias", lambda a, w: functional.conv2d(a, w, w[:, 0, 0, 0], stride=2), [images, filters]),
    ("conv_transpose", lambda a, w: functional.conv_transpose2d(functional.conv2d(a, w), w), [images, filters]),
    ("conv1d", lambda a: functional.conv1d(a[0], a[0, :, :, :3]), [images]),
    ("pooling", lambda a: functional.max_pool2d(a, 2) + functional.avg_pool2d(a, 2), [images]),
    ("interpolate", lambda a: functional.interpolate(a, scale_factor=2, mode="bilinear"), [images]),
    ("cross_entropy", lambda a: functional.cross_entropy(a, torch.zeros(4, dtype=torch.long, device=a.device)), [x]),
]  # fmt: skip


# On a device that isn't a CPU, torch takes these apart into smaller ops, which round differently.
TAKEN_APART = ("scaled_dot_product_attention", "attention_with_mask", "grouped_attention", "layer_norm", "group_norm")


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    assert isinstance(value, tuple | list), f"a result of type {type(value).__name__}"
    return [tensor for item in value for tensor in tensors_in(item)]


def assert_same(got: object, want: object, *, rtol: float = 0, atol: float = 0) -> None:
    ours, theirs = tensors_in(got), tensors_in(want)
    assert len(ours) == len(theirs) > 0
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.device == torch.device(DEVICE)
        assert mine.dtype == reference.dtype
        assert mine.stride() == reference.stride()
        torch.testing.assert_close(mine.cpu(), reference, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("mode", ["inference", "no_grad", "grad"])
@pytest.mark.parametrize(("name", "function", "makers"), [pytest.param(name, f, m, id=name) for name, f, m in CASES])
def test_op_gives_the_cpus_values_on_the_device(
    mode: str, name: str, function: Callable[..., Any], makers: list[Callable[[], Tensor]]
) -> None:
    context = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}[mode]
    with context():
        want = function(*[make() for make in makers])
        got = function(*[make().to(DEVICE) for make in makers])
        if name in TAKEN_APART:
            assert_same(got, want, rtol=1e-4, atol=3e-6)
        else:
            assert_same(got, want)


INPLACE: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("add", lambda a: a.add_(1)),
    ("on_a_view", lambda a: a[1:, ::2].mul_(3)),
    ("on_a_transpose", lambda a: a.T[2].zero_()),
    ("copy_into_slice", lambda a: a[0].copy_(a[1].clone())),
    ("setitem_scalar", lambda a: a.__setitem__((slice(1, 3), 2), 7.0)),
    ("setitem_mask", lambda a: a.__setitem__(a > 0, -1.0)),
    ("setitem_mask_values", lambda a: a.__setitem__(a > 0, a[a > 0] * 2)),
    ("fill_diagonal", lambda a: a.fill_diagonal_(4)),
    ("clamp_min", lambda a: a.clamp_min_(0)),
    ("unsqueeze", lambda a: a.unsqueeze_(0)),
    ("transpose", lambda a: a.t_()),
    ("resize_smaller", lambda a: a.resize_(2, 3)),
    ("resize_larger_then_fill", lambda a: a.resize_(40).fill_(2)),
    ("set_to_another", lambda a: a.set_(a[1:].clone())),
    ("foreach", lambda a: torch._foreach_add_([a[0], a[1]], 2.0)),
]


@pytest.mark.parametrize("change", [pytest.param(f, id=name) for name, f in INPLACE])
def test_change_in_place_reaches_the_same_elements(change: Callable[[Tensor], Any]) -> None:
    ours, theirs = x().to(DEVICE), x()
    with torch.no_grad():
        change(ours)
        change(theirs)
    assert_same(ours, theirs)


def test_in_place_op_returns_its_argument() -> None:
    a = x().to(DEVICE)
    assert a.add_(1) is a
    assert a.view(-1)[0].data_ptr() == a.data_ptr()


@pytest.mark.parametrize("shape", [(0,), (4, 6), (2, 2)])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_out_argument_is_written_and_resized(shape: tuple[int, ...]) -> None:
    out = torch.empty(shape, device=DEVICE)
    held = torch.pyaccel.memory_allocated(1)
    result = torch.mul(x().to(DEVICE), 2, out=out)
    assert result is out
    assert_same(out, x() * 2)
    if shape == (0,):
        assert torch.pyaccel.memory_allocated(1) == held + 512


def test_views_share_storage_and_copies_do_not() -> None:
    a = x().to(DEVICE)
    view, copy = a[1:].view(-1).unfold(0, 2, 2), a.clone()
    a.fill_(8)
    assert bool((view.cpu() == 8).all())
    assert_same(copy, x())
    assert view.untyped_storage().data_ptr() == a.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()


def test_gradients_equal_the_cpus() -> None:
    def gradients(device: str) -> list[Tensor]:
        a, w = images().to(device).requires_grad_(), filters().to(device).requires_grad_()
        b = y().to(device).requires_grad_()
        hidden = functional.silu(functional.conv2d(a, w, padding=1)).mean((2, 3)) @ b
        functional.rms_norm(hidden, (6,)).pow(2)[:, 1:4].softmax(-1).log().sum().backward()
        return [tensor.grad for tensor in (a, w, b) if tensor.grad is not None]

    assert_same(gradients(DEVICE), gradients("cpu"), rtol=1e-5, atol=1e-7)


def test_a_module_moves_and_computes() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    with torch.no_grad():
        want = module(rows())
        assert_same(module.to(DEVICE)(rows().to(DEVICE)), want, rtol=1e-5, atol=1e-6)


def test_an_op_of_another_library_is_not_run_behind_its_back() -> None:
    with torch.library._scoped_library("pyaccel_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        assert torch.ops.pyaccel_test.double(torch.ones(2)).tolist() == [2, 2]
        with pytest.raises(NotImplementedError, match="has no kernel for pyaccel"):
            torch.ops.pyaccel_test.double(torch.ones(2, device=DEVICE))
