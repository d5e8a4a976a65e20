"""What an operator chooses is what runs; what can't run is refused before weights are read, with advice that works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.api.errors import SelectionError, Unsupported
from octavo.core.api.executor import WorkerMethod

Add = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=3)


def ran(llm: LLM) -> dict[int, str]:
    """The backend that ran each layer, as the worker noted it."""
    llm.generate("w1 w2 w3", GREEDY, use_tqdm=False)
    (runs,) = llm.front.core.call(WorkerMethod.ATTENTION_RUNS)
    return dict(runs)


DRAFT_MODEL = """
from dataclasses import replace
from octavo.core.models.llama import LlamaForCausalLM

class WithDraft(LlamaForCausalLM):
    @classmethod
    def attention(cls, spec, dtype, kv_dtype):
        specs = list(super().attention(spec, dtype, kv_dtype))
        return [*specs[:-1], replace(specs[-1], kind="draft")]
"""


@pytest.fixture
def draft_model(local_plugins: Any, model: Path, tmp_path: Path) -> Path:
    """The tiny model under an architecture whose last layer is of kind ``draft``."""
    local_plugins.add(
        "draft-lm",
        manifest='[plugin]\nname = "draft-lm"\napi = "1.0"\n[model.draft-lm]\narchitectures = ["DraftForCausalLM"]\n',
        files={"it.py": DRAFT_MODEL},
        entry_points={"octavo.models": {"draft-lm": "draft_lm.it:WithDraft"}},
    )
    folder = tmp_path / "draft"
    folder.mkdir()
    for path in model.iterdir():
        content = path.read_bytes()
        renamed = content.replace(b"LlamaForCausalLM", b"DraftForCausalLM")
        (folder / path.name).write_bytes(renamed if path.suffix == ".json" else content)
    return folder


def test_scenario_08_an_explicit_backend_runs_every_attention_layer(
    local_plugins: Any, draft_model: Path, add_accelerator: Add
) -> None:
    add_accelerator(local_plugins)
    with LLM(str(draft_model), platform="acme", attention_backend="acme-attention") as llm:
        assert set(llm.config.plugins.attention_backend) == {"full_attention", "draft"}
        assert ran(llm) == dict.fromkeys(range(3), "acme-attention")


def test_scenario_08_or_the_start_fails(local_plugins: Any, draft_model: Path, add_accelerator: Add) -> None:
    add_accelerator(local_plugins, kinds='["full_attention"]')
    with pytest.raises(SelectionError, match="'acme-attention' can't serve draft: kind: wanted draft, supports full_attention"):
        LLM(str(draft_model), platform="acme", attention_backend="acme-attention")


SECOND = """
        [attention.second]
        platforms = ["acme"]
        kinds = ["full_attention", "draft"]
        dtypes = ["float32", "bfloat16"]
        kv_dtypes = ["float32", "bfloat16"]
        head_sizes = { multiple_of = 1 }
        block_sizes = { multiple_of = 1 }
        features = ["causal", "gqa", "chunk_context", "mixed_batch"]
"""


def add_with_second(box: Any, add_accelerator: Add, **changes: Any) -> None:
    """The accelerator with a second, more capable backend beside its own."""
    from octavo.core.discovery.registry import forget_installed

    code = "from .attention import Attention as First\nclass Second(First): pass\n"
    folder = add_accelerator(box, attention=SECOND, files={"second.py": code}, **changes)
    (info,) = folder.parent.glob("acme_octavo-*.dist-info")
    points = info / "entry_points.txt"
    points.write_text(points.read_text() + "second = acme_octavo.second:Second\n")
    forget_installed()


def test_scenario_08_one_flag_per_kind_is_honoured_layer_by_layer(
    local_plugins: Any, draft_model: Path, add_accelerator: Add
) -> None:
    add_with_second(local_plugins, add_accelerator)
    with LLM(str(draft_model), platform="acme", attention_backend="draft=second") as llm:
        assert ran(llm) == {0: "acme-attention", 1: "acme-attention", 2: "second"}


HALF_ONLY = {"dtypes": '["bfloat16"]', "kv_dtypes": '["bfloat16"]'}


@pytest.mark.parametrize(
    ("declared", "flags", "field"),
    [
        ({"head_sizes": "[64, 128]"}, ["--attention-backend", "acme-attention"], "head_dim: wanted 8, supports {64, 128}"),
        (HALF_ONLY, ["--dtype", "float32"], "dtype: wanted float32, supports bfloat16"),
        ({}, ["--kv-cache-dtype", "int8"], "kv_dtype: wanted int8, supports float32, bfloat16"),
        ({"block_sizes": "[32, 64]"}, ["--block-size", "16"], "block_size: wanted 16, supports {32, 64}"),
    ],
)
def test_scenario_09_refusals_come_before_weights_and_their_advice_works(
    local_plugins: Any,
    model: Path,
    add_accelerator: Add,
    monkeypatch: pytest.MonkeyPatch,
    octavo_command: Callable[..., int],
    declared: dict[str, str],
    flags: list[str],
    field: str,
) -> None:
    from octavo.core.loading.source import ModelSource

    if "head_sizes" in declared:
        add_with_second(local_plugins, add_accelerator, **declared)
    else:
        add_accelerator(local_plugins, **declared)
    command = ["generate", "--model", str(model), "--prompt", "w1 w2", "--max-tokens", "2", "--platform", "acme"]

    with monkeypatch.context() as patch:
        for source in [ModelSource, *ModelSource.__subclasses__()]:
            patch.setattr(source, "weights", lambda self: pytest.fail("weights were read"))
        options = dict(zip([flag[2:].replace("-", "_") for flag in flags[::2]], flags[1::2], strict=True))
        if "block_size" in options:
            options["block_size"] = int(options["block_size"])  # type: ignore[assignment]
        with pytest.raises(SelectionError, match=re.escape(field)) as caught:
            LLM(str(model), platform="acme", **options)  # type: ignore[arg-type]

    advice = re.search(r"this would work: (--[a-z-]+) (\S+?)(,|$)", str(caught.value))
    assert advice is not None, str(caught.value)
    kept = [word for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] != advice[1] for word in pair]
    assert octavo_command(*command, *kept, advice[1], advice[2]) == 0


def test_scenario_10_what_ran_is_what_was_asked_for(local_plugins: Any, model: Path, add_accelerator: Add) -> None:
    add_with_second(local_plugins, add_accelerator)
    for name in ("second", "acme-attention"):
        with LLM(str(model), platform="acme", attention_backend=name) as llm:
            assert set(ran(llm).values()) == {name}
            assert llm.config.plugins.platform == "acme"
    with pytest.raises(SelectionError, match="platform: wanted cpu, supports acme"):
        LLM(str(model), platform="cpu", attention_backend="second")


SUBCLASS = """
from octavo.plugins.attention.reference.backend import ReferenceAttention

