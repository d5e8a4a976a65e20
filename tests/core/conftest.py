"""A random Llama in a folder, for whatever needs a whole model and doesn't mind what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 64 tokens of vocabulary, 128 tokens of context, safetensors and tokenizer.json."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny_llama")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.4,
    )
    torch.manual_seed(4)
    transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "w63", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


@pytest.fixture(scope="session")
def tiny_llama_greedy(tiny_llama: Path) -> Callable[[Sequence[int], int], list[int]]:
    """Its greedy continuation, as transformers computes it."""
    import torch
    import transformers

    model: Any = transformers.LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
        known = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
        return known[len(prompt) :]

    return generate
