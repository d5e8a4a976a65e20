"""How a model reaches attention: the cache a backend returns is the one it gets next time, its own or another layer's."""

from __future__ import annotations

from typing import Any

from octavo.core.api.attention import AttentionResult, LayerParams
from octavo.core.layers.context import LayerCache, StepContext


class Appending:
    """A functional backend: each call returns a new cache, a tuple with the layer appended."""

    def forward(self, q: Any, k: Any, v: Any, kv: Any, plan: Any, layer: LayerParams, out: Any) -> AttentionResult:
        return AttentionResult((plan, q, k), (*kv, layer.index))


def context(*params: LayerParams) -> StepContext:
    backend: Any = Appending()
    caches = [LayerCache(backend=backend, params=layer, kv=(), plan=f"plan {layer.index}") for layer in params]
    return StepContext(ops=None, positions=None, layers=caches)  # type: ignore[arg-type]


def test_what_a_backend_returns_is_rebound() -> None:
    step = context(LayerParams(index=0), LayerParams(index=1))
    assert step.attend(1, "q", "k", "v", "out") == ("plan 1", "q", "k")
    step.attend(1, "q", "k", "v", "out")
    assert [cache.kv for cache in step.layers] == [(), (1, 1)]


def test_a_layer_may_use_another_layers_cache() -> None:
    step = context(LayerParams(index=0), LayerParams(index=1, kv_source_layer=0))
    step.attend(0, "q", "k", "v", "out")
    assert step.attend(1, "q", None, None, "out") == ("plan 1", "q", None)
    assert [cache.kv for cache in step.layers] == [(0, 1), ()]
