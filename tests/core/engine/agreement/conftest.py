"""The golden reference: `transformers` in float32; and small random models in folders that both sides load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.core.loading.catalogue import find

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB_SIZE = 260
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_parameters": ROPE}),
    "llama3-scaled": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"rope_parameters": ROPE, "sliding_window": 12}),
    "qwen2": ("Qwen2ForCausalLM", {"rope_parameters": ROPE}),
    "qwen3": ("Qwen3ForCausalLM", {"rope_parameters": ROPE, "head_dim": 24}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "initializer_range": 0.1,
        },
    ),
}


class Reference:
    """A transformers model."""

    def __init__(self, model: Any) -> None:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        self.model = model.eval()

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size] float32: after each token, the log probabilities of the next."""
        logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Its own greedy continuation, with its own cache."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=None,
        )
        return [int(token) for token in out[0, len(prompt) :]]


def make_small_model(name: str, folder: Path, tokenizer: Any, *, end_scale: float = 1.0) -> Reference:
    """A small random model, saved in ``folder``. ``end_scale`` above 1 makes the end-of-text token come up now and then."""
    import transformers

    architecture, extra = CONFIGS[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**SIZES, **extra})
    torch.manual_seed(sorted(CONFIGS).index(name))
    model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # transformers starts these at a constant, where a mistake wouldn't show
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if config.tie_word_embeddings:  # or each token would be its own likeliest successor
            model.get_input_embeddings().weight.mul_(0.2)
        model.get_output_embeddings().weight[256].mul_(end_scale)
    model.save_pretrained(folder)
    save_tokenizer(folder, tokenizer)
    return Reference(model)


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def small_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any
) -> tuple[Path, Reference]:
    """Folder and reference of a small random model, of each architecture in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_small_model(request.param, folder, byte_tokenizer)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> tuple[Path, Reference]:
    """Folder and reference of a small random Llama that ends its texts now and then."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_small_model("llama", folder, byte_tokenizer, end_scale=3.0)


def save_tokenizer(folder: Path, tokenizer: Any) -> None:
    tokenizer.raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )


@pytest.fixture(scope="session")
def catalogue_path() -> Callable[[str], Path]:
    """The file of a catalogue model; the test is skipped where it wasn't pulled."""

    def path(name: str) -> Path:
        if not find(name).path.is_file():
            pytest.skip(f"{name} isn't on this machine: octavo models pull {name}")
        return find(name).path

    return path


@pytest.fixture(scope="session")
def gguf_reference() -> Callable[[Path], Reference]:
    """A GGUF file through transformers' own reader, dequantised to float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    def load(path: Path) -> Reference:
        logging.disable_progress_bar()
        options = {"gguf_file": path.name, "dtype": torch.float32, "attn_implementation": "eager"}
        return Reference(AutoModelForCausalLM.from_pretrained(path.parent, **options))

    return load


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    """Opens engines in float32 on the host; closes them."""
    made: list[LLM] = []

    def make(model: Path | str, **options: Any) -> LLM:
        defaults = {"platform": "cpu", "attention_backend": "reference", "dtype": "float32", "kv_cache_memory_bytes": "64M"}
        made.append(LLM(str(model), **{**defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
