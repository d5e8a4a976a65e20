"""The golden reference: `transformers` in float32; and small random models in folders that both sides load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import NAMES, save_small_model

from octavo import LLM
from octavo.core.loading.catalogue import find


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


@pytest.fixture(scope="session", params=NAMES)
def small_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """Folder and reference of a small random model, of each architecture in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, Reference(save_small_model(request.param, folder))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """Folder and reference of a small random Llama that ends its texts now and then."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, Reference(save_small_model("llama", folder, end_scale=3.0))


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
