"""From a prompt and `SamplingParams` to a `Request`: tokenised, truncated, checked against the model's limits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypeAlias, TypedDict

import numpy as np

from octavo.core.api.errors import UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import Request
from octavo.core.config.suggest import nearest

if TYPE_CHECKING:
    from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["Prompt", "RequestMaker", "TextPrompt", "TokensPrompt", "prompt_list"]


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | TextPrompt | TokensPrompt | Mapping[str, Any]
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class _Parts(NamedTuple):
    text: str | None
    token_ids: Sequence[int] | np.ndarray[Any, Any] | None
    cache_salt: str | None


@dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Makes requests for one model. ``vocab_size`` is the model's, which may exceed the tokenizer's.

    ``scheduling_policy`` says whether priorities mean anything: one that would be ignored is refused.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    scheduling_policy: str = "fcfs"

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> tuple[Request, str | None]:
        """The request and its prompt's text (None for a prompt of token ids). Raises `UsageError`."""
        arrival_s = time.monotonic()
        if not _is_id(priority):
            raise UsageError(f"priority must be a whole number, not {priority!r}")
        if priority and self.scheduling_policy == "fcfs":
            raise UsageError(
                f"the request has priority {priority}, but the scheduling policy fcfs serves in order of arrival",
                hint="choose the scheduling policy priority, or leave the priority out",
            )
        parts = _parts(prompt)
        self._check_params(params)
        if parts.token_ids is None:
            # Its ids are checked as well: a tokenizer may know special tokens that the model has no embedding for.
            token_ids = self._checked_ids(self.tokenizer.encode(parts.text or "", add_special_tokens=add_special_tokens))
        else:
            token_ids = self._checked_ids(parts.token_ids)
        if params.truncate_prompt_tokens is not None:
            kept = params.truncate_prompt_tokens
            token_ids = token_ids[-(self.max_model_len - 1 if kept == -1 else kept) :]
        room = self._room(len(token_ids))
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=params,
            eos_token_ids=self.eos_token_ids,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            arrival_time_s=arrival_s,
            priority=int(priority),
            cache_salt=parts.cache_salt,
        )
        return request, parts.text

    def _room(self, num_prompt_tokens: int) -> int:
        if num_prompt_tokens == 0:
            raise UsageError("the prompt is empty", hint="a prompt needs at least one token")
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise UsageError(
                f"the prompt has {num_prompt_tokens} tokens, but the context holds {self.max_model_len} including the output",
                hint="shorten it, set truncate_prompt_tokens, or raise max_model_len if the model allows",
            )
        return room

    def _checked_ids(self, ids: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
        try:
            array = np.asarray(ids)
        except (ValueError, OverflowError) as error:  # lists of unequal lengths in it
            raise UsageError("prompt_token_ids must be a flat list of whole numbers") from error
        if array.size == 0:
            return np.empty(0, np.int32)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise UsageError("prompt_token_ids must be a flat list of whole numbers")
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            raise UsageError(f"token id {wrong[0]} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return array.astype(np.int32)

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise UsageError(f"sampling_params must be a SamplingParams, not {type(params).__name__}")
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token_id in ids or ():
                if token_id >= self.vocab_size:
                    raise UsageError(f"{name}: token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if wanted is not None and wanted > self.vocab_size:
                raise UsageError(f"{name} is {wanted}, more than the vocabulary's {self.vocab_size} tokens")


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or many → many. A list (or NumPy array) of token ids is one prompt, one of two dimensions several.

    Raises `UsageError`.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [_from_ids(row) for row in (prompts if prompts.ndim == 2 else [prompts])]
    if not isinstance(prompts, Sequence):
        raise UsageError(f"prompts must be text, token ids, a mapping or a list of these, not {type(prompts).__name__}")
    if prompts and all(_is_id(item) for item in prompts):
        return [{"prompt_token_ids": prompts}]
    return [prompt if isinstance(prompt, (str, Mapping)) else _from_ids(prompt) for prompt in prompts]


def sampling_list(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, default: SamplingParams
) -> list[SamplingParams]:
    """One `SamplingParams` a prompt. Raises `UsageError` when a list of another length was given."""
    if params is None:
        return [default] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise UsageError(f"sampling_params must be a SamplingParams or a list of them, not {type(params).__name__}")
    if len(params) != num_prompts:
        raise UsageError(f"{len(params)} sampling_params for {num_prompts} prompts; give one, or one a prompt")
    return list(params)


def _from_ids(prompt: Any) -> Prompt:
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer):
        return {"prompt_token_ids": prompt}
    if isinstance(prompt, Sequence) and all(_is_id(item) for item in prompt):
        return {"prompt_token_ids": prompt}
    raise UsageError(f"a prompt must be text, token ids or a mapping, not {type(prompt).__name__}")


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _parts(prompt: Prompt) -> _Parts:
    if isinstance(prompt, str):
        return _Parts(prompt, None, None)
    if not isinstance(prompt, Mapping):
        raise UsageError(f"a prompt must be text or a mapping, not {type(prompt).__name__}")
    for key in prompt:
        if key not in _KEYS:
            raise UsageError(f"unknown key {key!r} in a prompt" + nearest(str(key), _KEYS))
    text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is None and token_ids is None:
        raise UsageError('a prompt needs "prompt" or "prompt_token_ids"')
    if not isinstance(text, (str, type(None))):
        raise UsageError(f'"prompt" must be text, not {type(text).__name__}')
    if not isinstance(salt, (str, type(None))):
        raise UsageError(f'"cache_salt" must be text, not {type(salt).__name__}')
    if salt is not None and not _is_unicode(salt):
        raise UsageError('"cache_salt" holds a lone surrogate, which is no Unicode character')
    if token_ids is not None and (isinstance(token_ids, str) or not isinstance(token_ids, (Sequence, np.ndarray))):
        raise UsageError(f'"prompt_token_ids" must be a list of token ids, not {type(token_ids).__name__}')
    return _Parts(text, token_ids, salt)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
