"""Runs a backend on a case, through the same calls as the engine, whatever arrays it computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.api.attention import AttentionBackend
from octavo.api.manifest import Numerics
from octavo.api.platform import Platform
from octavo.conformance.baseline import EXACT
from octavo.conformance.cases import Case
from octavo.conformance.dtypes import TORCH_DTYPES
from octavo.conformance.tolerance import Deviation, check, check_lse

__all__ = ["BackendRun", "compare", "run_backend", "same_bits", "same_stored"]


@dataclass(frozen=True, kw_only=True)
class BackendRun:
    """What a backend made of a case, on the host; padded tokens are dropped."""

    out: Tensor  # [num_tokens, num_heads, head_dim_v]
    lse: Tensor | None  # [num_tokens, num_heads]
    blocks: Mapping[str, Tensor]  # every block of the cache after the step, stored dtype
    inputs_kept: bool  # q, k and v are bitwise what they were


def run_backend(
    backend: type[AttentionBackend], platform: Platform, case: Case, *, lse: bool = False, enforce: bool = True
) -> BackendRun:
    """Fill the cache, plan, run one layer, read everything back. ``platform`` is bound; errors of the backend pass through."""
    instance = backend(case.group(), platform, enforce=enforce)
    (kv,) = instance.allocate_kv(case.num_blocks)
    every_block = np.arange(case.num_blocks, dtype=np.int32)
    kv = instance.write_blocks(kv, every_block, case.cache_blocks())
    spec, total = case.spec, case.num_tokens + case.pad_tokens
    out = platform.from_host(torch.full((total, spec.num_heads, spec.head_dim_v), float("nan"), dtype=TORCH_DTYPES[spec.dtype]))
    lse_out = platform.from_host(torch.full((total, spec.num_heads), float("nan"))) if lse else None
    q, k, v = (None if tensor is None else platform.from_host(tensor) for tensor in case.step_tensors())
    before = [None if array is None else platform.to_host(array).clone() for array in (q, k, v)]
    plan = instance.plan(case.batch(platform))
    result = instance.forward(q, k, v, kv, plan, case.device_params(platform), out, lse_out=lse_out)
    platform.synchronize()
    return BackendRun(
        out=platform.to_host(result.out)[: case.num_tokens],
        lse=None if result.lse is None else platform.to_host(result.lse)[: case.num_tokens],
        blocks=instance.read_blocks(result.kv, every_block),
        inputs_kept=all(
            array is None or (old is not None and same_bits(platform.to_host(array), old))
            for array, old in zip((q, k, v), before, strict=True)
        ),
    )


def compare(run: BackendRun, case: Case, numerics: Numerics = EXACT) -> list[Deviation]:
    """The deviations of a run from the oracle: out, and lse where it was asked for."""
    deviations = [check(run.out, case.expected, case.baselines(numerics), case.spec, numerics)]
    if run.lse is not None:
        deviations.append(check_lse(run.lse, case.expected, case.spec, numerics))
    return deviations


def same_stored(left: Tensor, right: Tensor) -> bool:
    """Bitwise equal, except that any NaN equals any other: moving one through float32 may change its payload."""
    if left.dtype is not right.dtype or left.shape != right.shape:
        return False
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    dead = left.float().isnan()
    if not torch.equal(dead, right.float().isnan()):
        return False
    zero = torch.zeros(())
    return same_bits(torch.where(dead, zero, left.float()), torch.where(dead, zero, right.float()))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bytes; NaNs with equal bytes are equal."""
    if left.dtype is not right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
