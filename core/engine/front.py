"""What `LLM` and `AsyncLLM` share: an open model, its tokenizer, its defaults, and a started engine core."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.api.errors import EngineError, UsageError
from octavo.core.api.sampling import SamplingParams
from octavo.core.engine.core import EngineCore, start_core
from octavo.core.engine.detokenizer import TokenBytes
from octavo.core.engine.output import OutputProcessor
from octavo.core.engine.requests import Prompt, RequestMaker

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig
    from octavo.core.loading import ModelSource
    from octavo.core.loading.tokenizer import Tokenizer

__all__ = ["Front", "Message", "config_from_options", "open_front"]

Message = Mapping[str, Any]
"""``{"role": "user", "content": "…"}``; templates may know more keys."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Front:
    """An engine core with what turns prompts into requests and outputs into text."""

    core: EngineCore
    config: EngineConfig  # every choice explicit
    source: ModelSource
    tokenizer: Tokenizer
    maker: RequestMaker
    processor: OutputProcessor
    left_behind: bool = False  # a fork copied this object, but not the threads that the engine runs on

    def check_process(self) -> None:
        """Raises `EngineError` in a forked child, where a request would be waited for for ever."""
        if self.left_behind:
            raise EngineError("the engine runs in the process that this one was forked from", hint="start one after the fork")

    def default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (its generation_config), where it has any."""
        generation = self.source.generation
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: getattr(generation, name, None) for name in names}
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})

    def chat_prompt(self, messages: Sequence[Message], **template: Any) -> Prompt:
        """Messages through the model's chat template. Raises `UsageError` when it has none."""
        if self.source.chat_template is None:
            raise UsageError("the model has no chat template", hint="use generate with a plain prompt (--raw)")
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise UsageError(
                f"a conversation must be a list of messages, not {reprlib.repr(messages)}",
                hint='a message is {"role": "user", "content": "…"}',
            )
        text = self.tokenizer.apply_chat_template(list(messages), **template)
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}


def config_from_options(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration from flat keywords; None means "not said"."""
    from octavo.core.config import EngineConfig

    return EngineConfig.from_flat(**{name: value for name, value in options.items() if value is not None})


def open_front(config: EngineConfig) -> Front:
    """Open the model, choose, and start the engine. Raises typed errors; nothing is left behind then."""
    from octavo.core.engine.resolve import resolve

    resolved = resolve(config)
    source = resolved.source
    with ThreadPoolExecutor(1, thread_name_prefix="octavo-tokenizer") as pool:
        building = pool.submit(source.tokenizer)  # while the weights are read
        core = start_core(resolved.config)
    try:
        tokenizer = building.result()
    except BaseException:
        core.shutdown()
        raise
    max_model_len = resolved.config.model.max_model_len
    assert max_model_len is not None
    eos_token_ids = _known((*tokenizer.eos_token_ids, *source.generation.eos_token_ids), core.info.vocab_size)
    maker = RequestMaker(
        tokenizer=tokenizer,
        vocab_size=core.info.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        scheduling_policy=resolved.config.scheduler.scheduling_policy,
    )
    return Front(
        core=core,
        config=resolved.config,
        source=source,
        tokenizer=tokenizer,
        maker=maker,
        processor=OutputProcessor(TokenBytes(tokenizer)),
    )


def _known(eos_token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The end tokens that the model can produce, each once; a warning names the others in its files."""
    ids = tuple(dict.fromkeys(eos_token_ids))
    if outside := [token_id for token_id in ids if not 0 <= token_id < vocab_size]:
        listed = ", ".join(map(str, outside))
        log.warning("the model's files name end tokens outside its vocabulary of %d, ignored: %s", vocab_size, listed)
    return tuple(token_id for token_id in ids if token_id not in outside)
