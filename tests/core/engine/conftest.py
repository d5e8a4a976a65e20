"""A small byte-level tokenizer, an executor that echoes the prompt, and fronts that stand on both."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from octavo.core.api.errors import WorkerDied
from octavo.core.api.executor import ExecutorInfo, WorkerMethod
from octavo.core.api.kv_cache import FullAttention, KVGroupInfo
from octavo.core.api.scheduling import StepPlan, StepResult
from octavo.core.config import EngineConfig
from octavo.core.engine.core import assemble_core
from octavo.core.engine.detokenizer import TokenBytes
from octavo.core.engine.front import Front
from octavo.core.engine.llm import LLM
from octavo.core.engine.output import OutputProcessor
from octavo.core.engine.requests import RequestMaker

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@dataclass
class ByteTokenizer:
    """One token a byte, ids 0 … 255 in the order of the stand-in alphabet; 256 is ``<end>``, the end-of-text token."""

    raw: RawTokenizer
    special_ids: frozenset[int] = frozenset({256})
    eos_token_ids: tuple[int, ...] = (256,)
    bos_token_id: int | None = None
    vocab_size: int = 257

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return str(self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens))


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    raw = RawTokenizer(models.BPE({char: index for index, char in enumerate(ALPHABET)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    return ByteTokenizer(raw)


class EchoExecutor:
    """Says the prompt again and again: output token ``i`` is prompt token ``i`` modulo its length. Steps run on a thread.

    ``fail_at`` is the step that fails, with ``failure``; in step ``fail_row_at`` only the first row fails. While ``gate`` is
    clear, steps wait for it.
    """

    def __init__(
        self,
        *,
        max_in_flight: int = 2,
        fail_at: int | None = None,
        failure: Exception | None = None,
        fail_row_at: int | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.fail_at = fail_at
        self.fail_row_at = fail_row_at
        self.failure = failure or WorkerDied("the worker died")
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.most_in_flight = 0
        self.is_shut_down = False
        self._in_flight = 0
        self._slots: dict[int, tuple[list[int], int]] = {}  # slot → its tokens, the prompt's length
        self._computed: dict[int, int] = {}
        self._rows: list[int] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="echo")

    def info(self, num_blocks: int = 200, block_size: int = 4) -> ExecutorInfo:
        spec = FullAttention(block_size=block_size, bytes_per_block=64)
        kv = (KVGroupInfo(spec=spec, num_blocks=num_blocks, pool_id=0),)
        return ExecutorInfo(
            kv=kv, vocab_size=257, num_workers=1, max_in_flight=self.max_in_flight, attention={"full_attention": "echo"}
        )

    def start(self, config: EngineConfig) -> ExecutorInfo:
        return self.info()

    def execute(self, step: StepPlan) -> Future[StepResult]:
        assert not self.is_shut_down
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        assert self._in_flight <= self.max_in_flight
        return self._pool.submit(self._run, step)

    def call(self, method: WorkerMethod, **kwargs: Any) -> list[Any]:
        return [{"method": method.value, **kwargs}]

    def check_health(self) -> None:
        return None

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.gate.set()
        self._pool.shutdown(wait=True)

    def _run(self, step: StepPlan) -> StepResult:
        assert self.gate.wait(30), "the test never opened the gate"
        time.sleep(0.001)  # long enough for the engine to plan ahead
        self._in_flight -= 1
        self.num_steps += 1
        if self.num_steps == self.fail_at:
            raise self.failure
        for new in step.new:
            self._slots[new.slot] = (new.token_ids.tolist(), new.num_prompt_tokens)
            self._computed[new.slot] = new.num_computed_tokens
        if step.rows is not None:
            self._rows = step.rows.tolist()
        counts = [1] * len(self._rows) if step.num_scheduled_tokens is None else step.num_scheduled_tokens.tolist()
        sampled = np.full((len(self._rows), 1), -1, np.int32)
        for row, (slot, count) in enumerate(zip(self._rows, counts, strict=True)):
            tokens, num_prompt = self._slots[slot]
            self._computed[slot] += count
            assert self._computed[slot] <= len(tokens)
            if self._computed[slot] == len(tokens):
                tokens.append(tokens[(len(tokens) - num_prompt) % num_prompt])
                sampled[row, 0] = tokens[-1]
        failed = {0: "the row has no token"} if self.num_steps == self.fail_row_at else {}
        sampled[list(failed)] = -1
        return StepResult(step=step.step, sampled=sampled, failed=failed)


@pytest.fixture
def echo_front(byte_tokenizer: ByteTokenizer) -> Iterator[Callable[..., Front]]:
    """Makes fronts on an `EchoExecutor` and the real scheduler; shuts them down."""
    made: list[Front] = []

    def make(
        executor: EchoExecutor | None = None,
        *,
        num_blocks: int = 200,
        max_model_len: int = 200,
        hooks: Any = None,
        **options: Any,
    ) -> Front:
        executor = executor or EchoExecutor()
        config = EngineConfig.from_flat(
            model="echo", platform="echo", max_model_len=max_model_len, **{"max_num_seqs": 8, **options}
        )
        info = executor.info(num_blocks)
        core = assemble_core(config, executor, info, hooks)
        maker = RequestMaker(
            tokenizer=byte_tokenizer,  # type: ignore[arg-type]
            vocab_size=257,
            max_model_len=max_model_len,
            eos_token_ids=(256,),
            scheduling_policy=config.scheduler.scheduling_policy,
        )
        source: Any = SimpleNamespace(generation=SimpleNamespace(temperature=0.0, top_k=7), chat_template="x")
        front = Front(
            core=core,
            config=config,
            source=source,
            tokenizer=byte_tokenizer,  # type: ignore[arg-type]
            maker=maker,
            processor=OutputProcessor(TokenBytes(byte_tokenizer)),  # type: ignore[arg-type]
        )
        made.append(front)
        return front

    yield make
    for front in made:
        front.core.shutdown()


@pytest.fixture(name="EchoExecutor")
def _echo_executor() -> type[EchoExecutor]:
    return EchoExecutor


@pytest.fixture
def make_llm(echo_front: Any) -> Callable[..., LLM]:
    def make(*arguments: Any, **options: Any) -> LLM:
        llm = LLM.__new__(LLM)
        llm.front = echo_front(*arguments, **options)
        llm._ids = itertools.count()
        llm._lock = threading.RLock()
        return llm

    return make
