"""The cases that a manifest's words promise: steps for every declared feature, dtype, head size and block size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.api.attention import AttentionSpec
from octavo.api.manifest import AttentionManifest
from octavo.conformance.cases import Case, RowLengths, make_case

__all__ = ["declared_cases", "needed_features"]

_HEAD_SIZES = (8, 16, 32, 64, 80, 96, 128, 192, 256, 512)
_BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
_FLOATS = ("float32", "float16", "bfloat16")
_MLA_LATENT_SHARE = 4  # MLA: the rotary part is a quarter of a key, here


def _rows(*lengths: tuple[int, int]) -> tuple[RowLengths, ...]:
    """(query_len, context_len) pairs."""
    return tuple(RowLengths(query_len=query, context_len=context) for query, context in lengths)


_DECODE = _rows((1, 0), (1, 15), (1, 16), (1, 17), (1, 300), (1, 63))
_PREFILL = _rows((1, 0), (16, 0), (33, 0))
_CHUNKS = _rows((5, 16), (20, 37), (2, 31))
_MIXED = _rows((1, 40), (1, 0), (23, 0), (9, 64))
_SPECULATIVE = _rows((4, 20), (4, 61), (4, 0), (4, 12))
_FEW = _rows((1, 70), (1, 31))


@dataclass(frozen=True, kw_only=True)
class _Scenario:
    """One way to draw a case: what differs from a plain step, in the spec and in the drawing."""

    name: str
    rows: tuple[RowLengths, ...] = _DECODE
    spec: tuple[tuple[str, Any], ...] = ()
    draw: tuple[tuple[str, Any], ...] = ()
    every_dtype: bool = False

    def case(self, dtype: str, head_dim: int, block_size: int, seed: int) -> Case:
        """The case, in ``dtype``, with the manifest's usual head and block size where the scenario has none of its own."""
        spec, draw = dict(self.spec), {"block_size": block_size} | dict(self.draw)
        head_dim = spec.get("head_dim", head_dim)
        width = head_dim - head_dim // _MLA_LATENT_SHARE if spec.get("kind") == "mla" else head_dim
        base = {"num_heads": 4, "num_kv_heads": 4, "head_dim": head_dim, "head_dim_v": width, "scale": head_dim**-0.5}
        base |= {"dtype": dtype, "kv_dtype": dtype}
        return make_case(f"{self.name}-{dtype}", AttentionSpec(**(base | spec)), self.rows, seed=seed, **draw)


def _scenario(name: str, rows: tuple[RowLengths, ...] = _DECODE, *, every_dtype: bool = False, **changes: Any) -> _Scenario:
    in_spec = {name: value for name, value in changes.items() if name in AttentionSpec.__dataclass_fields__}
    in_draw = {name: value for name, value in changes.items() if name not in in_spec}
    return _Scenario(name=name, rows=rows, spec=tuple(in_spec.items()), draw=tuple(in_draw.items()), every_dtype=every_dtype)


_SCENARIOS = (
    _scenario("decode", every_dtype=True),
    _scenario("prefill", _PREFILL, every_dtype=True),
    _scenario("chunks", _CHUNKS, every_dtype=True),
    _scenario("mixed", _MIXED, every_dtype=True),
    _scenario("speculative", _SPECULATIVE, decode_query_len=4),
    _scenario("long", _rows((1, 2100), (1, 513))),
    _scenario("long_prefill", _rows((300, 0))),
    _scenario("long_chunk", _rows((70, 200))),
    _scenario("padded", _rows((1, 40), (1, 3)), pad_reqs=2, pad_tokens=3),
    _scenario("strided", _MIXED, strided=True, num_kv_heads=2),
    _scenario("shared_kv", _FEW, shared_kv=True),
    _scenario("scale", _FEW, scale=0.71),
    _scenario("huge_logits", _MIXED + _rows((90, 30)), q_gain=40.0),
    _scenario("gqa_2", _DECODE, num_kv_heads=2, every_dtype=True),
    _scenario("gqa_prefill", _PREFILL, num_kv_heads=2),
    _scenario("gqa_3", _MIXED, num_heads=6, num_kv_heads=2),
    _scenario("mqa", _MIXED, num_kv_heads=1),
    _scenario("needle_own", _MIXED, needle="own"),
    _scenario("needle_future", _PREFILL, needle="future"),
    _scenario("needle_future_chunk", _CHUNKS, needle="future"),
    _scenario("non_causal", _PREFILL, causal=False),
    _scenario("non_causal_decode", _FEW, causal=False),
    _scenario("window", _DECODE, window=17, kind="sliding_window", every_dtype=True),
    _scenario("window_1", _FEW, window=1, kind="sliding_window"),
    _scenario("window_16", _MIXED, window=16, kind="sliding_window"),
    _scenario("window_prefill", _PREFILL, window=15, kind="sliding_window"),
    _scenario("window_needle", _FEW, window=24, kind="sliding_window", needle="behind_window"),
    _scenario("window_needle_chunk", _CHUNKS, window=10, kind="sliding_window", needle="behind_window"),
    _scenario("window_oldest", _MIXED, window=24, kind="sliding_window", needle="oldest"),
    _scenario("window_full_kind", _FEW, window=24),
    _scenario("window_non_causal", _PREFILL, window=6, causal=False, kind="sliding_window"),
    _scenario("soft_cap", _MIXED, soft_cap=3.0, q_gain=4.0, every_dtype=True),
    _scenario("soft_cap_window", _DECODE, soft_cap=3.0, q_gain=4.0, window=20, kind="sliding_window"),
    _scenario("alibi", _MIXED, alibi=True, every_dtype=True),
    _scenario("alibi_gqa", _DECODE, alibi=True, num_heads=6, num_kv_heads=2),
    _scenario("sinks", _MIXED, sinks=True, every_dtype=True),
    _scenario("sinks_window", _DECODE, sinks=True, window=9, kind="sliding_window"),
    _scenario("sinks_gqa", _PREFILL, sinks=True, num_kv_heads=2),
    _scenario("mla", _DECODE, kind="mla", num_kv_heads=1, every_dtype=True),
    _scenario("mla_prefill", _PREFILL, kind="mla", num_kv_heads=1),
    _scenario("mla_mixed", _MIXED, kind="mla", num_kv_heads=1),
    _scenario("cross", _rows((1, 33), (1, 16), (7, 50)), kind="cross", causal=False),
    _scenario("draft", _FEW, kind="draft"),
)


