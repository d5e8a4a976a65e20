"""A tiny model, and the code of plugins that behave in the ways the scenarios need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VOCABULARY = 64

PLATFORM = """
from octavo.backends.cpu.platform import CpuPlatform

class Platform(CpuPlatform):
    pass
"""
"""An accelerator in name: the host's processors under another one."""

BACKEND = """
from octavo.plugins.attention.reference.backend import ReferenceAttention

class Attention(ReferenceAttention):
    pass
"""

PROBE = """
from octavo.api.manifest import ProbedDevice, ProbeResult

def probe():
    return ProbeResult(devices=[ProbedDevice(index=0, name="{name} device", arch="{arch}")])
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 3 layers, head size 8, 64 tokens, 128 tokens of context."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    hidden, heads, kv_heads, inner, layers = 32, 4, 2, 48, 3
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    size = hidden // heads
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "model.norm": (hidden,)}
    for index in range(layers):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.post_attention_layernorm": (hidden,),
            f"{prefix}.self_attn.q_proj": (heads * size, hidden),
            f"{prefix}.self_attn.k_proj": (kv_heads * size, hidden),
            f"{prefix}.self_attn.v_proj": (kv_heads * size, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, heads * size),
            f"{prefix}.mlp.gate_proj": (inner, hidden),
            f"{prefix}.mlp.up_proj": (inner, hidden),
            f"{prefix}.mlp.down_proj": (hidden, inner),
        }
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def add_accelerator() -> Callable[..., Path]:
    """Install a platform ``name`` with an attention backend ``name-attention``; any part can be given otherwise."""

    def add(box: Any, name: str = "acme", **changes: Any) -> Path:
        package = changes.get("package", f"{name}_octavo")
        probe = changes.pop("probe", PROBE.format(name=name, arch="acme1"))
        files = {"platform.py": PLATFORM, "attention.py": BACKEND, **({"probe.py": probe} if probe else {})}
        probed = f'probe = "{package}.probe:probe"' if probe else ""
        text = f"""
        [plugin]
        name = "{changes.pop("plugin", name)}"
        api = "{changes.pop("api", "1.0")}"
        [platform.{name}]
        device_type = "cpu"
        archs = ["acme1", "acme2", "acme3"]
        attention = ["{name}-attention"]
        {probed}
        {changes.pop("platform", "")}
        [attention.{name}-attention]
        platforms = ["{name}"]
        kinds = {changes.pop("kinds", '["full_attention", "sliding_window", "draft"]')}
        dtypes = {changes.pop("dtypes", '["float32", "bfloat16"]')}
        kv_dtypes = {changes.pop("kv_dtypes", '["float32", "bfloat16"]')}
        head_sizes = {changes.pop("head_sizes", "[8, 64]")}
        block_sizes = {changes.pop("block_sizes", "{ multiple_of = 16 }")}
        features = {changes.pop("features", '["causal", "gqa", "sliding_window", "chunk_context", "mixed_batch"]')}
        {changes.pop("attention", "")}
        """
        points = {
            "octavo.platforms": {name: f"{package}.platform:Platform"},
            "octavo.attention_backends": {f"{name}-attention": f"{package}.attention:Attention"},
        }
        arguments = {
            "manifest": "\n".join(line.strip() for line in text.splitlines()),
            "files": {**files, **changes.pop("files", {})},
            "entry_points": points,
            **changes,
        }
        folder: Path = box.add(arguments.pop("distribution", f"{name}-octavo"), **arguments)
        return folder

    return add


@pytest.fixture
def octavo_command() -> Callable[..., int]:
    """``octavo`` in this process, for what needs no process of its own; its exit code."""
    from octavo.core.cli.main import main

    return lambda *arguments: main(list(arguments))
