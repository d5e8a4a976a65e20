"""A folder opens as the model that it holds: spec, RoPE in both spellings, shards, defaults, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers import models as tokenizer_models

from octavo.core.api.errors import BrokenModel, UnsupportedModel
from octavo.core.api.manifest import ModelManifest
from octavo.core.config.model_spec import ModelSpec, RopeSpec
from octavo.core.loading import ModelSource, open_model
from octavo.core.loading.hf_config import model_spec

Open = Callable[..., ModelSource]


@pytest.fixture
def opened(tmp_path: Path, make_folder: Callable[..., Path], models: Mapping[str, ModelManifest]) -> Open:
    """Writes a small model folder with the given changes and opens it."""

    def make(**options: Any) -> ModelSource:
        return open_model(make_folder(tmp_path / "model", **options), models=models)

    return make


@pytest.fixture
def spec_of(make_config: Callable[..., dict[str, Any]]) -> Callable[..., ModelSpec]:
    """The spec of a small Llama's config.json with changes."""

    def make(**changes: Any) -> ModelSpec:
        return model_spec(make_config(**changes), where="config.json", architecture="X", plugin="x")

    return make


SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = [
    transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    transformers.MistralConfig(**SMALL, sliding_window=16),
    transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=3),
    transformers.Qwen3Config(**SMALL),
    transformers.Gemma3TextConfig(**SMALL, sliding_window=16, query_pre_attn_scalar=8),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_what_transformers_saves_opens_with_every_tensor(
    tmp_path: Path, models: Mapping[str, ModelManifest], config: Any
) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    Tokenizer(tokenizer_models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    source = open_model(tmp_path, models=models)
    weights = source.weights()
    for name, value in model.state_dict().items():
        assert torch.equal(weights.tensor(name), value), name
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * 7
    )
    assert source.spec.layer_kinds == tuple(kind.replace("sliding_attention", "sliding_window") for kind in kinds)
    assert source.spec.tie_word_embeddings == config.tie_word_embeddings
    assert source.spec.dtype == "float32"
    assert source.spec.norm_eps == config.rms_norm_eps


