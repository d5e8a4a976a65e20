"""Random small models saved by transformers give the same logits here, however their prompt is cut and batched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from octavo.core.api.errors import BrokenModel
from octavo.core.discovery import installed
from octavo.core.loading import open_model

VOCAB, LENGTH = 97, 41
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
SLIDING, FULL = "sliding_attention", "full_attention"


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | changes))


def mistral(**changes: Any) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE | changes))


def qwen2(**changes: Any) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE | changes))


def qwen3(**changes: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE | changes))


def gemma3(**changes: Any) -> Any:
    pattern = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 24}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE | pattern | changes))


MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, biases and wide heads": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=24),
    "llama, one key-value head": lambda: llama(num_key_value_heads=1),
    "llama, llama3 rope": lambda: llama(rope_parameters=LLAMA3),
    "llama, yarn rope": lambda: llama(rope_parameters=YARN),
    "llama, linear rope": lambda: llama(rope_parameters=LINEAR),
    "mistral, window": lambda: mistral(sliding_window=7),
    "mistral, no window": lambda: mistral(sliding_window=None),
    "qwen2": qwen2,
    "qwen2, window above": lambda: qwen2(use_sliding_window=True, max_window_layers=1, sliding_window=6),
    "qwen2, window off": lambda: qwen2(use_sliding_window=False, max_window_layers=1, sliding_window=6),
    "qwen3": lambda: qwen3(head_dim=20),
    "qwen3, biases, tied": lambda: qwen3(attention_bias=True, tie_word_embeddings=True),
    "gemma3": gemma3,
    "gemma3, biases, untied": lambda: gemma3(attention_bias=True, tie_word_embeddings=False),
    "gemma3, window on every layer": lambda: gemma3(layer_types=[SLIDING] * 3),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A transformers model with weights that matter, and the folder that it was saved to."""
    torch.manual_seed(0)
    model = MODELS[request.param]().float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    vocabulary = {chr(0x100 + index): index for index in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(folder / "tokenizer.json"))
    return model, folder


def runner_for(hand_runner: Any, folder: Path, **options: Any) -> Any:
    source = open_model(folder)
    model_class = installed().load("model", source.spec.model_plugin)
    return hand_runner(model_class, source.spec, source.weights(), **options)


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def tokens_of(seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_prefill_chunks_and_decode_give_the_same_logits(saved: tuple[Any, Path], hand_runner: Any) -> None:
    model, folder = saved
    first, second = tokens_of(1), tokens_of(2)
    runner = runner_for(hand_runner, folder)
    steps = [
        {"a": first[:20]},  # prefill
        {"b": second[:3], "a": first[20:33]},  # a chunk, batched with another prompt
        {"b": second[3:4], "a": first[33:34]},  # decode
        {"a": first[34:35], "b": second[4:30]},  # decode beside a chunk
        *({"a": [token]} for token in first[35:]),
    ]
    results = [runner.step(step) for step in steps]
    for name, tokens, length in (("a", first, LENGTH), ("b", second, 30)):
        got = torch.cat([result[name] for result in results if name in result])
        want = reference_logits(model, tokens[:length])
        assert want.abs().max() > 0.5
        assert (got - want).abs().max() < 5e-4
    assert got.dtype is torch.float32


def test_greedy_tokens_are_the_same(saved: tuple[Any, Path], hand_runner: Any) -> None:
    model, folder = saved
    prompt = tokens_of(3)[:9]
    wanted = list(prompt)
    for _ in range(24):
        wanted.append(int(reference_logits(model, wanted)[-1].argmax()))
    assert runner_for(hand_runner, folder).greedy("a", prompt, 24) == wanted[9:]


def test_bfloat16_stays_close(saved: tuple[Any, Path], hand_runner: Any) -> None:
    model, folder = saved
    tokens = tokens_of(4)
    got = runner_for(hand_runner, folder, dtype="bfloat16").step({"a": tokens})["a"]
    want = reference_logits(model, tokens)
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert got.dtype is torch.float32
    assert error < 0.06


@pytest.mark.parametrize("saved", ["gemma3"], indirect=True)
def test_gemma_scales_its_embedding_by_a_number_of_the_activations_dtype(saved: tuple[Any, Path], hand_runner: Any) -> None:
    model, folder = saved
    runner = runner_for(hand_runner, folder, dtype="bfloat16")
    ids = torch.arange(VOCAB)
    assert float(torch.tensor(model.config.hidden_size**0.5).bfloat16()) != model.config.hidden_size**0.5
    with torch.inference_mode():
        want = copy.deepcopy(model).bfloat16().model.embed_tokens(ids)
        assert torch.equal(runner.model.embed(ids, SimpleNamespace(ops=runner.ops)), want)


def test_a_weight_of_the_wrong_shape_is_named(saved: tuple[Any, Path], hand_runner: Any) -> None:
    from dataclasses import replace

    source = open_model(saved[1])
    spec = replace(source.spec, intermediate_size=50)
    with pytest.raises(BrokenModel, match=r"mlp.gate_proj.weight has shape \[48, 32\].*\[50, 32\]"):
        hand_runner(installed().load("model", spec.model_plugin), spec, source.weights())
