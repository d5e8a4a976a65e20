"""Octavo runs large language models on any accelerator.

>>> from octavo import LLM, SamplingParams
>>> llm = LLM("smollm2")
>>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from octavo.core.api.sampling import SamplingParams
    from octavo.core.engine.async_llm import AsyncLLM
    from octavo.core.engine.beam_search import BeamSearchParams
    from octavo.core.engine.llm import LLM
    from octavo.core.engine.outputs import CompletionOutput, RequestOutput

_HOMES = {
    "LLM": "octavo.core.engine.llm",
    "AsyncLLM": "octavo.core.engine.async_llm",
    "BeamSearchParams": "octavo.core.engine.beam_search",
    "CompletionOutput": "octavo.core.engine.outputs",
    "RequestOutput": "octavo.core.engine.outputs",
    "SamplingParams": "octavo.core.api.sampling",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