def test_gemma3_text_weights_are_found_inside_a_model_that_sees_images(
    tmp_path: Path, models: Mapping[str, ModelManifest]
) -> None:
    """config.json nests the text model's keys and leaves out what is usual; names carry a prefix."""
    text = {**SMALL, "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 8}
    reference: Any = transformers.Gemma3ForCausalLM._from_config(transformers.Gemma3TextConfig(**text), dtype=torch.float32)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 99},
        "eos_token_id": [1, 106],
    }
    state = reference.state_dict()
    for prefix in ("language_model.model.", "model.language_model."):
        tensors = {
            prefix + name.removeprefix("model."): value.numpy() for name, value in state.items() if "lm_head" not in name
        }
        tensors["vision_tower.weight"] = np.zeros(3, np.float32)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        Tokenizer(tokenizer_models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
        source = open_model(tmp_path, models=models)
        assert (source.spec.hidden_size, source.spec.model_plugin, source.spec.tie_word_embeddings) == (32, "gemma3", True)
        assert source.spec.hidden_act == "gelu_pytorch_tanh"
        assert source.generation.eos_token_ids == (1, 106)
        name = "model.layers.3.self_attn.q_norm.weight"
        assert torch.equal(source.weights().tensor(name), state[name])


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 500.0}, RopeSpec(theta=500.0, rotary_dim=8)),
        ({"rope_theta": 500.0, "rope_scaling": None}, RopeSpec(theta=500.0, rotary_dim=8)),
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, RopeSpec(theta=500.0, rotary_dim=8)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeSpec(theta=10000.0, rotary_dim=8, scaling="linear", factor=2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeSpec(theta=10000.0, rotary_dim=8, scaling="llama3", factor=8.0, original_max_position=32),
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA3}},
            RopeSpec(theta=7.0, rotary_dim=8, scaling="llama3", factor=8.0, original_max_position=32),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            RopeSpec(theta=10000.0, rotary_dim=8, scaling="yarn", factor=4.0, original_max_position=64),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}},
            RopeSpec(
                theta=10000.0, rotary_dim=8, scaling="yarn", factor=4.0, original_max_position=64, attention_factor=1.5,
                beta_fast=16.0, beta_slow=2.0,
            ),
        ),
        ({"partial_rotary_factor": 0.5}, RopeSpec(theta=10000.0, rotary_dim=4)),
    ],
)  # fmt: skip
def test_rope_is_read_in_both_spellings(spec_of: Callable[..., ModelSpec], config: dict[str, Any], expected: RopeSpec) -> None:
    spec = spec_of(**config)
    assert (spec.rope, spec.rope_local) == (expected, None)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_theta": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ],
)
def test_gemma3_has_a_rope_for_each_kind_of_layer_in_both_spellings(
    spec_of: Callable[..., ModelSpec], config: dict[str, Any]
) -> None:
    spec = spec_of(model_type="gemma3_text", **config)
    assert spec.rope == RopeSpec(theta=1e6, rotary_dim=8, scaling="linear", factor=8.0)
    assert spec.rope_local == RopeSpec(theta=500.0, rotary_dim=8)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModel, "RoPE scaling 'dynamic'.*default, linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, UnsupportedModel, "truncate"),
        ({"rope_scaling": {"type": "linear"}}, BrokenModel, "rope_scaling: 'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, BrokenModel, "'factor' is -1"),
        ({"rope_scaling": "linear"}, BrokenModel, "'rope_scaling' must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, BrokenModel, "must exceed"),
        ({"head_dim": 7}, BrokenModel, "even number"),
        ({"num_hidden_layers": 10**9}, BrokenModel, "'num_hidden_layers' is 1000000000"),
        ({"hidden_size": "big"}, BrokenModel, "must be a whole number, not 'big'"),
        ({"hidden_size": True}, BrokenModel, "must be a whole number"),
        ({"rms_norm_eps": 0}, BrokenModel, "'rms_norm_eps' is 0"),
        ({"tie_word_embeddings": "yes"}, BrokenModel, "must be true or false"),
        ({"layer_types": ["full_attention"]}, BrokenModel, "must list 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, UnsupportedModel, "kind 'linear_attention'"),
        ({"hidden_act": "relu"}, UnsupportedModel, "activation 'relu'"),
        ({"torch_dtype": "float64"}, UnsupportedModel, "dtype 'float64'"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantised with 'gptq'.*or a GGUF"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, UnsupportedModel, "bidirectional"),
    ],
)
def test_a_config_that_cannot_be_is_told_from_one_that_is_not_supported(
    spec_of: Callable[..., ModelSpec], config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_of(**config)


def test_layer_types_windows_and_older_keys_agree(spec_of: Callable[..., ModelSpec]) -> None:
    listed = spec_of(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    assert (listed.layer_kinds, listed.sliding_window) == (("sliding_window", "full_attention"), 8)
    assert spec_of(model_type="mistral", sliding_window=8).layer_kinds == ("sliding_window",) * 2
    assert spec_of(model_type="qwen2", sliding_window=8).layer_kinds == ("full_attention",) * 2
    assert spec_of(model_type="llama", sliding_window=8).sliding_window is None
    pattern = spec_of(model_type="gemma3_text", sliding_window=8, sliding_window_pattern=2)
    assert pattern.layer_kinds == ("sliding_window", "full_attention")


def test_shards_are_read_through_their_index(
    opened: Open, tmp_path: Path, models: Mapping[str, ModelManifest], folder_tensors: Callable[[], dict[str, Any]]
) -> None:
    folder = opened().path
    tensors = folder_tensors()
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    weights = open_model(folder, models=models).weights()
    for name, value in tensors.items():
        assert np.array_equal(weights.tensor(name).numpy(), value)

    for wrong, message in [
        ("../model-0.safetensors", "no safetensors file beside it"),
        ("/etc/model.safetensors", "no safetensors file beside it"),
        ("sub/model-0.safetensors", "no safetensors file beside it"),
        ("..\\model-0.safetensors", "no safetensors file beside it"),
        ("model-0.bin", "no safetensors file beside it"),
        ("model-9.safetensors", "lacks model-9.safetensors"),
    ]:
        index.write_text(json.dumps({"weight_map": {**weight_map, "model.norm.weight": wrong}}))
        with pytest.raises(BrokenModel, match=message):
            open_model(folder, models=models)
    swapped = dict.fromkeys(weight_map, "model-0.safetensors")
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(BrokenModel, match="is missing"):
        open_model(folder, models=models)
    index.write_text("{}")
    with pytest.raises(BrokenModel, match="no 'weight_map'"):
        open_model(folder, models=models)


def test_weights_are_views_of_the_mapped_file(opened: Open) -> None:
    weights = opened().weights()
    first = weights.linear("model.layers.0.mlp.up_proj.weight").parts[0].data
    second = weights.tensor("model.layers.0.mlp.up_proj.weight")
    assert first.data_ptr() == second.data_ptr()


def test_loading_weights_takes_no_second_copy(tmp_path: Path) -> None:
    """A 64 MiB tensor, looked at through the mapping, adds nothing to the memory that the process owns alone."""
    import subprocess
    import sys

    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system doesn't say which memory is a process's own")
    save_file({"big": np.zeros((4096, 4096), np.float32)}, tmp_path / "model.safetensors")
    code = f"""
import torch
from pathlib import Path
from types import SimpleNamespace
from octavo.core.loading.safetensors_weights import SafetensorsWeights, open_tensors
def own():
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
before = own()
weights = SafetensorsWeights(open_tensors(Path({str(tmp_path)!r})), SimpleNamespace(tie_word_embeddings=False))
total = float(weights.tensor("big").sum())
assert total == 0 and own() - before < 16 << 10, own() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unaligned_tensors_are_read(opened: Open, folder_tensors: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    """Old writers don't pad the header, so float32 data may start anywhere."""
    source = opened()
    path = source.path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 3).to_bytes(8, "little") + data[8 : 8 + length] + b"   " + data[8 + length :])
    weights = open_model(source.path).weights()
    for name, value in folder_tensors().items():
        assert np.array_equal(weights.tensor(name).numpy(), value)


def test_names_without_the_model_prefix_are_found(opened: Open, folder_tensors: Callable[[], dict[str, Any]]) -> None:
    tensors = {name.removeprefix("model."): value for name, value in folder_tensors().items()}
    assert "model.layers.1.mlp.up_proj.weight" in opened(tensors=tensors).weights()


def test_generation_defaults_and_several_ends(opened: Open) -> None:
    files = {"generation_config.json": {"eos_token_id": [2, 7, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95}}
    source = opened(files=files)
    assert source.generation.eos_token_ids == (2, 7)
    assert (source.generation.temperature, source.generation.top_k, source.generation.top_p) == (0.6, 20, 0.95)
    assert source.generation.repetition_penalty is None
    assert source.tokenizer().eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("temperature", -1), ("top_p", 1.5), ("top_p", 0), ("min_p", 2), ("repetition_penalty", 0), ("repetition_penalty", 1e9),
     ("top_k", -2), ("temperature", "hot")],
)  # fmt: skip
def test_a_default_that_no_request_may_have_is_the_file_s_fault(opened: Open, key: str, wrong: Any) -> None:
    with pytest.raises(BrokenModel, match=f"generation_config.json: '{key}'"):
        opened(files={"generation_config.json": {key: wrong}})


def test_defaults_that_switch_a_filter_off_are_taken(opened: Open) -> None:
    generation = opened(files={"generation_config.json": {"top_k": -1, "top_p": 1.0, "temperature": 0}}).generation
    assert (generation.top_k, generation.top_p, generation.temperature) == (-1, 1.0, 0.0)


def test_without_generation_config_the_end_is_that_of_the_config(opened: Open) -> None:
    assert opened().generation.eos_token_ids == (2,)


@pytest.mark.parametrize("wrong", ["two", [2, -1], [True], list(range(100)), 1.5])
def test_ends_that_are_no_token_ids_are_refused(opened: Open, wrong: Any) -> None:
    with pytest.raises(BrokenModel, match="'eos_token_id'"):
        opened(files={"generation_config.json": {"eos_token_id": wrong}})


def test_the_tokenizer_of_a_folder(opened: Open, tmp_path: Path, models: Mapping[str, ModelManifest]) -> None:
    source = opened(files={"tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}})
    raw = Tokenizer.from_file(str(source.path / "tokenizer.json"))
    raw.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    raw.enable_truncation(2)
    raw.enable_padding(length=9)
    raw.save(str(source.path / "tokenizer.json"))
    tokenizer = open_model(source.path, models=models).tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (1, (2,), {1, 2})
    ids = tokenizer.encode("<s>&'*+</s>")
    assert ids == [1, 8, 9, 12, 13, 2]  # neither cut to 2 tokens nor padded to 9
    assert tokenizer.decode(ids).replace(" ", "") == "&'*+"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B"}}, "A"),
        ({"tokenizer_config.json": {"chat_template": "B"}}, "B"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
        ),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        ({}, None),
    ],
)
def test_the_chat_template_is_found_where_it_may_be(opened: Open, files: dict[str, Any], expected: str | None) -> None:
    source = opened(files=files)
    assert source.chat_template == expected
    assert source.tokenizer().chat_template == expected


def test_a_template_may_name_the_special_tokens(opened: Open) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    tokenizer = opened(files={"tokenizer_config.json": config}).tokenizer()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x</s>"


def test_a_missing_architecture_is_refused_before_anything_else(
    opened: Open, make_config: Callable[..., dict[str, Any]]
) -> None:
    for architectures in (["MambaForCausalLM"], [], None, "LlamaForCausalLM", [7]):
        with pytest.raises(UnsupportedModel, match=r"architecture .* isn't supported.*supported: Gemma3ForCausalLM,"):
            opened(config=make_config(architectures=architectures), tensors={}, tokenizer=False)


def test_order_of_checks_is_architecture_headers_tokenizer(opened: Open, make_config: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        opened(config=make_config(architectures=["MambaForCausalLM"]), tensors={}, tokenizer=False)
    with pytest.raises(BrokenModel, match=r"tensor 'model.embed_tokens.weight' is missing"):
        opened(tensors={"x": np.zeros(3, np.float32)}, tokenizer=False)
    (opened().path / "tokenizer.json").unlink()
    with pytest.raises(BrokenModel, match=r"has no tokenizer\.json"):
        opened(tokenizer=False)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(opened: Open, models: Mapping[str, ModelManifest]) -> None:
    folder = opened().path
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pickled weights \(pytorch_model.bin\).*save_pretrained"):
        open_model(folder, models=models)


@pytest.mark.parametrize(
    ("remove", "add", "error", "message"),
    [
        ("model.safetensors", None, BrokenModel, r"no weights: no \*.safetensors"),
        ("config.json", None, BrokenModel, "has no config.json; give a folder"),
        ("config.json", "other.gguf", BrokenModel, "for the GGUF in it, give its path: .*other.gguf"),
        ("tokenizer.json", "tokenizer.model", UnsupportedModel, "tokenizer.model but no tokenizer.json; convert it"),
        ("model.safetensors", "a.safetensors b.safetensors", BrokenModel, "2 safetensors files but no"),
    ],
)
def test_what_a_folder_lacks_is_named(
    opened: Open, models: Mapping[str, ModelManifest], remove: str, add: str | None, error: type[Exception], message: str
) -> None:
    folder = opened().path
    (folder / remove).unlink()
    for name in (add or "").split():
        (folder / name).write_bytes(b"")
    with pytest.raises(error, match=message):
        open_model(folder, models=models)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
     "chat_template.jinja", "chat_template.json", "model.safetensors", "model.safetensors.index.json", "other.safetensors"],
)  # fmt: skip
def test_a_link_that_leads_nowhere_is_no_absent_file(opened: Open, models: Mapping[str, ModelManifest], name: str) -> None:
    folder = opened().path
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    if name.endswith((".safetensors", ".index.json")):
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("blobs/0123")
    with pytest.raises(BrokenModel, match=rf"{name} links to blobs/0123, which isn't there; mend the link"):
        open_model(folder, models=models)


