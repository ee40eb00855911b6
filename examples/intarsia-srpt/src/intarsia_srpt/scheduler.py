"""The scheduler `srpt`: the shortest remaining processing time first (Schrage 1968), with ageing.

What remains of a request is known as a bound: its prompt, and what `max_tokens` allows it to say. A step is filled in
this order, within the token budget:

1. Answers in progress: a token each, and drafts as far as budget and free pages go. Where pages run out, the last in
   turn that has no row in this step is preempted.
2. Prompts in the order of their turn, whether they wait or have begun: a short one that has just come goes before the
   next chunk of a long one. One that waits enters if there is room for all of it; where the first has none, nobody
   behind it enters.

Nobody waits for ever: `Turns` says who can be before a sequence, which is a bounded number. Those before it that run
get their pages from others, the first in turn always, and end; then it is the first itself, and room for it is kept.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import merge
from typing import Literal

from attrs import define, field

from intarsia.errors import OverloadedError
from intarsia.protocols import CacheAllocator, HeldSequence, PartContext, SequenceView, SwappingAllocator
from intarsia.types import BatchPlan, Entered, Row, RowResult, SequenceId, Want
from intarsia_srpt.options import SrptOptions
from intarsia_srpt.turns import Entry, Turns


@define
class _Step:
    """A plan in the making."""

    budget: int
    rows: dict[SequenceId, Row] = field(factory=dict)
    preempted: list[SequenceId] = field(factory=list)
    entered: list[Entered] = field(factory=list)


@define(eq=False)
class SrptScheduler:
    """Fills every step anew, the shortest remaining first."""

    options: SrptOptions
    allocator: CacheAllocator
    turns: Turns
    _waiting: list[Entry] = field(factory=list, init=False)  # in the order of their turn
    _running: dict[SequenceId, Entry] = field(factory=dict, init=False)
    _left: list[SequenceId] = field(factory=list, init=False)
    _arrivals: int = field(default=0, init=False)
    _steps: int = field(default=0, init=False)

    # --- coming and going -------------------------------------------------------------------------------------------

    def add(self, sequence: SequenceView) -> None:
        """Queue a sequence."""
        if len(self._waiting) >= self.options.max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} sequences are waiting, the most that scheduler.max_waiting allows",
                retry_after_s=1.0,
            )
        self._arrivals += 1
        self._wait(Entry(sequence, self._arrivals, self._steps))

    def _wait(self, entry: Entry) -> None:
        insort(self._waiting, entry, key=self.turns.of)

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence, waiting or running."""
        if self._running.pop(sequence_id, None) is None:
            entry = next((e for e in self._waiting if e.sequence.sequence_id == sequence_id), None)
            if entry is None:
                return
            self._waiting.remove(entry)
        # One that waits can have pages in host memory.
        self.allocator.release(sequence_id)
        self._left.append(sequence_id)

    @property
    def num_waiting(self) -> int:
        """Sequences that have no pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    # --- replacing another, and being replaced ------------------------------------------------------------------------

    def held(self) -> list[HeldSequence]:
        """Return those that run and those that wait, each in the order of their turn; here all steps age a sequence."""
        return [self._held(entry, "device") for entry in self._in_turn()] + [
            self._held(entry, "host" if entry.is_swapped else "none") for entry in self._waiting
        ]

    def _held(self, entry: Entry, pages: Literal["device", "host", "none"]) -> HeldSequence:
        return HeldSequence(
            sequence=entry.sequence,
            pages=pages,
            num_computed=entry.computed,
            drafts=entry.drafts,
            num_waited=self._steps - entry.step,
        )

    def take_over(self, held: Sequence[HeldSequence]) -> set[SequenceId]:
        """Run those that ran, as many as may, and queue the others; what they have waited counts."""
        could_run = [one.sequence.sequence_id for one in held if one.pages == "device"]
        runs = set(could_run[: self.options.max_batch])
        num_waiting = len(held) - len(runs)
        if num_waiting > self.options.max_waiting:
            raise OverloadedError(
                f"{num_waiting} sequences would wait, and scheduler.max_waiting allows {self.options.max_waiting}",
                retry_after_s=1.0,
            )
        for one in held:
            self._arrivals += 1
            entry = Entry(one.sequence, self._arrivals, -one.num_waited, is_swapped=one.pages == "host")
            if one.sequence.sequence_id in runs:
                entry.computed = entry.furthest = one.num_computed
                entry.drafts = one.drafts
                self._running[one.sequence.sequence_id] = entry
            else:
                self._wait(entry)
        return runs | {one.sequence.sequence_id for one in held if one.pages == "host"}

    # --- the step ---------------------------------------------------------------------------------------------------

    def plan(self) -> BatchPlan:
        """Fill a step."""
        self._steps += 1
        step = _Step(self.options.max_tokens)
        decoding = [entry for entry in self._in_turn() if entry.num_unrun == 1]
        for place, entry in enumerate(decoding, start=1):
            self._decode(entry, step, num_behind=len(decoding) - place)
        self._run_prompts(step)
        left, self._left = tuple(self._left), []
        return BatchPlan(
            rows=tuple(step.rows.values()),
            preempted=tuple(step.preempted),
            entered=tuple(step.entered),
            left=left,
            moves=self.allocator.take_moves(),
        )

    def update(self, plan: BatchPlan, results: Sequence[RowResult]) -> None:
        """Note how far each sequence is, and give back slots of rejected drafts."""
        for row, result in zip(plan.rows, results, strict=True):
            entry = self._running.get(row.sequence_id)
            if entry is None:
                continue
            entry.computed = entry.sequence.num_computed
            entry.furthest = max(entry.furthest, entry.computed)
            entry.drafts = result.drafts
            if entry.computed < row.start + len(row.token_ids):
                self.allocator.rewind(row.sequence_id, entry.computed)

    def _in_turn(self) -> list[Entry]:
        return sorted(self._running.values(), key=self.turns.of)

    def _is_running(self, entry: Entry) -> bool:
        return self._running.get(entry.sequence.sequence_id) is entry

    def _decode(self, entry: Entry, step: _Step, num_behind: int) -> None:
        """Add a row of one token and its drafts, which leave a token to each of those behind."""
        if not step.budget or not self._is_running(entry):
            return
        drafts, entry.drafts = entry.drafts[: max(0, step.budget - 1 - num_behind)], ()
        if drafts and not self._reserve(entry, entry.computed + 1 + len(drafts)):
            drafts = ()  # they preempt nobody
        if self._secure(entry, entry.computed + 1 + len(drafts), step):
            self._put(entry, 1, drafts, step)

    def _run_prompts(self, step: _Step) -> None:
        """Add rows of prompts that have begun, and of those that enter, the shortest first."""
        begun = [entry for entry in self._in_turn() if entry.num_unrun > 1]
        admits = True
        for entry in merge(begun, list(self._waiting), key=self.turns.of):
            if not step.budget:
                return
            if not self._is_running(entry):
                # Pages that somebody has just lost are not for others.
                admits = admits and not step.preempted and self._enter(entry, step)
                if not admits:
                    continue
            chunk = min(entry.num_unrun, step.budget)
            if self._secure(entry, entry.computed + chunk, step):
                self._put(entry, chunk, (), step)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _reserve(self, entry: Entry, num_tokens: int) -> bool:
        sequence = entry.sequence
        known, salt = sequence.token_ids, sequence.salt
        return self.allocator.reserve(sequence.sequence_id, known, num_tokens, salt) is not None

    def _enter(self, entry: Entry, step: _Step) -> bool:
        """Let a waiting sequence run, if there is room for all of its known tokens."""
        if len(self._running) >= self.options.max_batch:
            return False
        sequence = entry.sequence
        known = sequence.token_ids
        computed = self.allocator.reserve(sequence.sequence_id, known, len(known), sequence.salt)
        if computed is None:
            return False
        self._waiting.remove(entry)
        self._running[sequence.sequence_id] = entry
        entry.computed, entry.is_swapped = computed, False
        step.entered.append(sequence.entered())
        return True

    def _secure(self, entry: Entry, num_tokens: int, step: _Step) -> bool:
        """Get pages for a running sequence, from others or, at last, by giving up its own."""
        while not self._reserve(entry, num_tokens):
            free = [e for sequence_id, e in self._running.items() if sequence_id not in step.rows]
            victim = max(free, key=self.turns.of)
            self._preempt(victim, step)
            if victim is entry:
                return False
        return True

    def _preempt(self, entry: Entry, step: _Step) -> None:
        sequence_id, allocator = entry.sequence.sequence_id, self.allocator
        entry.is_swapped = isinstance(allocator, SwappingAllocator) and allocator.swap_out(sequence_id)
        if not entry.is_swapped:
            allocator.release(sequence_id)
        del self._running[sequence_id]
        entry.computed, entry.drafts = 0, ()
        step.preempted.append(sequence_id)
        self._wait(entry)

    def _put(self, entry: Entry, num_tokens: int, drafts: tuple[int, ...], step: _Step) -> None:
        """Add a row."""
        sequence, start = entry.sequence, entry.computed
        known, stop = len(sequence.token_ids), start + num_tokens
        step.budget -= num_tokens + len(drafts)
        step.rows[sequence.sequence_id] = Row(
            sequence_id=sequence.sequence_id,
            token_ids=(*sequence.token_ids[start:stop], *drafts),
            start=start,
            num_drafts=len(drafts),
            # The step itself brings a token besides its drafts, and the last token of all needs no slot.
            drafts_wanted=max(0, sequence.max_total - known - 2 - len(drafts)) if stop == known else 0,
            want=Want.LAST if stop == known else Want.NONE,
            pages=self.allocator.pages(sequence.sequence_id),
        )


def build(context: PartContext) -> SrptScheduler:
    """Make the scheduler over the cache's books."""
    max_len = context.engine.max_model_len or context.spec.max_len
    return SrptScheduler(context.options, context.parts["cache"], Turns(context.options.ageing, max_len))
