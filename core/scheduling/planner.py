"""`Planner`: the next step, as a difference to the last one."""

from __future__ import annotations

import numpy as np

from octavo.core.api.scheduling import IntArray, NewRequest, StartedRequest, StepPlan
from octavo.core.config.scheduler import SchedulerConfig
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.scheduling.admission import Admission
from octavo.core.scheduling.drafts import Drafter
from octavo.core.scheduling.flight import Flight, PlannedStep
from octavo.core.scheduling.grants import share_budget
from octavo.core.scheduling.roster import Roster


class Planner:
    """`repeat` where nothing has changed, else `replan`.

    Rows of one kind keep the order in which their completions got in, so that rows change only when somebody comes or goes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        roster: Roster,
        admission: Admission,
        flight: Flight,
        drafter: Drafter | None,
    ) -> None:
        self._config = config
        self._kv = kv
        self._roster = roster
        self._arrays = roster.arrays
        self._admission = admission
        self._flight = flight
        self._drafter = drafter
        self._budget = config.max_num_batched_tokens
        self._decode_query_len = 1 + (config.num_speculative_tokens if drafter else 0)
        self._rows: IntArray = np.zeros(0, np.int32)  # those of the last plan
        self._repeatable = False  # they all decoded one token, and all were sampled
        self.num_scheduled_tokens = 0
        self.num_drafts = 0

    def repeat(self) -> StepPlan | None:
        """The last step again, one token a row. None if anything differs."""
        if not self._repeatable or self._roster.changed or self._admission.may_admit(self._flight.num_planned):
            return None
        rows, arrays = self._rows, self._arrays
        ends = arrays.num_tokens[rows]
        if len(self._flight) and (ends >= arrays.limit[rows]).any():  # its last token is being sampled
            return None
        due = ends > self._kv.event_at[rows]
        if np.count_nonzero(due) and not self._kv.extend_decodes(rows[due], ends[due]):
            return None
        arrays.num_computed[rows] = ends
        arrays.num_tokens[rows] = ends + 1
        tables, copies = self._kv.take_changes()
        plan = StepPlan(
            step=self._flight.num_planned, released=self._roster.take_released(), tables=tables, block_copies=copies
        )
        self._launch(PlannedStep(plan.step, rows), len(rows))
        return plan

    def replan(self) -> StepPlan | None:
        """A step from scratch: running rows within the budget and the blocks there are, then waiting requests."""
        while True:
            preemptions = self._roster.num_preemptions
            slots, counts, held_back = self._grant()
            slots, counts = self._secure_blocks(slots, counts)
            preempted = self._roster.num_preemptions > preemptions
            if not (preempted or held_back):
                new_slots, new_counts = self._admission.admit(self._budget - int(counts.sum()), slots, counts)
                slots, counts = np.append(slots, new_slots), np.append(counts, new_counts)
            if len(slots):
                return self._issue(*self._decodes_first(slots, counts))
            if len(self._flight) or not (preempted or self._preempt_parked()):
                return None

    def _preempt_parked(self) -> bool:
        """Nothing runs while parked completions hold what those that wait need: take it from one. False if there is none."""
        if not (len(self._roster) and len(self._roster.waiting)):
            return False
        self._roster.preempt(self._roster.choose_victim())
        return True

    def _grant(self) -> tuple[IntArray, IntArray, bool]:
        """Running slots that have something to compute, how many tokens each gets, and whether a prompt that has to be
        computed whole found too little budget: others that come meanwhile mustn't take it away again.
        """
        slots, arrays = self._roster.order, self._arrays
        computed = arrays.num_computed[slots]
        wanted = np.minimum(arrays.num_tokens[slots], arrays.limit[slots] - 1) - computed
        wanted[arrays.parked[slots]] = 0
        if self._drafter is not None:
            wanted = self._drafter.propose(slots, wanted)
        granted = share_budget(
            wanted,
            computed,
            budget=self._budget,
            decode_query_len=self._decode_query_len,
            long_prefill_token_threshold=self._config.long_prefill_token_threshold,
            chunked=self._config.enable_chunked_prefill,
            edges=self._kv.chunk_edges,
        )
        kept = granted > 0
        held_back = not self._config.enable_chunked_prefill and bool((wanted[~kept] > 0).any())
        return slots[kept], granted[kept].astype(np.int32), held_back

    def _secure_blocks(self, slots: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Get every row its blocks. Too few: drop the drafts, leave out rows that wait for steps in flight, else preempt."""
        kv, arrays = self._kv, self._arrays
        while len(slots):
            computed = arrays.num_computed[slots]
            starts = np.maximum(computed, arrays.num_cached[slots])
            ends = np.maximum(computed + counts, starts)
            due = np.flatnonzero(ends > kv.event_at[slots])
            if not len(due):
                break
            kv.trim(slots[due], computed[due])
            if kv.try_extend(slots[due], starts[due], ends[due]):
                break
            if self._drafter is not None and (drafts := self._drafter.counts(slots, counts)).any():
                counts = counts - drafts
                self._drafter.forget()
                continue
            demand = kv.demand(slots[due], starts[due], ends[due])
            if (demand.sum(axis=1) <= kv.num_free + kv.num_limbo).all():
                late = due[(np.cumsum(demand, axis=1) > kv.num_free[:, None]).any(axis=0)]
                kept = np.delete(np.arange(len(slots)), late)
            else:
                victim = self._roster.choose_victim()
                kept = np.flatnonzero(slots != victim.slot)
                self._roster.preempt(victim)
            slots, counts = slots[kept], counts[kept]
        return slots, counts

    def _decodes_first(self, slots: IntArray, counts: IntArray) -> tuple[IntArray, IntArray, int]:
        """Rows in their final order, and how many of them are decodes."""
        prefill = counts > self._decode_query_len
        num_decodes = len(slots) - int(np.count_nonzero(prefill))
        if num_decodes < len(slots):
            order = np.argsort(prefill, kind="stable")
            slots, counts = slots[order], counts[order]
        return slots, counts, num_decodes

    def _issue(self, slots: IntArray, counts: IntArray, num_decodes: int) -> StepPlan:
        """Count the rows' tokens as computed, commit the blocks they fill, and say what is new."""
        arrays, roster, kv = self._arrays, self._roster, self._kv
        new = roster.announce()
        drafts = np.zeros_like(counts) if self._drafter is None else self._drafter.counts(slots, counts)
        computed = arrays.num_computed[slots] + counts
        samples = computed - drafts == arrays.num_tokens[slots]
        arrays.num_computed[slots] = computed
        arrays.num_tokens[slots[samples]] += 1
        one_each = bool((counts == 1).all())
        repeats = one_each and np.array_equal(slots, self._rows)
        self._rows, roster.changed = slots, False
        self._repeatable = one_each and bool(samples.all()) and self._drafter is None
        tables, copies = kv.take_changes()
        plan = StepPlan(
            step=self._flight.num_planned, released=roster.take_released(), new=new, tables=tables, block_copies=copies
        )
        if not repeats:
            plan.rows, plan.num_scheduled_tokens, plan.num_decodes = slots, counts, num_decodes
        if self._drafter is not None:
            plan.drafts = self._drafter.message(slots, drafts)
            self.num_drafts += int(drafts.sum())
        roster.commit_computed(slots, computed)
        self._after_prompt(slots[samples])
        self._launch(PlannedStep(plan.step, slots, None if samples.all() else samples, _started(new)), int(counts.sum()))
        return plan

    def _after_prompt(self, sampled: IntArray) -> None:
        """Further completions start when the prompt is computed; a stepwise completion stops after each token."""
        for slot in sampled[self._arrays.special[sampled]].tolist():
            state = self._roster.state(slot)
            if state.forks:
                self._admission.fork_prompt(state)
            if state.request.stepwise:
                self._roster.park(state)

    def _launch(self, step: PlannedStep, num_tokens: int) -> None:
        self._flight.launch(step)
        self.num_scheduled_tokens += num_tokens


def _started(new: list[NewRequest]) -> list[StartedRequest]:
    return [
        StartedRequest(slot=m.slot, request_id=m.request_id, index=m.index, num_cached_tokens=m.num_cached_tokens) for m in new
    ]