def test_a_shard_whose_link_leads_nowhere_is_named(
    opened: Open, models: Mapping[str, ModelManifest], folder_tensors: Callable[[], dict[str, Any]]
) -> None:
    folder = opened().path
    (folder / "model.safetensors").unlink()
    (folder / "model-1.safetensors").symlink_to("blobs/0123")
    index = {"weight_map": dict.fromkeys(folder_tensors(), "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModel, match=r"model-1\.safetensors links to blobs/0123, which isn't there"):
        open_model(folder, models=models)


def test_a_lone_safetensors_file_may_have_any_name(opened: Open, models: Mapping[str, ModelManifest]) -> None:
    folder = opened().path
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "model.norm.weight" in open_model(folder, models=models).weights()


def test_untied_heads_must_be_there(opened: Open, make_config: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(BrokenModel, match=r"'lm_head.weight' is missing"):
        opened(config=make_config(tie_word_embeddings=False))


def test_tensors_of_other_dtypes_are_refused_when_asked_for(opened: Open, folder_tensors: Callable[[], dict[str, Any]]) -> None:
    tensors = {**folder_tensors(), "model.layers.0.mlp.up_proj.weight": np.zeros((64, 32), np.int8)}
    weights = opened(tensors=tensors).weights()
    with pytest.raises(UnsupportedModel, match="has dtype I8; Octavo reads F32, F16, BF16"):
        weights.linear("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(BrokenModel, match="'nothing' is missing"):
        weights.tensor("nothing")
    with pytest.raises(BrokenModel, match="a matrix is expected"):
        weights.linear("model.norm.weight")


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", "[1]"), ("config.json", "{"), ("tokenizer_config.json", "[" * 100_000)]
)
def test_json_that_is_none_is_refused(opened: Open, models: Mapping[str, ModelManifest], name: str, content: str) -> None:
    folder = opened().path
    (folder / name).write_text(content)
    with pytest.raises(BrokenModel, match=name):
        open_model(folder, models=models)


def test_a_tokenizer_json_that_makes_no_tokenizer_is_broken(opened: Open, models: Mapping[str, ModelManifest]) -> None:
    folder = opened().path
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    with pytest.raises(BrokenModel, match=r"tokenizer.json makes no tokenizer"):
        open_model(folder, models=models).tokenizer()
