"""A backend with ``needs_host_lengths`` sees exact lengths on the host in every step, also where steps overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

MANIFEST = """
[plugin]
name = "exact"
api = "1.0"
[attention.exact]
platforms = ["cpu"]
dtypes = ["float32"]
kv_dtypes = ["float32"]
head_sizes = { multiple_of = 8 }
block_sizes = { multiple_of = 16 }
features = ["causal", "gqa", "chunk_context", "mixed_batch", "multi_token_decode"]
needs_host_lengths = true
"""
ATTENTION = """
from octavo.plugins.attention.reference.backend import ReferenceAttention

class Attention(ReferenceAttention):
    steps = 0

    def plan(self, batch):
        assert batch.host.exact
        for name in ("query_start_loc", "seq_lens", "num_computed_tokens"):
            assert getattr(batch.host, name).tolist() == getattr(batch, name).tolist(), name
        Attention.steps += 1
        return super().plan(batch)
"""


@pytest.mark.parametrize("speculative", [None, "ngram"])
def test_host_lengths_are_those_of_the_device_in_every_step(
    local_plugins: Any, tiny_llama: Path, speculative: str | None
) -> None:
    points = {"octavo.attention_backends": {"exact": "exact_octavo.attention:Attention"}}
    local_plugins.add("exact-octavo", manifest=MANIFEST, files={"attention.py": ATTENTION}, entry_points=points)
    prompts = [{"prompt_token_ids": [1, 2, 3] * length} for length in (1, 4, 9)]
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    common: dict[str, Any] = {"platform": "cpu", "dtype": "float32", "kv_cache_memory_bytes": "4M"}
    with LLM(str(tiny_llama), attention_backend="reference", **common) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
    with LLM(str(tiny_llama), attention_backend="exact", speculative=speculative, **common) as llm:
        assert llm.config.scheduler.async_scheduling is (None if speculative is None else False)
        outputs = llm.generate(prompts, sampling)
    from exact_octavo.attention import Attention  # type: ignore[import-not-found]

    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert Attention.steps > 5
