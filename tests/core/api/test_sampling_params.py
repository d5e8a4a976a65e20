"""`SamplingParams` refuses what can't be, on one line that names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.core.api.errors import UsageError
from octavo.core.api.sampling import SamplingParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": float("nan")}, "temperature must be a number of at least 0, not nan"),
        ({"temperature": -0.1}, "temperature must be a number of at least 0"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_p": 0}, "top_p must be above 0; use temperature=0"),
        ({"top_p": 1.1}, "top_p must be a number from 0 to 1"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"n": True}, "n must be a whole number, not True"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) must not exceed max_tokens \(4\)"),
        ({"stop": 5}, "stop must be a list, not 5"),
        ({"stop": ["a", ""]}, "stop must be strings, none of them empty"),
        ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, not 5"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids"),
        ({"logit_bias": [1]}, r"logit_bias must map token ids to numbers, not be \[1\]"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias keys must be token ids, not '1'"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias values must be numbers from -100 to 100, not nan"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be a whole number of at least -1"),
        ({"logprobs": -2}, "logprobs must be a whole number from -1 to 1024"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false, not 'no'"),
        ({"skip_special_tokens": 0}, "skip_special_tokens must be true or false, not 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        SamplingParams(**values)
    assert "\n" not in str(raised.value)


def test_whole_numbers_of_numpy_are_token_ids() -> None:
    (stop,) = SamplingParams(stop_token_ids=np.array([7], np.int32)).stop_token_ids or ()  # type: ignore[arg-type]
    assert (stop, type(stop)) == (7, int)


def test_stops_may_be_one_string_a_list_or_none() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