def declared_cases(manifest: AttentionManifest, *, seed: int) -> Iterator[Case]:
    """The cases that the manifest's words cover; its ``except`` entries are left to the caller, who asks ``supports``."""
    declared = frozenset(manifest.features)
    for case in _every_case(manifest, seed):
        if case.spec.kind in manifest.kinds and needed_features(case) <= declared:
            yield case


def needed_features(case: Case) -> frozenset[str]:
    """Features that a backend must declare to be given this case: of its spec, and of how the step is batched."""
    queries = [request.query_len for request in case.inputs]
    cross = case.spec.kind == "cross"
    several = [length > 1 for length in queries]
    batched = {
        "mixed_batch": any(several) and not all(several),
        "chunk_context": not cross
        and any(request.num_computed_tokens > 0 and request.query_len > 1 for request in case.inputs),
        "multi_token_decode": case.decode_query_len > 1,
        "kv_scales": (case.params.k_scale, case.params.v_scale) != (1.0, 1.0),
    }
    return case.spec.features() | {name for name, needed in batched.items() if needed}


def _every_case(manifest: AttentionManifest, seed: int) -> Iterator[Case]:
    dtypes = [dtype for dtype in _FLOATS if dtype in manifest.dtypes]
    head_sizes = [size for size in _HEAD_SIZES if size in manifest.head_sizes]
    block_sizes = [size for size in _BLOCK_SIZES if size in manifest.block_sizes]
    if not (dtypes and head_sizes and block_sizes):
        return
    head_dim, block_size = _middle(head_sizes, 64), _middle(block_sizes, 16)
    scenarios = [(scenario, dtypes if scenario.every_dtype else dtypes[:1]) for scenario in _SCENARIOS]
    scenarios += [(_scenario(f"head_{size}", _FEW, head_dim=size), dtypes) for size in head_sizes]
    scenarios += [(_scenario(f"block_{size}", _DECODE, block_size=size), dtypes[:1]) for size in block_sizes]
    scenarios += [(_kv_scenario(kv_dtype), [dtype]) for dtype, kv_dtype in _kv_pairs(manifest, dtypes)]
    for number, (scenario, its_dtypes) in enumerate(scenarios):
        for dtype in its_dtypes:
            if not scenario.name.startswith("kv_") and dtype not in manifest.kv_dtypes:
                continue
            yield scenario.case(dtype, head_dim, block_size, seed + number)


def _kv_pairs(manifest: AttentionManifest, dtypes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Caches of another dtype than the activations'."""
    for dtype in dtypes:
        for kv_dtype in manifest.kv_dtypes:
            if kv_dtype != dtype:
                yield dtype, kv_dtype


def _kv_scenario(kv_dtype: str) -> _Scenario:
    """8-bit caches with scales that make the values fit; floats as they are, wider or narrower than the activations."""
    if kv_dtype in _FLOATS:
        return _scenario(f"kv_{kv_dtype}", _MIXED, kv_dtype=kv_dtype, num_kv_heads=2)
    scale = 0.031 if kv_dtype == "int8" else 0.37
    return _scenario(f"kv_{kv_dtype}", _MIXED, kv_dtype=kv_dtype, k_scale=scale, v_scale=1.7 * scale, num_kv_heads=2)


def _middle(sizes: Sequence[int], wanted: int) -> int:
    return min(sizes, key=lambda size: abs(size - wanted))
