"""`Ops`: which implementation each op has in this process. Defaults are plain torch; overrides replace them one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.core.api.errors import PluginError
from octavo.core.api.ops import OPS, LinearImpl
from octavo.core.api.platform import Array, Platform
from octavo.core.config.suggest import nearest
from octavo.core.layers import atoms, blocks
from octavo.core.layers.linear import DenseLinear

if TYPE_CHECKING:
    from octavo.core.layers.context import StepContext

__all__ = ["Ops"]

Pair: TypeAlias = tuple[Array, Array]


class Ops:
    """An attribute for each op of `octavo.core.api.ops.OPS`, resolved once at load.

    Composites reach atoms through the `Ops` object of their step, so an override holds wherever the op is used.
    """

    embedding: Callable[[Array, Array], Array]
    rms_norm: Callable[[Array, Array, float], Array]
    add_rms_norm: Callable[[Array, Array, Array, float], Pair]
    rotary: Callable[[Array, Array, Array | None, Array], tuple[Array, Array | None]]
    silu_and_mul: Callable[[Array], Array]
    gelu_and_mul: Callable[[Array], Array]
    linear: LinearImpl
    gather_last: Callable[[Array, Array], Array]
    verify_and_sample: Callable[[Array, Any], Any]
    attention_block: Callable[[Array, Array | None, blocks.AttentionBlock, StepContext], Pair]
    mlp_block: Callable[[Array, Array | None, blocks.MlpBlock, StepContext], Pair]
    decoder_layer: Callable[[Array, Array | None, blocks.DecoderLayer, StepContext], Pair]
    lm_head: Callable[[Array, Array | None, blocks.LmHead, Array, StepContext], Array]

    def __init__(self, overrides: Mapping[str, Any] | None = None, *, platform: Platform) -> None:
        """``overrides`` by op name. Raises `PluginError` for a name that is no op, or an implementation of the wrong kind."""
        overrides = overrides or {}
        for name, implementation in overrides.items():
            _check(name, implementation)
        for name in OPS:
            setattr(self, name, overrides[name] if name in overrides else _default(name, platform))


def _default(name: str, platform: Platform) -> Any:
    if name == "linear":
        return DenseLinear(platform)
    return getattr(atoms, name, None) or getattr(blocks, name)


def _check(name: str, implementation: Any) -> None:
    if name not in OPS:
        raise PluginError(f"no op {name!r}" + nearest(name, OPS))
    if name == "linear" and not isinstance(implementation, LinearImpl):
        raise PluginError(f"op 'linear' must be a LinearImpl, not {type(implementation).__name__}")
    if name != "linear" and not callable(implementation):
        raise PluginError(f"op {name!r} must be callable, not {type(implementation).__name__}")
