from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.api.attention import AttentionGroup, AttentionSpec, BufferSpec, KVFormat, LayerParams
from octavo.core.api.errors import Unsupported
from octavo.core.api.kv_cache import MLA, CustomSpec, FullAttention, KVSpec, RecurrentState, SlidingWindow
from octavo.core.worker.caches import GroupCaches
from octavo.core.worker.memory import kv_specs


class Format:
    """A backend as far as its cache goes."""

    manifest = SimpleNamespace(name="format")

    def __init__(
        self, size: int, unit: Any = "block", *, per_layer: Sequence[int] | None = None, own: KVSpec | None = None
    ) -> None:
        self.size, self.unit, self.per_layer, self.own = size, unit, per_layer, own
        self.copies: list[int] = []

    def kv_format(self) -> KVFormat:
        return KVFormat(buffers={"k": BufferSpec(shape=(self.size,), dtype="int8")}, unit=self.unit)

    def kv_spec(self, bytes_per_block: int) -> KVSpec | None:
        return self.own

    def allocate_kv(self, num_units: int) -> Any:
        assert self.per_layer is not None
        return [{"k": torch.full((num_units, self.size), layer, dtype=torch.int8)} for layer in self.per_layer]

    def copy_blocks(self, kv: Any, pairs: Any) -> Any:
        self.copies.append(int(kv["k"][0, 0]))
        return kv


def _group(kv_group: int, layers: tuple[int, ...], *, block_size: int = 16, **spec: Any) -> AttentionGroup:
    fields: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "head_dim_v": 8, "scale": 1.0, **spec}
    made = AttentionSpec(dtype="float32", kv_dtype="float32", **fields)
    return AttentionGroup(name=f"g{kv_group}", spec=made, layers=layers, block_size=block_size, kv_group=kv_group)


def _params(count: int, **sources: int) -> list[LayerParams]:
    return [LayerParams(index=index, kv_source_layer=sources.get(f"layer{index}")) for index in range(count)]


def test_each_kind_of_layer_has_its_spec_with_the_bytes_of_all_its_layers() -> None:
    groups = [
        _group(0, (0, 3)),
        _group(1, (1,), kind="sliding_window", window=32),
        _group(2, (2,), kind="mla"),
        _group(3, (4,), kind="recurrent"),
    ]
    backends: Any = [Format(100), Format(10), Format(7), Format(5, "request")]
    assert kv_specs(groups, backends, _params(5)) == (
        FullAttention(block_size=16, bytes_per_block=200),
        SlidingWindow(block_size=16, bytes_per_block=10, window=32),
        MLA(block_size=16, bytes_per_block=7),
        RecurrentState(block_size=16, bytes_per_block=5),
    )


def test_groups_of_layers_that_share_a_kv_group_add_up() -> None:
    groups = [_group(0, (0, 1)), _group(0, (2,), soft_cap=5.0)]
    backends: Any = [Format(100), Format(30)]
    (spec,) = kv_specs(groups, backends, _params(3))
    assert spec.bytes_per_block == 230


def test_a_layer_that_shares_anothers_cache_costs_nothing() -> None:
    (spec,) = kv_specs([_group(0, (0, 1, 2))], [Format(100)], _params(3, layer2=0))  # type: ignore[list-item]
    assert spec.bytes_per_block == 200


@pytest.mark.parametrize(
    ("second", "backend"), [(_group(0, (1,), block_size=32), Format(1)), (_group(0, (1,)), Format(1, "request"))]
)
def test_backends_of_one_kv_group_must_agree(second: AttentionGroup, backend: Format) -> None:
    with pytest.raises(Unsupported, match=r"KV group 0 \(g0, g0\) disagree: block sizes .*, units .*--attention-backend"):
        kv_specs([_group(0, (0,)), second], [Format(1), backend], _params(2))  # type: ignore[list-item]


def test_a_backends_own_spec_is_taken_when_all_of_its_group_agree() -> None:
    own = CustomSpec(block_size=16, bytes_per_block=3, kind="sinks", manager="sinks")
    groups = [_group(0, (0,)), _group(0, (1,))]
    assert kv_specs(groups, [Format(1, own=own), Format(1, own=own)], _params(2)) == (own,)  # type: ignore[list-item]
    with pytest.raises(Unsupported, match="KV group 0"):
        kv_specs(groups, [Format(1, own=own), Format(1)], _params(2))  # type: ignore[list-item]


@pytest.mark.parametrize("per_layer", [(0, 1, 2), (0, 2)], ids=["one a layer", "one an owner"])
def test_owners_get_a_cache_and_sharers_none(per_layer: tuple[int, ...]) -> None:
    backend = Format(4, per_layer=per_layer)
    caches = GroupCaches(_group(0, (0, 1, 2)), backend, _params(3, layer1=0), 6)  # type: ignore[arg-type]
    assert [int(layer.kv["k"][0, 0]) if layer.kv else None for layer in caches.layers] == [0, None, 2]
    assert caches.num_bytes == 4 * 6 * len(per_layer)
    caches.copy_blocks(np.array([[1, 2]], np.int32))
    assert backend.copies == [0, 2]
