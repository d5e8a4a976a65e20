"""`FakeWorker`: a worker without a model that checks every rule of the step protocol while it runs.

What a real worker would keep in a KV block it replaces by fingerprints: position p of a sequence leaves the hash of all tokens
up to p. So a block that was never written, was overwritten by someone else, or belongs to another prefix is seen the moment it
is read.
The next token is a function of that hash, which makes every output predictable (`expected_tokens`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.core.api.kv_cache import KVGroupInfo, RecurrentState, SlidingWindow
from octavo.core.api.sampling import SamplingParams
from octavo.core.api.scheduling import Logprobs, NewRequest, Request, StepPlan, StepResult

MASK = (1 << 61) - 1


def mix(state: int, token: int) -> int:
    return ((state ^ (token + 0x9E3779B9)) * 6364136223846793005 + 1442695040888963407) & MASK


def fingerprints(tokens: Sequence[int], salt: str | None = None) -> list[int]:
    state, out = mix(17, sum((salt or "").encode())), []
    for token in tokens:
        state = mix(state, int(token))
        out.append(state)
    return out


@dataclass(frozen=True)
class FakeModel:
    """Greedy decoding: the token that follows a sequence, a different one for each completion ``index``.

    With ``memory`` the token depends on that many last tokens only, so that output falls into loops.
    """

    vocab: int = 50
    memory: int | None = None

    def next_token(self, tokens: Sequence[int], fingerprint: int, index: int, forbidden: frozenset[int]) -> int:
        if self.memory is not None:
            fingerprint = fingerprints(tokens[-self.memory :])[-1]
        token = mix(fingerprint, index) // 7 % self.vocab
        while token in forbidden:
            token = (token + 1) % self.vocab
        return token


def forbidden_ids(sampling: SamplingParams, eos: tuple[int, ...], num_output_tokens: int) -> frozenset[int]:
    if num_output_tokens >= sampling.min_tokens:
        return frozenset()
    return frozenset((*eos, *(sampling.stop_token_ids or ())))


def expected_tokens(request: Request, index: int, max_model_len: int, model: FakeModel) -> tuple[list[int], str, int | None]:
    """What completion ``index`` must give: tokens, reason and stop reason, worked out without any scheduler."""
    sampling, tokens = request.sampling, request.prompt_token_ids.tolist()
    output: list[int] = []
    eos = () if sampling.ignore_eos else request.eos_token_ids
    while True:
        fingerprint = fingerprints(tokens, request.cache_salt)[-1]
        banned = forbidden_ids(sampling, request.eos_token_ids, len(output))
        token = model.next_token(tokens, fingerprint, index, banned)
        tokens.append(token)
        output.append(token)
        if len(output) >= sampling.min_tokens:
            if token in eos:
                return output, "stop", None
            if token in (sampling.stop_token_ids or ()):
                return output, "stop", token
        if len(output) >= request.max_tokens or len(tokens) >= max_model_len:
            return output, "length", None


def _as_logprobs(pairs: list[tuple[int, int]]) -> Logprobs | None:
    if not pairs:
        return None
    rows, tokens = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    return Logprobs(rows=rows, token_ids=tokens[:, None], logprobs=tokens[:, None].astype(np.float32), ranks=np.ones_like(rows))


@dataclass
class Slot:
    new: NewRequest
    tokens: list[int]
    prints: list[int]
    num_computed: int
    tables: list[np.ndarray]
    salt: str | None
    last_sampled_step: int = -1


@dataclass
class FakeWorker:
    """Mirrors slots, tables and blocks; `execute` raises AssertionError on any breach of the protocol."""

    groups: Sequence[KVGroupInfo]
    max_num_seqs: int
    max_model_len: int
    token_budget: int
    decode_query_len: int = 1
    model: FakeModel = field(default_factory=FakeModel)
    salts: dict[str, str | None] = field(default_factory=dict)  # request id → salt, which a real worker needn't know
    slots: dict[int, Slot] = field(default_factory=dict)
    num_copies: int = 0
    num_steps: int = 0
    num_written: int = 0
    num_accepted: int = 0
    last_plan: StepPlan | None = None

    def __post_init__(self) -> None:
        self.blocks: list[dict[int, dict[int, int]]] = [{} for _ in self.groups]  # group → block → offset → fingerprint
        self.rows: list[int] = []

    def execute(self, plan: StepPlan, running: Collection[int] | None = None) -> StepResult:
        """Run one step. ``running``: the slots that were running when it was planned (default: all that the worker knows);
        those that had ended may still be in the tables of the worker, but nobody will read what they hold.
        """
        assert plan.step == self.num_steps, f"step {plan.step} came after {self.num_steps} steps"
        self.num_steps += 1
        self.last_plan = plan
        for slot in [] if plan.released is None else plan.released.tolist():
            assert slot in self.slots, f"slot {slot} released, but nobody has it"
            del self.slots[slot]
        for new in plan.new:
            self._enter(new)
        self._apply_tables(plan)
        self._apply_copies(plan)
        rows, counts = self._apply_rows(plan)
        drafts = self._apply_drafts(plan, rows)
        self._note_holders(self.slots if running is None else running)
        self.begins = {slot: self.slots[slot].num_computed for slot in rows}
        width = 1 + (max(map(len, drafts.values()), default=0) if drafts else 0)
        sampled = np.full((len(rows), width), -1, np.int32)
        accepted = np.zeros(len(rows), np.int32) if plan.drafts is not None else None
        for group in range(len(self.groups)):  # the order of a real step: all writes of a layer, then its reads
            for slot, count in zip(rows, counts, strict=True):
                self._write(group, self.slots[slot], count)
        for i, (slot, count) in enumerate(zip(rows, counts, strict=True)):
            tokens = self._run(slot, count, drafts.get(i, []))
            sampled[i, : len(tokens)] = tokens
            if accepted is not None and tokens:
                accepted[i] = len(tokens) - 1
        self.num_accepted += 0 if accepted is None else int(accepted.sum())
        return StepResult(
            step=plan.step,
            sampled=sampled,
            num_accepted=accepted,
            logprobs=self._logprobs(rows, sampled),
            prompt_logprobs=self._prompt_logprobs(rows, counts),
        )

    def _logprobs(self, rows: list[int], sampled: np.ndarray) -> Logprobs | None:
        """For rows that ask for them, each token with its own number as log probability."""
        wanted = [
            (i, token)
            for i, slot in enumerate(rows)
            if self.slots[slot].new.sampling.logprobs is not None
            for token in sampled[i].tolist()
            if token >= 0
        ]
        return _as_logprobs(wanted)

    def _prompt_logprobs(self, rows: list[int], counts: list[int]) -> Logprobs | None:
        """The same for the prompt positions that this step computed (the first one has none)."""
        wanted = []
        for i, (number, count) in enumerate(zip(rows, counts, strict=True)):
            slot = self.slots[number]
            if slot.new.sampling.prompt_logprobs is not None:
                begin = self.begins[number]
                end = min(begin + count, slot.new.num_prompt_tokens - 1)
                wanted += [(i, slot.tokens[position + 1]) for position in range(begin, end)]
        return _as_logprobs(wanted)

    def _enter(self, new: NewRequest) -> None:
        assert new.slot not in self.slots, f"slot {new.slot} given to {new.request_id}, but it is taken"
        assert 0 <= new.slot < self.max_num_seqs
        tokens = new.token_ids.tolist()
        assert 0 <= new.num_computed_tokens < len(tokens), (new.num_computed_tokens, len(tokens))
        assert new.num_computed_tokens <= new.num_cached_tokens <= len(tokens)
        assert new.num_prompt_tokens <= len(tokens) < self.max_model_len
        assert len(new.block_ids) == len(self.groups)
        tables = []
        for info, ids in zip(self.groups, new.block_ids, strict=True):
            columns = 1 if isinstance(info.spec, RecurrentState) else -(-self.max_model_len // info.block_size)
            table = np.zeros(columns, np.int32)
            table[: len(ids)] = ids
            tables.append(table)
        salt = self.salts.get(new.request_id)
        self.slots[new.slot] = Slot(new, tokens, fingerprints(tokens, salt), new.num_computed_tokens, tables, salt)

    def _apply_tables(self, plan: StepPlan) -> None:
        assert len(plan.tables) in (0, len(self.groups))
        for group, update in enumerate(plan.tables):
            if update is None:
                continue
            assert len(update.slots) == len(update.columns) == len(update.block_ids) > 0
            for slot, column, block in zip(
                update.slots.tolist(), update.columns.tolist(), update.block_ids.tolist(), strict=True
            ):
                assert slot in self.slots, f"table entry for slot {slot}, which nobody has"
                assert 0 <= block < self.groups[group].num_blocks
                self.slots[slot].tables[group][column] = block

    def _apply_copies(self, plan: StepPlan) -> None:
        assert len(plan.block_copies) in (0, len(self.groups))
        for group, copies in enumerate(plan.block_copies):
            if copies is None:
                continue
            pairs = copies.tolist()
            targets = [target for _, target in pairs]
            assert len(set(targets)) == len(targets), "two copies into one block"
            assert 0 not in targets
            content = {target: dict(self.blocks[group].get(source, {})) for source, target in pairs}
            for k, (source, target) in enumerate(pairs):
                assert source not in targets[:k], f"block {source} is read after {targets[:k]} were written"
                self.blocks[group][target] = content[target]
            self.num_copies += len(pairs)

    def _apply_rows(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        if plan.rows is None:
            assert plan.num_scheduled_tokens is None
            assert self.rows, "a step without rows"
            rows, counts, num_decodes = self.rows, [1] * len(self.rows), len(self.rows)
        else:
            assert plan.num_scheduled_tokens is not None
            rows, counts, num_decodes = plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), plan.num_decodes
        assert rows
        assert len(set(rows)) == len(rows), f"a slot has two rows: {rows}"
        assert all(slot in self.slots for slot in rows), f"rows {rows}, slots {sorted(self.slots)}"
        assert all(count > 0 for count in counts)
        assert sum(counts) <= self.token_budget, f"{sum(counts)} tokens scheduled, the budget is {self.token_budget}"
        assert [count <= self.decode_query_len for count in counts] == [i < num_decodes for i in range(len(rows))], (
            f"decodes come first: {counts}, num_decodes {num_decodes}"
        )
        self.rows = rows
        return rows, counts

    def _apply_drafts(self, plan: StepPlan, rows: list[int]) -> dict[int, list[int]]:
        if plan.drafts is None:
            return {}
        ends = np.cumsum(plan.drafts.counts)
        assert len(set(plan.drafts.rows.tolist())) == len(plan.drafts.rows)
        assert len(plan.drafts.token_ids) == ends[-1]
        drafts = {}
        for row, end, count in zip(plan.drafts.rows.tolist(), ends.tolist(), plan.drafts.counts.tolist(), strict=True):
            assert 0 < count < self.decode_query_len
            drafts[row] = plan.drafts.token_ids[end - count : end].tolist()
            slot = self.slots[rows[row]]
            assert slot.num_computed == len(slot.tokens) - 1, "drafts follow the last known token"
            slot.tokens += drafts[row]
            slot.prints = fingerprints(slot.tokens, slot.salt)
        return drafts

    def _note_holders(self, running: Collection[int]) -> None:
        """Who has which block: (pool, block) → (slot, group)."""
        self.holders: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for number in running:
            for group, info in enumerate(self.groups):
                table = self.slots[number].tables[group]
                for block in table[table > 0].tolist():
                    self.holders.setdefault((info.pool_id, block), set()).add((number, group))

    def _write(self, group: int, slot: Slot, count: int) -> None:
        info = self.groups[group]
        begin, end = max(slot.num_computed, slot.new.num_cached_tokens), slot.num_computed + count
        assert end <= len(slot.tokens), f"{end} positions to compute, {len(slot.tokens)} tokens known"
        if isinstance(info.spec, RecurrentState):
            return
        for position in range(begin, end):
            block = int(slot.tables[group][position // info.block_size])
            assert block != 0, f"position {position} of {slot.new.request_id} would be written to the null block"
            self._check_sole_holder(info, block, slot)
            self.blocks[group].setdefault(block, {})[position % info.block_size] = slot.prints[position]
            self.num_written += 1

    def _check_sole_holder(self, info: KVGroupInfo, block: int, slot: Slot) -> None:
        holders = self.holders[info.pool_id, block]
        assert len(holders) == 1, (
            f"block {block} is written by {slot.new.request_id} but held by (slot, group) {sorted(holders)}"
        )

    def _run(self, number: int, count: int, drafts: list[int]) -> list[int]:
        """Read what the row's queries see, move on, and sample if the row reaches the last token known."""
        slot = self.slots[number]
        begin, end = slot.num_computed, slot.num_computed + count
        for group, info in enumerate(self.groups):
            if isinstance(info.spec, RecurrentState):
                self._run_recurrent(group, info, slot, begin, end)
                continue
            lowest = max(0, begin - info.spec.window + 1) if isinstance(info.spec, SlidingWindow) else 0
            for position in range(lowest, end):
                block = int(slot.tables[group][position // info.block_size])
                got = self.blocks[group].get(block, {}).get(position % info.block_size) if block else None
                assert got == slot.prints[position], (
                    f"group {group}: position {position} of {slot.new.request_id}[{slot.new.index}] isn't in block {block}"
                )
        slot.num_computed = end
        if end < len(slot.tokens):
            return []
        return self._sample(slot, drafts)

    def _run_recurrent(self, group: int, info: KVGroupInfo, slot: Slot, begin: int, end: int) -> None:
        block = int(slot.tables[group][0])
        assert block != 0
        self._check_sole_holder(info, block, slot)
        assert (end - 1) // info.block_size == begin // info.block_size, f"row {begin}…{end} crosses a checkpoint"
        if begin > 0:
            got = self.blocks[group].get(block, {}).get(0)
            assert got == slot.prints[begin - 1], f"state of {slot.new.request_id} isn't the one after {begin} tokens"
        self.blocks[group][block] = {0: slot.prints[end - 1]}

    def _sample(self, slot: Slot, drafts: list[int]) -> list[int]:
        base = len(slot.tokens) - len(drafts)
        out: list[int] = []
        room = min(slot.new.num_prompt_tokens + (slot.new.sampling.max_tokens or MASK), self.max_model_len)
        assert len(slot.tokens) < room, f"{slot.new.request_id} would get more than {room} tokens"
        for k in range(len(drafts) + 1):
            num_output = base + k - slot.new.num_prompt_tokens
            banned = forbidden_ids(slot.new.sampling, slot.new.eos_token_ids, num_output)
            token = self.model.next_token(slot.tokens[: base + k], slot.prints[base + k - 1], slot.new.index, banned)
            out.append(token)
            if k < len(drafts) and drafts[k] != token:
                break
        slot.tokens = slot.tokens[:base] + out
        slot.prints = fingerprints(slot.tokens, slot.salt)
        slot.num_computed = len(slot.tokens) - 1
        return out
