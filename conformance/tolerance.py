"""How far a kernel may be from the oracle: a bound for each element, and one for the tensor's RMS error.

With ``u`` the unit roundoff of the output dtype, ``u32`` that of float32, and A, S, n, D as in `octavo.conformance.oracle`::

    |got - want| ≤ u |want| + A (2u + 2L + (n + 64) u32)       L = (D + 8) u32 S
                                                                 + 4n u32          with ALiBi
                                                                 + cap 2^-10       manifest: soft_cap_approximate
                                                                 + u S             manifest: q_prescaled

    rms(got - want) ≤ max(2 rms(baseline - want), u rms(want)) (1 + 4 / √N)      N elements

The first catches a wrong element; the second a kernel that is a little off everywhere, as one that accumulates in bfloat16. The
last factor is a mean's own scatter: of one element the baseline may be exact by luck, of thousands it can't be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from octavo.api.attention import AttentionSpec
from octavo.api.manifest import Numerics
from octavo.conformance.baseline import EXACT
from octavo.conformance.dtypes import FLOAT32_ROUNDOFF, TORCH_DTYPES, unit_roundoff
from octavo.conformance.oracle import Expected, Float64Array

__all__ = ["Deviation", "check", "check_lse", "element_bound", "logit_error"]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a result is from what was expected. Ratios are to what is allowed: up to 1 passes."""

    what: str  # "out", "lse"
    worst: float  # largest |got - want| / bound; inf where got isn't finite
    where: tuple[int, ...]  # its index: (token, head[, dim])
    got: float
    want: float
    bound: float
    rms: float
    rms_limit: float
    problem: str = ""  # a wrong shape or dtype: nothing was compared

    @property
    def rms_ratio(self) -> float:
        return _ratio(np.float64(self.rms), np.float64(self.rms_limit)).item()

    @property
    def passed(self) -> bool:
        return not self.problem and self.worst <= 1 and self.rms_ratio <= 1

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        if self.problem:
            return f"{self.what}: {self.problem}"
        verdict = "passes" if self.passed else "fails"
        return (
            f"{self.what} {verdict}: at {list(self.where)} got {self.got:.9g}, want {self.want:.9g}, off by "
            f"{abs(self.got - self.want):.3g} of {self.bound:.3g} allowed (ratio {self.worst:.3g}); RMS error {self.rms:.3g} "
            f"of {self.rms_limit:.3g} allowed (ratio {self.rms_ratio:.3g})"
        )


def check(
    got: Tensor, want: Expected, baselines: Sequence[Tensor], spec: AttentionSpec, numerics: Numerics = EXACT
) -> Deviation:
    """Compare a host tensor ``got`` [num_tokens, num_heads, head_dim_v] of the spec's dtype with the oracle.

    ``baselines`` are `octavo.conformance.baseline.baseline_attentions` of the same inputs and numerics; the worse one counts.
    """
    problem = _shape_problem(got, want.out) or _dtype_problem(got, spec.dtype)
    if problem:
        return _incomparable("out", problem)
    baseline_rms = max(_rms(baseline.double().numpy() - want.out) for baseline in baselines)
    limit = max(2 * baseline_rms, unit_roundoff(spec.dtype) * _rms(want.out))
    scatter = 1 + 4 / np.sqrt(max(want.out.size, 1))
    return _compare("out", got.double().numpy(), want.out, element_bound(want, spec, numerics), limit * scatter)


def check_lse(got: Tensor, want: Expected, spec: AttentionSpec, numerics: Numerics = EXACT) -> Deviation:
    """Compare ``got`` [num_tokens, num_heads] float32 with the oracle's: the logits' error, and float32's in the sum."""
    problem = _shape_problem(got, want.lse) or _dtype_problem(got, "float32")
    if problem:
        return _incomparable("lse", problem)
    values = got.double().numpy()
    empty = np.isneginf(want.lse)  # no key and no sink: -inf is the only right answer, and it has no distance
    if not np.array_equal(np.isneginf(values), empty):
        return _incomparable(
            "lse", f"-inf at {np.argwhere(np.isneginf(values)).tolist()}, expected at {np.argwhere(empty).tolist()}"
        )
    finite_want, finite_got = np.where(empty, 0.0, want.lse), np.where(empty, 0.0, values)
    rounding = (want.num_keys[:, None] + 64) * FLOAT32_ROUNDOFF + 2 * FLOAT32_ROUNDOFF * np.abs(finite_want)
    bound = logit_error(want, spec, numerics) + rounding
    return _compare("lse", finite_got, finite_want, bound, _rms(bound))


def element_bound(want: Expected, spec: AttentionSpec, numerics: Numerics = EXACT) -> Float64Array:
    """The allowed |got - want| of each element, [num_tokens, num_heads, head_dim_v]."""
    u = unit_roundoff(spec.dtype)
    weight_error = 2 * u + 2 * logit_error(want, spec, numerics) + (want.num_keys[:, None] + 64) * FLOAT32_ROUNDOFF
    return np.asarray(u * np.abs(want.out) + want.magnitude * weight_error[:, :, None])


def logit_error(want: Expected, spec: AttentionSpec, numerics: Numerics = EXACT) -> Float64Array:
    """L: how wrong a kernel's logits may be, [num_tokens, num_heads]."""
    error = (spec.head_dim + 8) * FLOAT32_ROUNDOFF * want.logit_size
    if spec.alibi:
        error = error + 4 * want.num_keys[:, None] * FLOAT32_ROUNDOFF
    if spec.soft_cap is not None and numerics.soft_cap_approximate:
        error = error + spec.soft_cap * 2.0**-10
    if numerics.q_prescaled:
        error = error + unit_roundoff(spec.dtype) * want.logit_size
    return error


def _compare(what: str, got: Float64Array, want: Float64Array, bound: Float64Array, rms_limit: float) -> Deviation:
    ratio = _ratio(np.abs(got - want), bound)
    where = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    return Deviation(
        what=what,
        worst=float(ratio[where]),
        where=tuple(int(index) for index in where),
        got=float(got[where]),
        want=float(want[where]),
        bound=float(bound[where]),
        rms=_rms(got - want),
        rms_limit=rms_limit,
    )


def _ratio(error: Float64Array | np.float64, allowed: Float64Array | np.float64) -> Float64Array:
    """``error / allowed``; 0 where both are 0 and inf where the error is not a number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, np.divide(error, allowed))
    return np.where(np.isnan(ratio), np.inf, ratio)


def _rms(values: Float64Array) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _shape_problem(got: Tensor, want: Float64Array) -> str:
    return "" if tuple(got.shape) == want.shape else f"shape {list(got.shape)}, expected {list(want.shape)}"


def _dtype_problem(got: Tensor, dtype: str) -> str:
    return "" if got.dtype is TORCH_DTYPES[dtype] else f"dtype {got.dtype}, expected {TORCH_DTYPES[dtype]}"


def _incomparable(what: str, problem: str) -> Deviation:
    nan = float("nan")
    return Deviation(
        what=what, worst=float("inf"), where=(), got=nan, want=nan, bound=nan, rms=nan, rms_limit=nan, problem=problem
    )
