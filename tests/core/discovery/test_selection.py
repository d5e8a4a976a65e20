"""The pure functions: capability, grouping, block size, platform, attention and op selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.api.attention import AttentionSpec
from octavo.core.api.errors import PluginNotFound, PluginUnavailable, SelectionError
from octavo.core.api.manifest import (
    AttentionManifest,
    Condition,
    IntRange,
    OpsManifest,
    PlatformManifest,
    PluginManifest,
    ProbedDevice,
    Restriction,
)
from octavo.core.config import EngineConfig
from octavo.core.discovery.block_size import Constraint, solve_block_size
from octavo.core.discovery.capability import check_attention
from octavo.core.discovery.grouping import attention_groups, kind_of, resolved
from octavo.core.discovery.op_selection import select_ops
from octavo.core.discovery.registry import PluginEntry
from octavo.core.discovery.selection import Choice, select

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=64, head_dim_v=64, scale=0.125, dtype="bfloat16", kv_dtype="bfloat16"
)
EVERYTHING = ("causal", "gqa", "sliding_window", "soft_cap", "chunk_context", "mixed_batch", "multi_token_decode")


def entry(kind: Any, table: Any, *, distribution: str = "", **more: Any) -> PluginEntry:
    origin = distribution or f"{table.name}-dist"
    more.setdefault("state", "available")
    return PluginEntry(name=table.name, kind=kind, distribution=origin, version="1.0", target="x:y", table=table, **more)


def platform(name: str = "acme", *, kind: Any = "accelerator", state: Any = "available", **more: Any) -> PluginEntry:
    extra = {key: more.pop(key) for key in ("reason", "devices", "rivals") if key in more}
    return entry(
        "platform",
        PlatformManifest(name=name, device_type=more.pop("device_type", name), kind=kind, **more),
        state=state,
        **extra,
    )


def attention(name: str, *, state: Any = "available", reason: str = "", **more: Any) -> PluginEntry:
    fields: dict[str, Any] = {
        "platforms": ("acme",),
        "dtypes": ("bfloat16",),
        "kv_dtypes": ("bfloat16",),
        "head_sizes": IntRange(values=(64, 128)),
        "block_sizes": IntRange(multiple_of=16),
        "kinds": ("full_attention", "sliding_window", "draft"),
        "features": EVERYTHING,
        **more,
    }
    return entry("attention", AttentionManifest(name=name, **fields), state=state, reason=reason)


def backend(**more: Any) -> AttentionManifest:
    table: AttentionManifest = attention("it", **more).table
    return table


def choose(entries: Sequence[PluginEntry], *specs: AttentionSpec, **options: Any) -> Choice:
    config = EngineConfig.from_flat(dtype="bfloat16", **options)
    return select(config, entries, groups=attention_groups(specs or (SPEC,)))


class TestCapability:
    def test_what_is_declared_is_taken(self) -> None:
        assert check_attention(backend(), SPEC, block_size=32) == ()

    @pytest.mark.parametrize(
        ("changes", "field", "supported"),
        [
            ({"dtype": "float16"}, "dtype", "bfloat16"),
            ({"kv_dtype": "int8"}, "kv_dtype", "bfloat16"),
            ({"head_dim": 80, "head_dim_v": 80}, "head_dim", "{64, 128}"),
            ({"head_dim_v": 80}, "head_dim_v", "{64, 128}"),
            ({"kind": "cross"}, "kind", "full_attention, sliding_window, draft"),
            ({"alibi": True}, "features", ", ".join(EVERYTHING)),
            ({"causal": False}, "features", ", ".join(EVERYTHING)),
        ],
    )
    def test_what_is_not_declared_is_refused_with_what_is(self, changes: dict[str, Any], field: str, supported: str) -> None:
        reasons = check_attention(backend(), replace(SPEC, **changes))
        assert (field, supported) in {(reason.field, reason.supported) for reason in reasons}

    def test_every_reason_is_given_at_once(self) -> None:
        reasons = check_attention(
            backend(), replace(SPEC, dtype="float16", head_dim=80, head_dim_v=80, sinks=True), block_size=7
        )
        assert {reason.field for reason in reasons} == {"dtype", "head_dim", "features", "block_size"}

    def test_features_that_the_engine_needs_count_too(self) -> None:
        assert check_attention(backend(features=("causal", "gqa")), SPEC) == ()
        assert len(check_attention(backend(features=("causal", "gqa")), SPEC, features=("chunk_context",))) == 1

    @pytest.mark.parametrize(
        ("rule", "arch", "refused"),
        [
            ("<acme3", "acme2", True), ("<acme3", "acme3", False), ("<=acme3", "acme3", True), (">acme1", "acme1", False),
            (">=acme2", "acme3", True), ("acme2", "acme2", True), ("acme2", "acme3", False), ("!=acme2", "acme3", True),
            ("<acme3", None, False), ("<acme3", "acme9", True),
        ],
    )  # fmt: skip
    def test_archs_compare_in_the_platform_s_own_order(self, rule: str, arch: str | None, refused: bool) -> None:
        excepts = (Restriction(when=Condition(arch=rule), reason="no"),)
        reasons = check_attention(backend(excepts=excepts), SPEC, arch=arch, archs=("acme1", "acme2", "acme3"))
        assert bool(reasons) is refused

    def test_an_except_rule_needs_all_its_conditions(self) -> None:
        when = Condition(kv_dtypes=("bfloat16",), features=("soft_cap", "sliding_window"), platform="acme")
        manifest = backend(excepts=(Restriction(when=when, reason="both at once"),))
        soft = replace(SPEC, soft_cap=30.0)
        both = replace(soft, window=128)
        assert check_attention(manifest, soft, platform="acme") == ()
        assert check_attention(manifest, both, platform="other") == ()
        (reason,) = check_attention(manifest, both, platform="acme")
        assert reason.supported == "both at once"
        assert "features soft_cap sliding_window" in reason.wanted

    def test_block_sizes_in_rules_apply_once_one_is_asked_for(self) -> None:
        rule = Restriction(
            when=Condition(block_sizes=IntRange(values=(16,)), head_sizes=IntRange(values=(64,))), reason="small"
        )
        manifest = backend(withheld=(rule,))
        assert check_attention(manifest, SPEC) == ()
        assert check_attention(manifest, SPEC, block_size=32) == ()
        assert [reason.field for reason in check_attention(manifest, SPEC, block_size=16)] == ["withheld"]

    def test_a_field_newer_than_the_plugin_is_refused_at_any_value_but_its_default(self) -> None:
        @dataclass(frozen=True, kw_only=True)
        class Newer(AttentionSpec):
            tree_mask: bool = field(default=False, metadata={"since": (1, 1)})

        given = {name: getattr(SPEC, name) for name in SPEC.__dataclass_fields__}
        assert check_attention(backend(), Newer(**given)) == ()
        (reason,) = check_attention(backend(), Newer(**given, tree_mask=True))
        assert (reason.field, reason.supported) == ("tree_mask", "octavo.api 1.0")
        assert check_attention(backend(api=(1, 1)), Newer(**given, tree_mask=True)) == ()


class TestGrouping:
    def test_layers_with_equal_specs_form_a_group(self) -> None:
        local = replace(SPEC, kind="sliding_window", window=512)
        full, window = attention_groups([SPEC, local, local, SPEC])
        assert (full.name, full.layers, full.kv_group) == ("full_attention", (0, 3), 0)
        assert (window.name, window.layers, window.kv_group) == ("sliding_window", (1, 2), 1)

    def test_several_specs_of_one_kind_are_numbered(self) -> None:
        groups = attention_groups([SPEC, replace(SPEC, soft_cap=30.0)])
        assert [group.name for group in groups] == ["full_attention.1", "full_attention.2"]
        assert {group.kv_group for group in groups} == {0}, "a soft cap doesn't change what is cached"
        assert kind_of("full_attention.2") == "full_attention"

    def test_another_backend_means_another_kv_group(self) -> None:
        groups = attention_groups([SPEC, replace(SPEC, soft_cap=30.0)])
        assert [group.kv_group for group in resolved(groups, ["a", "a"], 16)] == [0, 0]
        assert [(group.kv_group, group.block_size) for group in resolved(groups, ["a", "b"], 32)] == [(0, 32), (1, 32)]

    @given(
        st.lists(st.tuples(st.sampled_from([64, 128]), st.sampled_from([None, 512]), st.booleans()), min_size=1, max_size=12)
    )
    def test_groups_partition_the_layers(self, layers: list[tuple[int, int | None, bool]]) -> None:
        specs = [replace(SPEC, head_dim=size, head_dim_v=size, window=window, sinks=sinks) for size, window, sinks in layers]
        groups = attention_groups(specs)
        assert sorted(index for group in groups for index in group.layers) == list(range(len(specs)))
        assert all(specs[index] == group.spec for group in groups for index in group.layers)
        assert len({group.name for group in groups}) == len(groups)
        assert {group.kv_group for group in groups} == set(range(len({group.kv_group for group in groups})))


class TestBlockSize:
    @staticmethod
    def limits(*ranges: IntRange) -> list[Constraint]:
        return [
            Constraint(group=f"g{index}", backend="b", allowed=allowed, accepts=lambda size, allowed=allowed: size in allowed)
            for index, allowed in enumerate(ranges)
        ]

    @pytest.mark.parametrize(
        ("ranges", "expected"),
        [
            ([IntRange(multiple_of=1)], 16),
            ([IntRange(multiple_of=64)], 64),
            ([IntRange(values=(8, 4))], 8),
            ([IntRange(values=(2048,)), IntRange(multiple_of=16)], 2048),
            ([IntRange(multiple_of=24), IntRange(multiple_of=16)], 48),
            ([IntRange(multiple_of=16, max=32), IntRange(values=(64,))], None),
            ([IntRange()], None),
        ],
    )
    def test_the_size_nearest_to_sixteen_that_all_allow(self, ranges: list[IntRange], expected: int | None) -> None:
        assert solve_block_size(self.limits(*ranges)) == expected

    def test_a_wanted_size_is_taken_or_nothing_is(self) -> None:
        assert solve_block_size(self.limits(IntRange(multiple_of=16)), 48) == 48
        assert solve_block_size(self.limits(IntRange(multiple_of=16)), 40) is None

    @given(st.lists(st.integers(1, 64), min_size=1, max_size=3))
    def test_an_answer_suits_everyone_and_no_better_one_exists(self, steps: list[int]) -> None:
        limits = self.limits(*(IntRange(multiple_of=step) for step in steps))
        size = solve_block_size(limits)
        common = [number for number in range(1, 1025) if all(number % step == 0 for step in steps)]
        assert (size in common) if common else size is None
        if size is not None and size > 16:
            assert not [number for number in common if 16 <= number < size]


HOST = platform("plain", kind="host")


class TestPlatform:
    def test_an_accelerator_is_chosen_before_the_host(self) -> None:
        assert choose([HOST, platform(), attention("a")]).chosen.platform == "acme"

    def test_without_one_the_host_is_chosen_and_the_report_says_why(self) -> None:
        entries = [platform("one", state="probe-absent", reason="no device"), platform("two", auto=False), HOST]
        choice = choose([*entries, attention("a", platforms=("*",))])
        assert choice.chosen.platform == "plain"
        said = {candidate.name: [str(reason) for reason in candidate.reasons] for candidate in choice.report.candidates}
        assert "probe-absent: no device" in said["one"][0]
        assert "only when named" in said["two"][0]

    def test_two_accelerators_are_an_error_that_names_both_distributions(self) -> None:
        with pytest.raises(
            SelectionError, match=r"several accelerators are available: one \(one-dist 1.0\), two \(two-dist 1.0\)"
        ):
            choose([platform("one"), platform("two"), HOST])

    def test_a_contested_name_is_never_passed_over(self) -> None:
        rivals = [platform("acme", state="incompatible", reason="claimed by a and b", rivals=("a", "b")) for _ in range(2)]
        with pytest.raises(SelectionError, match="can't choose a platform: claimed by a and b"):
            choose([*rivals, HOST])

    def test_a_named_platform_is_taken_or_fatal(self) -> None:
        broken = platform("one", state="probe-broken", reason="its probe raised OSError: x")
        assert choose([platform(), HOST, attention("a", platforms=("plain",))], platform="plain").chosen.platform == "plain"
        with pytest.raises(PluginUnavailable, match="is probe-broken: its probe raised OSError: x"):
            choose([broken, HOST], platform="one")
        with pytest.raises(PluginNotFound, match="did you mean 'plain'"):
            choose([HOST], platform="plan")

    def test_nothing_at_all_says_what_each_one_needs(self) -> None:
        with pytest.raises(SelectionError, match=r"no platform is available: acme \(probe-absent: no device\)"):
            choose([platform(state="probe-absent", reason="no device")])


class TestAttention:
    def test_one_that_is_used_only_when_named_is_named_in_the_refusal(self) -> None:
        with pytest.raises(SelectionError, match=r"shy: auto: .*used only when named \(--attention-backend shy\)"):
            choose([platform(), attention("shy", auto=False)])

    def test_the_platform_s_preference_decides(self) -> None:
        entries = [platform(attention=("b", "a")), attention("a"), attention("b"), attention("0")]
        assert choose(entries).chosen.attention == {"full_attention": "b"}

    def test_a_backend_that_the_platform_does_not_list_may_serve_it(self) -> None:
        assert choose([platform(), attention("third-party")]).chosen.attention == {"full_attention": "third-party"}

    def test_any_platform_means_any_with_torch_s_arrays(self) -> None:
        anywhere = attention("any", platforms=("*",))
        assert choose([platform(), anywhere]).chosen.attention == {"full_attention": "any"}
        with pytest.raises(SelectionError, match="platform: wanted acme, supports"):
            choose([platform(device_type="none"), anywhere])

    def test_a_refused_choice_is_fatal_and_says_what_would_work(self) -> None:
        entries = [platform(), attention("narrow", head_sizes=IntRange(values=(128,))), attention("wide")]
        with pytest.raises(SelectionError) as caught:
            choose(entries, attention_backend="narrow")
        text = str(caught.value)
        assert "attention backend 'narrow' can't serve full_attention: head_dim: wanted 64, supports {128}" in text
        assert "this would work: --attention-backend wide" in text

    @pytest.mark.parametrize(
        ("limits", "options", "advice"),
        [
            ({"dtypes": ("float16",), "kv_dtypes": ("float16",)}, {}, {"dtype": "float16"}),
            ({}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "auto"}),
            ({"block_sizes": IntRange(values=(64,))}, {"block_size": 16}, {"block_size": 64}),
        ],
    )
    def test_advice_works_when_it_is_followed(
        self, limits: dict[str, Any], options: dict[str, Any], advice: dict[str, Any]
    ) -> None:
        entries = [platform(), attention("it", **limits)]
        config = EngineConfig.from_flat(**{"dtype": "bfloat16", **options})
        kv_dtype = "bfloat16" if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
        with pytest.raises(SelectionError) as caught:
            select(config, entries, groups=attention_groups([replace(SPEC, kv_dtype=kv_dtype)]))
        ((name, value),) = advice.items()
        assert f"this would work: --{name.replace('_', '-')} {value}" in str(caught.value)
        mended = EngineConfig.from_flat(**{"dtype": "bfloat16", **options, **advice})
        dtype = mended.model.dtype
        assert select(mended, entries, groups=attention_groups([replace(SPEC, dtype=dtype, kv_dtype=dtype)])).chosen.block_size

    @pytest.mark.parametrize("kv_dtypes", [("int8",), ("fp8_e4m3", "uint8")])
    def test_a_cache_of_8_bits_is_never_advised(self, kv_dtypes: tuple[str, ...]) -> None:
        with pytest.raises(SelectionError, match="kv_dtype: wanted bfloat16") as caught:
            choose([platform(), attention("it", kv_dtypes=kv_dtypes)])
        assert caught.value.hint is None
        with pytest.raises(SelectionError, match=r"this would work: --kv-cache-dtype float16$"):
            choose([platform(), attention("it", kv_dtypes=(*kv_dtypes, "float16"))])

    def test_one_flag_per_kind_of_layer(self) -> None:
        local, draft = replace(SPEC, kind="sliding_window", window=64), replace(SPEC, kind="draft")
        entries = [platform(attention=("a",)), attention("a"), attention("b"), attention("c")]
        choice = choose(entries, SPEC, local, draft, attention_backend="sliding_window=b,draft=c")
        assert choice.chosen.attention == {"full_attention": "a", "sliding_window": "b", "draft": "c"}

    def test_one_name_is_used_by_every_layer_or_the_start_fails(self) -> None:
        draft = replace(SPEC, kind="draft")
        entries = [platform(), attention("all"), attention("some", kinds=("full_attention",))]
        assert set(choose(entries, SPEC, draft, attention_backend="all").chosen.attention.values()) == {"all"}
        with pytest.raises(SelectionError, match="'some' can't serve draft: kind: wanted draft"):
            choose(entries, SPEC, draft, attention_backend="some")

    def test_a_kind_that_the_model_lacks_is_noticed(self) -> None:
        choice = choose([platform(), attention("a")], attention_backend="draft=a")
        assert "'a' for draft has no effect" in choice.report.notices[0]

    def test_backends_with_a_block_size_in_common_are_preferred_over_the_first_ones(self) -> None:
        local = replace(SPEC, kind="sliding_window", window=64)
        entries = [
            platform(attention=("full", "window", "both")),
            attention("full", kinds=("full_attention",), block_sizes=IntRange(values=(16,))),
            attention("window", kinds=("sliding_window",), block_sizes=IntRange(values=(32,))),
            attention("both", block_sizes=IntRange(values=(16,))),
        ]
        choice = choose(entries, SPEC, local)
        assert choice.chosen.attention == {"full_attention": "full", "sliding_window": "both"}
        assert choice.chosen.block_size == 16

    def test_no_common_block_size_lists_who_allows_what(self) -> None:
        local = replace(SPEC, kind="sliding_window", window=64)
        entries = [
            platform(),
            attention("full", kinds=("full_attention",), block_sizes=IntRange(values=(16,))),
            attention("window", kinds=("sliding_window",), block_sizes=IntRange(values=(32,))),
        ]
        said = (
            r"no block size suits every group: full \(full_attention\) allows \{16\}; window \(sliding_window\) allows \{32\}"
        )
        with pytest.raises(SelectionError, match=said):
            choose(entries, SPEC, local)

    def test_features_asked_for_by_flag_are_needed(self) -> None:
        plain = attention("plain", features=("causal", "gqa", "mixed_batch"))
        assert choose([platform(), plain]).chosen.attention == {"full_attention": "plain"}
        for asked in ({"enable_prefix_caching": True}, {"enable_chunked_prefill": True}, {"speculative": "ngram"}):
            with pytest.raises(SelectionError, match="features: wanted chunk_context"):
                choose([platform(), plain], **asked)
        assert choose([platform(), plain, attention("z")], enable_prefix_caching=True).chosen.attention == {
            "full_attention": "z"
        }

    def test_one_request_at_a_time_needs_no_mixed_batches(self) -> None:
        plain = attention("plain", features=("causal", "gqa", "chunk_context"))
        assert choose([platform(), plain], max_num_seqs=1).chosen.attention == {"full_attention": "plain"}
        with pytest.raises(SelectionError, match="mixed_batch"):
            choose([platform(), plain])

    def test_the_probed_arch_decides_except_rules(self) -> None:
        rule = Restriction(when=Condition(arch="<acme2"), reason="too old")
        old = platform(archs=("acme1", "acme2"), devices=(ProbedDevice(index=0, name="x", arch="acme1"),))
        with pytest.raises(SelectionError, match="too old"):
            choose([old, attention("a", excepts=(rule,))])

    def test_every_candidate_is_in_the_report(self) -> None:
        entries = [
            platform(),
            attention("good"),
            attention("off", state="incompatible", reason="needs acme-kernels>=2, which isn't installed"),
            attention("hidden", auto=False),
            attention("foreign", platforms=("other",)),
        ]
        report = choose(entries).report
        said = {
            candidate.name: (candidate.ok, [reason.field for reason in candidate.reasons]) for candidate in report.candidates
        }
        assert said == {
            "acme": (True, []), "good": (True, []), "off": (False, ["state"]), "hidden": (False, ["auto"]),
            "foreign": (False, ["platform"]),
        }  # fmt: skip
        assert "16: the preferred size; good allows multiples of 16" in report.block_size


def ops(name: str, *implements: str, autoload: bool = False, **more: Any) -> PluginEntry:
    table = OpsManifest(name=name, implements=implements, platforms=more.pop("platforms", ("acme",)), **more)
    return entry("ops", table, manifest=PluginManifest(name=f"{name}-plugin", api=(1, 0), autoload=autoload))


def choose_ops(entries: Sequence[PluginEntry], own: Sequence[str] = (), **options: Any) -> Any:
    config = EngineConfig.from_flat(dtype="bfloat16", **options)
    return select_ops(config, entries, platform(ops=tuple(own)), attention_groups([SPEC]))


class TestOps:
    def test_nothing_else_means_core_s_own(self) -> None:
        assert set(choose_ops([]).chosen.values()) == {"default"}

    def test_a_plugin_acts_only_when_it_is_turned_on(self) -> None:
        mine = ops("mine", "rms_norm")
        off = choose_ops([mine])
        assert off.chosen["rms_norm"] == "default"
        assert "--plugin mine turns it on" in off.candidates[0].note
        for on in ({"plugin": "mine"}, {"plugin": "mine-plugin"}, {"op": "rms_norm=mine"}):
            assert choose_ops([mine], **on).chosen["rms_norm"] == "mine"
        assert choose_ops([ops("mine", "rms_norm", autoload=True)]).chosen["rms_norm"] == "mine"

    def test_the_order_is_flag_then_plugin_then_platform(self) -> None:
        entries = [ops("flag", "rms_norm"), ops("plugin", "rms_norm", "rotary"), ops("own", "rms_norm", "rotary", "embedding")]
        chosen = choose_ops(entries, ["own"], op="rms_norm=flag", plugin="plugin").chosen
        assert (chosen["rms_norm"], chosen["rotary"], chosen["embedding"]) == ("flag", "plugin", "own")
        assert choose_ops(entries, ["own"], op="rms_norm=default").chosen["rms_norm"] == "default"

    def test_any_platform_means_any_with_torch_s_arrays_for_ops_too(self) -> None:
        anywhere = ops("any", "rms_norm", platforms=("*",))
        assert choose_ops([anywhere], plugin="any").chosen["rms_norm"] == "any"
        config = EngineConfig.from_flat(dtype="bfloat16", plugin="any")
        choice = select_ops(config, [anywhere], platform(device_type="none"), attention_groups([SPEC]))
        assert choice.chosen["rms_norm"] == "default"
        assert [reason.field for reason in choice.candidates[0].reasons] == ["platform"]

    def test_a_tie_is_an_error(self) -> None:
        entries = [ops("one", "rms_norm"), ops("two", "rms_norm")]
        with pytest.raises(SelectionError, match=r"op 'rms_norm' is offered by one \(one-dist 1.0\) and two"):
            choose_ops(entries, plugin="one,two")
        assert choose_ops(entries, plugin="one,two", op="rms_norm=two").chosen["rms_norm"] == "two"

    def test_a_named_implementation_is_honoured_or_fatal(self) -> None:
        entries = [ops("mine", "rms_norm", when=Condition(dtypes=("float16",))), ops("norms", "rotary")]
        with pytest.raises(
            SelectionError, match="when: wanted dtype bfloat16, platform acme, arch unknown, supports dtypes float16"
        ):
            choose_ops(entries, op="rms_norm=mine")
        with pytest.raises(SelectionError, match="op: wanted rms_norm, supports rotary"):
            choose_ops(entries, op="rms_norm=norms")
        with pytest.raises(PluginNotFound, match="did you mean 'mine'"):
            choose_ops(entries, op="rms_norm=min")

    def test_an_outsider_s_atom_unfuses_the_platform_s_composite_with_a_notice(self) -> None:
        entries = [ops("own", "mlp_block", "attention_block", "rms_norm"), ops("mine", "silu_and_mul")]
        choice = choose_ops(entries, ["own"], plugin="mine")
        assert choice.chosen["mlp_block"] == "default"
        assert choice.chosen["attention_block"] == "own", "the atom isn't inside that one"
        assert choice.chosen["rms_norm"] == "own"
        assert choice.notices == ("mlp_block: core's default is used instead of own, so that silu_and_mul=mine takes effect",)

    def test_it_unfuses_what_encloses_the_composite_too(self) -> None:
        entries = [ops("own", "decoder_layer", "mlp_block"), ops("mine", "silu_and_mul")]
        chosen = choose_ops(entries, ["own"], plugin="mine").chosen
        assert (chosen["decoder_layer"], chosen["mlp_block"]) == ("default", "default")

    def test_a_named_composite_stays_fused_with_a_notice(self) -> None:
        entries = [ops("own", "mlp_block"), ops("mine", "silu_and_mul")]
        choice = choose_ops(entries, ["own"], plugin="mine", op="mlp_block=own")
        assert choice.chosen["mlp_block"] == "own"
        assert "silu_and_mul=mine applies outside it only" in choice.notices[0]

    def test_choosing_again_from_the_result_changes_nothing(self) -> None:
        entries = [ops("own", "mlp_block", "rms_norm"), ops("mine", "silu_and_mul")]
        first = choose_ops(entries, ["own"], plugin="mine").chosen
        assert choose_ops(entries, ["own"], plugin="mine", op=dict(first)).chosen == first
