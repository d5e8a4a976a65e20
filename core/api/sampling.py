"""`SamplingParams`: how tokens are chosen and when a request ends. Names and meanings as vLLM users know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral  # NumPy's whole numbers are as well
from typing import Any

import msgspec

from octavo.core.api.errors import UsageError

__all__ = [
    "SamplingParams",
]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping of one request. Raises `UsageError` on a value out of range.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 and ``top_p`` 1 switch those filters off. ``logprobs`` is the number of
    alternatives reported with each token (0: the chosen token alone; -1: the whole vocabulary; None: nothing), and
    ``prompt_logprobs`` the same of the prompt. ``truncate_prompt_tokens`` -1 keeps what fits ``max_model_len`` beside one
    token of output.
    ``spaces_between_special_tokens`` False joins special tokens that follow one another, where they are shown, without the
    space that tokenizers of whole words put between tokens; the others put none.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] | str | None = ()  # a tuple after construction
    stop_token_ids: Sequence[int] | None = ()  # a tuple after construction
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) and self.stop else _tuple("stop", self.stop)
        given = _tuple("stop_token_ids", self.stop_token_ids)
        stop_token_ids = tuple(int(t) if not isinstance(t, bool) and isinstance(t, Integral) else t for t in given)
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", stop_token_ids)
        for name, low, high, whole in _RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            kind = "a whole number" if whole else "a number"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise UsageError(f"{name} must be {kind}, not {value!r}")
            if not low <= value <= high:  # NaN isn't, nor are infinities; math.isfinite fails on huge whole numbers
                raise UsageError(f"{name} must be {kind} {_range_text(low, high, value)}, not {value!r}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.top_p == 0:
            raise UsageError("top_p must be above 0; use temperature=0 for greedy decoding")
        if self.truncate_prompt_tokens == 0:
            raise UsageError("truncate_prompt_tokens must be at least 1, or -1 for the model's max_model_len, not 0")
        if self.repetition_penalty == 0:
            raise UsageError("repetition_penalty must be above 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if any(not isinstance(text, str) or not text for text in stop):
            raise UsageError("stop must be strings, none of them empty")
        if stop and not self.detokenize:
            raise UsageError("stop strings need detokenize=True")
        if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in stop_token_ids):
            raise UsageError("stop_token_ids must be token ids, whole numbers from 0")
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise UsageError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}")
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UsageError(f"logit_bias keys must be token ids, not {token!r}")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise UsageError(f"logit_bias values must be numbers from -100 to 100, not {bias!r}")


MAX_LOGPROBS = 1024
_INF = 2**31 - 1
_OPTIONAL = {"seed", "logprobs", "prompt_logprobs", "max_tokens", "truncate_prompt_tokens"}
_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
)
_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("n", 1, 16384, True),
    ("temperature", 0, 1e6, False),
    ("top_p", 0, 1, False),
    ("top_k", -1, _INF, True),
    ("min_p", 0, 1, False),
    ("repetition_penalty", 0, 1e6, False),
    ("presence_penalty", -2, 2, False),
    ("frequency_penalty", -2, 2, False),
    ("seed", -(2**63), 2**63 - 1, True),
    ("logprobs", -1, MAX_LOGPROBS, True),
    ("prompt_logprobs", -1, MAX_LOGPROBS, True),
    ("max_tokens", 1, _INF, True),
    ("min_tokens", 0, _INF, True),
    ("truncate_prompt_tokens", -1, _INF, True),
)


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable) or isinstance(values, (Mapping, bytes, bytearray)):
        raise UsageError(f"{name} must be a list, not {values!r}")
    return tuple(values)


def _range_text(low: float, high: float, value: float) -> str:
    if high in (_INF, 1e6):  # bounds that hardly anybody meets
        return f"of at most {high:.0f}" if value > high else f"of at least {low:g}"
    return f"from {low:g} to {high:g}"
