"""Small random models of the architectures that core ships, in folders that transformers and Octavo load alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB_SIZE = 260
NUM_LAYERS = 3
END = 256
"""The end-of-text token; those below are bytes, in the order of the stand-in alphabet."""

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_parameters": _ROPE}),
    "llama3-scaled": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3, "head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"rope_parameters": _ROPE, "sliding_window": 12}),
    "qwen2": ("Qwen2ForCausalLM", {"rope_parameters": _ROPE}),
    "qwen3": ("Qwen3ForCausalLM", {"rope_parameters": _ROPE, "head_dim": 24}),
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
NAMES = tuple(sorted(_CONFIGS))


def save_small_model(name: str, folder: Path, *, end_scale: float = 1.0) -> Any:
    """A small random model, saved in ``folder`` with its tokenizer. Returns it as transformers has it, in float32.

    ``end_scale`` above 1 makes the end-of-text token come up now and then.
    """
    import transformers

    architecture, extra = _CONFIGS[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**_SIZES, **extra})
    torch.manual_seed(NAMES.index(name))
    model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # transformers starts these at a constant, where a mistake wouldn't show
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if config.tie_word_embeddings:  # or each token would be its own likeliest successor
            model.get_input_embeddings().weight.mul_(0.2)
        model.get_output_embeddings().weight[END].mul_(end_scale)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return model


def save_byte_tokenizer(folder: Path) -> None:
    """One token a byte, and ``<end>``."""
    raw = Tokenizer(models.BPE({char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
