"""A backend's own KV spec: what core does with it, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.core.api.attention import AttentionGroup, AttentionSpec, LayerParams
from octavo.core.api.errors import PluginError, PluginNotFound, Unsupported
from octavo.core.api.executor import ExecutorInfo
from octavo.core.api.kv_cache import CustomSpec, KVGroupInfo
from octavo.core.config import EngineConfig
from octavo.core.engine.core import assemble_core
from octavo.core.engine.wire import decode, encode
from octavo.core.worker.memory import kv_specs, settle_blocks

OWN = CustomSpec(block_size=16, bytes_per_block=96, kind="Own", manager="own-blocks", parameters={"chunk": 64}, kept_tokens=64)
SPEC = AttentionSpec(
    num_heads=2, num_kv_heads=2, head_dim=8, head_dim_v=8, scale=1.0, dtype="float32", kv_dtype="float32", kind="draft"
)
GROUPS = [AttentionGroup(name=f"draft.{index}", spec=SPEC, layers=(index,), block_size=16, kv_group=0) for index in (1, 2)]
PARAMS = [LayerParams(index=index) for index in range(3)]
MANIFEST = '[plugin]\nname = "own"\napi = "1.0"\n\n[kv_manager.own-blocks]\nspecs = ["Other"]\n'


def backend(spec: Any) -> Any:
    """Of one layer of 48 bytes a block; ``spec`` maps the group's bytes to what it says of itself."""
    return SimpleNamespace(
        kv_format=lambda: SimpleNamespace(unit="block", bytes_per_unit=48), kv_spec=spec or (lambda size: None)
    )


def own(size: int) -> CustomSpec:
    return CustomSpec(block_size=16, bytes_per_block=size, kind="Own", manager="own-blocks")


def info(spec: CustomSpec) -> ExecutorInfo:
    kv = (KVGroupInfo(spec=spec, num_blocks=9, pool_id=0, manager=spec.manager),)
    return ExecutorInfo(kv=kv, vocab_size=5, num_workers=1, max_in_flight=1, attention={})


def assemble(spec: CustomSpec) -> None:
    config = EngineConfig.from_flat(model="m", platform="cpu", max_model_len=64)
    assemble_core(config, SimpleNamespace(), info(spec))  # type: ignore[arg-type]


def test_the_backends_of_a_group_give_its_spec_and_are_told_its_size() -> None:
    (spec,) = kv_specs(GROUPS, [backend(own), backend(own)], PARAMS)
    assert spec == own(96)


def test_backends_that_disagree_are_refused() -> None:
    with pytest.raises(Unsupported, match="the same one"):
        kv_specs(GROUPS, [backend(own), backend(None)], PARAMS)
    with pytest.raises(Unsupported, match="the same one"):
        kv_specs(GROUPS, [backend(own), backend(lambda size: msgspec.structs.replace(own(size), kind="Another"))], PARAMS)


def test_something_that_is_no_spec_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"octavo\.api\.kv_cache"):
        kv_specs(GROUPS[:1], [backend(lambda size: "Own")], PARAMS)


def test_a_group_names_its_manager_and_needs_no_more_than_it_keeps() -> None:
    config = EngineConfig.from_flat(model="m", max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=64)
    one = (64 + 64) // 16 + 1
    (group,) = settle_blocks([OWN], config, (one + 1) * 96)
    assert (group.manager, group.num_blocks) == ("own-blocks", one + 1)


def test_it_travels() -> None:
    assert decode(encode(info(OWN)), ExecutorInfo) == info(OWN)


def test_a_manager_that_isnt_installed_is_named() -> None:
    with pytest.raises(PluginNotFound, match="no KV manager named 'own-blocks'"):
        assemble(OWN)


def test_a_manager_of_another_spec_is_refused(local_plugins: Any) -> None:
    local_plugins.add(
        "own-plugin",
        manifest=MANIFEST,
        files={"manager.py": "class Manager: pass\n"},
        entry_points={"octavo.kv_managers": {"own-blocks": "own_plugin.manager:Manager"}},
    )
    with pytest.raises(PluginError, match=r"own-blocks' \(own-plugin 1.0\) doesn't manage Own; its manifest lists Other"):
        assemble(OWN)