class Attention(ReferenceAttention):
"""
FAILS = """
    def forward(self, q, k, v, kv, plan, layer, out, *, lse_out=None):
        raise RuntimeError("no kernel for head size 8")
"""
WRONG_SHAPE = """
    def attend(self, q, kv, plan, layer, out, *, lse_out=None):
        return super().attend(q, kv, plan, layer, out, lse_out=lse_out)[:, :1]
"""
REFUSES = """
    @classmethod
    def supports(cls, spec, *, block_size=None, arch=None):
        from octavo.api.attention import SupportVerdict
        from octavo.api.manifest import Reason
        return SupportVerdict(reasons=(Reason(field="head_dim", wanted=str(spec.head_dim), supported="64"),))
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (FAILS, "attention backend 'acme-attention' failed in layer 0, which its manifest declares to support"),
        (WRONG_SHAPE, r"attention backend 'acme-attention' gave \(3, 1, 8\) .* in layer 0, expected \(3, 4, 8\)"),
    ],
)
def test_scenario_11_a_claim_that_the_kernel_does_not_keep_is_a_typed_error_at_first_use(
    local_plugins: Any, model: Path, add_accelerator: Add, body: str, says: str
) -> None:
    add_accelerator(local_plugins, files={"attention.py": SUBCLASS + body})
    with LLM(str(model), platform="acme") as llm, pytest.raises(Unsupported, match=says):
        llm.generate("w1 w2 w3", GREEDY, use_tqdm=False)


def test_scenario_11_a_class_that_contradicts_its_manifest_is_fatal_and_names_both(
    local_plugins: Any, model: Path, add_accelerator: Add
) -> None:
    folder = add_accelerator(local_plugins, files={"attention.py": SUBCLASS + REFUSES})
    done = local_plugins.run("explain", str(model), "--platform", "acme")
    assert done.returncode == 3
    manifest, method = folder / "octavo-plugin.toml", "acme_octavo.attention.Attention.supports()"
    said = f"{manifest} covers full_attention, but {method} refuses it: head_dim: wanted 8, supports 64"
    assert said in done.stderr


def test_without_chunk_context_core_turns_off_what_needs_it_or_refuses_what_was_asked_for(
    local_plugins: Any, model: Path, add_accelerator: Add, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    add_accelerator(local_plugins, features='["causal", "gqa", "mixed_batch"]')
    with LLM(str(model), platform="acme", max_num_batched_tokens=128) as llm:
        assert not llm.config.cache.enable_prefix_caching
        assert not llm.config.scheduler.enable_chunked_prefill
        assert len(ran(llm)) == 3
    said = "enable_prefix_caching, enable_chunked_prefill turned off: acme-attention lacks chunk_context"
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    with pytest.raises(SelectionError, match="features: wanted chunk_context"):
        LLM(str(model), platform="acme", enable_prefix_caching=True)


def test_the_same_choices_come_from_flags_a_file_and_python(
    local_plugins: Any,
    model: Path,
    add_accelerator: Add,
    tmp_path: Path,
    octavo_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_with_second(local_plugins, add_accelerator)
    path = tmp_path / "octavo.toml"
    path.write_text('platform = "acme"\nblock_size = 32\n[attention_backend]\nfull_attention = "second"\n')
    expected = {"platform": "acme", "attention": {"full_attention": "second"}, "block_size": 32}
    flags = ("--platform", "acme", "--attention-backend", "full_attention=second", "--block-size", "32")
    for given in (("--config", str(path)), flags):
        assert octavo_command("explain", str(model), "--json", *given) == 0
        assert json.loads(capsys.readouterr().out)["chosen"] == expected
    with LLM(str(model), platform="acme", attention_backend={"full_attention": "second"}, block_size=32) as llm:
        assert dict(llm.config.plugins.attention_backend) == expected["attention"]
        assert llm.config.cache.block_size == 32
