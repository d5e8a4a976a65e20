"""The default model, through the layers and the reference backend alone: no scheduler, no worker."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.discovery import installed
from octavo.core.loading import open_model


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_names_the_capital_of_france(dtype: str, hand_runner: Any) -> None:
    source = open_model("smollm2")
    tokenizer = source.tokenizer()
    runner = hand_runner(
        installed().load("model", source.spec.model_plugin), source.spec, source.weights(), dtype=dtype, block_size=16
    )
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    tokens = runner.greedy("a", tokenizer.encode(prompt, add_special_tokens=False), 8)
    assert "Paris" in tokenizer.decode(tokens)
