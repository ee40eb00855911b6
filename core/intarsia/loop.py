"""The step loop, and the sequences that it runs.

::

    Scheduler.plan() -> BatchPlan -> Executor.submit / collect -> StepResult
        -> Sequence.accept -> CacheAllocator.commit -> Scheduler.update -> Output
"""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as SequenceABC

from attrs import define, field

from intarsia.errors import ExecutionError, OverloadedError
from intarsia.flight import Flight, Step, is_empty
from intarsia.lookahead import Lookahead, look_ahead
from intarsia.observers import Observers
from intarsia.outbox import Outbox
from intarsia.preemption import Preemption
from intarsia.protocols import Parts
from intarsia.seams import Seam, Seams
from intarsia.sequence import Sequence
from intarsia.speculation import Speculation
from intarsia.types import BatchPlan, Output, SequenceId, StepResult

#: Plans without rows, one after another, that say that a scheduler is stuck.
_STALLED = 100


@define(eq=False)
class StepLoop:
    """Runs sequences on an engine's parts, step by step.

    Attributes:
        parts: what runs them; see `adopt`.
        sequences: those that are not finished.
        seams: where it calls its parts.
        counts: steps and tokens so far.
        speculation, preemption: figures.
        known: sequences that the executor knows.
        parked: those that a scheduler had no room for as it took all back; they enter once it has.
        planned: a step that a scheduler planned as it took over, not submitted yet.
        closed: why nothing more runs; None while it does.
    """

    parts: Parts
    _observers: Observers
    _outbox: Outbox
    sequences: dict[SequenceId, Sequence] = field(factory=dict, init=False)
    #: the same by request, so that asking for one takes no longer where there are many
    _groups: dict[str, list[Sequence]] = field(factory=dict, init=False)
    seams: Seams = field(init=False)
    counts: dict[str, int] = field(init=False)
    speculation: Speculation = field(factory=Speculation, init=False)
    preemption: Preemption = field(init=False)
    known: set[SequenceId] = field(factory=set, init=False)
    parked: list[Sequence] = field(factory=list, init=False)
    planned: Step | None = field(default=None, init=False)
    closed: str | None = field(default=None, init=False)
    _lookahead: Lookahead = field(init=False)
    _flight: Flight = field(factory=Flight, init=False)
    _stalled: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.seams = Seams(self._observers.times, self._give_up)
        self.counts = dict.fromkeys(("steps", "prompt_tokens", "generated_tokens", "discarded_rows"), 0)
        with self.seams.ask(self.parts, "executor", "depth"):
            self._lookahead = look_ahead(self.parts)
        self.preemption = Preemption(self.parts.cache)

    # --- who runs ---------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to run or to collect."""
        return not (self.sequences or self.is_flying)

    @property
    def is_flying(self) -> bool:
        """Whether steps are to be collected."""
        return bool(self._flight or self.planned)

    def of(self, request_id: str) -> list[Sequence]:
        """Return the unfinished sequences of a request."""
        return list(self._groups.get(request_id, ()))

    def has(self, request_id: str) -> bool:
        """Whether a request is not finished."""
        return request_id in self._groups

    def in_turn(self) -> list[Sequence]:
        """Return the scheduler's: those that ran before the others, each in the order of its arrival."""
        mine = [sequence for sequence in self.sequences.values() if sequence not in self.parked]
        return sorted(mine, key=lambda sequence: sequence.started is None)

    def enter(self, group: SequenceABC[Sequence]) -> None:
        """Hand a request's sequences to the scheduler: all of them, or none."""
        if self.parked:
            raise OverloadedError(f"{len(self.parked)} sequences wait for room in the scheduler", retry_after_s=1.0)
        try:
            for sequence in group:
                with self.seams.ask(self.parts, "scheduler", "add", sequence.request.request_id):
                    self.parts.scheduler.add(sequence)
                self.sequences[sequence.sequence_id] = sequence
                self._groups.setdefault(sequence.request.request_id, []).append(sequence)
        except BaseException:
            for sequence in group:
                self.remove(sequence)
            raise
        self.counts["prompt_tokens"] += group[0].num_prompt

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, in whatever state."""
        if self.closed is None:
            with self.answerable("scheduler", "remove", sequence.request.request_id):
                self.parts.scheduler.remove(sequence.sequence_id)
        self.parked = [other for other in self.parked if other is not sequence]
        if self.sequences.pop(sequence.sequence_id, None) is not None:
            group = self._groups[sequence.request.request_id]
            group.remove(sequence)
            if not group:
                del self._groups[sequence.request.request_id]

    # --- the step ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Fill the flight and collect the oldest step; return whether there was one."""
        while len(self._flight) < self._lookahead.depth and self._launch():
            pass
        if not self._flight:
            return False
        self._land()
        if not (self.sequences or self._flight):
            self.rest()
        return True

    def _launch(self) -> bool:
        """Plan a step and submit it; return whether it has rows."""
        step, self.planned = self.planned, None
        if step is None:
            self._add_parked()
            with self.answerable("scheduler", "plan"):
                step = self.begin(self.parts.scheduler.plan(), time.perf_counter())
        plan = step.plan
        if is_empty(plan):
            return False
        with self.answerable("executor", "a step"):
            self.parts.executor.submit(plan)
        self._flight.add(step)
        return bool(plan.rows)

    def _land(self) -> None:
        """Collect the oldest step in flight; let its sequences take what it brought, those that are still there."""
        with self.answerable("executor", "a step"):
            result = self.parts.executor.collect()
        step = self._flight.take()  # not before: an interrupted `collect` leaves the step where it is
        self.seams.take(self.parts, result)
        if not step.plan.rows:
            return
        plan, result = step.brought(result, self._is_live)
        outputs = self._accept(plan, result)
        self.counts["steps"] += 1
        self.counts["discarded_rows"] += len(step.plan.rows) - len(plan.rows)
        self.speculation.count(plan, result)
        if self.preemption.observe(step.plan, result):
            with self.answerable("cache", "price"):
                self.preemption.tell()
        seconds = self._flight.seconds(step)
        # Kept before anybody is told: an observer that cancels, or runs another request, puts its outputs behind these.
        self._outbox.keep(outputs)
        if self._observers.watches("step_finished"):
            self._observers.tell("step_finished", result=result, outputs=tuple(outputs), seconds=seconds)
        self._outbox.tell(outputs)

    def _is_live(self, sequence: Sequence) -> bool:
        return self.sequences.get(sequence.sequence_id) is sequence

    def begin(self, plan: BatchPlan, begun: float) -> Step:
        """Take note of a plan that is about to run."""
        self._check_progress(plan)
        self.preemption.begin(plan, lambda sequence_id: self.sequences[sequence_id].num_computed)
        for sequence_id in plan.preempted:
            self.sequences[sequence_id].num_computed = 0
        sequences = tuple([self.sequences[row.sequence_id] for row in plan.rows])
        for row, sequence in zip(plan.rows, sequences, strict=True):
            if sequence.started is None:
                sequence.begin(row, begun)
        self.known.difference_update(plan.left)
        self.known.update([entered.sequence_id for entered in plan.entered])
        if self._lookahead.depth > 1 and not is_empty(plan):
            self.parts.scheduler.expect(plan, names_pending=self._lookahead.names_pending)  # type: ignore[attr-defined]
        return Step(plan, sequences, begun)

    def _accept(self, plan: BatchPlan, result: StepResult) -> list[Output]:
        """Let each sequence take its tokens, then tell the cache's books and the scheduler."""
        now, num_tokens = time.perf_counter(), 0
        outputs = []
        sequences = [self.sequences[row.sequence_id] for row in plan.rows]
        for sequence, row, row_result in zip(sequences, plan.rows, result.rows, strict=True):
            output = sequence.accept(row, row_result, now)
            if output is not None:
                outputs.append(output)
                num_tokens += len(output.token_ids)
        self.counts["generated_tokens"] += num_tokens
        commit = self.parts.cache.commit
        with self.answerable("cache", "commit") as seam:
            for sequence, row_result in zip(sequences, result.rows, strict=True):
                seam.request_id = row_result.sequence_id[0]
                if row_result.error is None:
                    commit(sequence.sequence_id, sequence.token_ids, sequence.num_computed)
        with self.answerable("scheduler", "update"):
            self.parts.scheduler.update(plan, result.rows)
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self.remove(sequence)
        return outputs

    def rest(self) -> None:
        """Nothing is left to run: collect what nobody waits for, and do the cache work that is due."""
        if self.closed is not None:
            return
        self.collect_all()
        with self.answerable("cache", "take_moves"):
            moves = self.parts.cache.take_moves()
        if moves:
            self.run_aside(BatchPlan(moves=moves))

    def collect_all(self) -> None:
        """Let nothing be in flight."""
        while self.planned or self._flight:
            if self.planned:
                self._launch()
            if self._flight:
                self._land()

    def run_aside(self, plan: BatchPlan) -> None:
        """Run a plan without rows, with nothing in flight."""
        with self.answerable("executor", "cache work"):
            self.parts.executor.submit(plan)
            self.parts.executor.collect()

    # --- other parts ------------------------------------------------------------------------------------------------

    def adopt(self, parts: Parts) -> None:
        """Run on these parts from here on; nothing is in flight."""
        self.parts = parts
        self._lookahead = look_ahead(parts)
        self._stalled = 0

    def take_back(self) -> None:
        """Give all sequences to a scheduler that has none; those that it has no room for enter later."""
        self.parked = [*self.in_turn(), *self.parked]
        self._add_parked()

    def _add_parked(self) -> None:
        """Add as many of those that wait outside as the scheduler has room for."""
        while self.parked:
            sequence = self.parked[0]
            with self.answerable("scheduler", "add", sequence.request.request_id):
                try:
                    self.parts.scheduler.add(sequence)
                except OverloadedError:
                    return
            del self.parked[0]

    def give_back(self, kept: Collection[SequenceId]) -> None:
        """Take the pages of all other sequences, and tell the executor of those that it knows no more."""
        lost = [name for name, sequence in self.sequences.items() if name not in kept and sequence.num_computed]
        left = tuple(self.known.difference(kept))
        self.known.intersection_update(kept)
        self.preemption.begin(BatchPlan(left=left, preempted=tuple(lost)), lambda n: self.sequences[n].num_computed)
        with self.answerable("cache", "release"):
            for name, sequence in self.sequences.items():
                if name not in kept:
                    self.parts.cache.release(name)
                    sequence.num_computed = 0
        if left:
            self.run_aside(BatchPlan(left=left))

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def answerable(self, slot: str, doing: str, request_id: str | None = None) -> Seam:
        """Return the block of a call in the middle of a step: what fails there is named, and closes the engine."""
        return self.seams.step(self.parts, slot, doing, request_id)

    def _give_up(self, why: str) -> None:
        self.closed = self.closed or why

    def _check_progress(self, plan: BatchPlan) -> None:
        """With nothing in flight, a scheduler that plans nothing while sequences wait will wait for ever."""
        self._stalled = 0 if plan.rows or self._flight or not self.sequences else self._stalled + 1
        if self._stalled >= _STALLED:
            key = self.parts.selection("scheduler").provider.key
            raise ExecutionError(
                f"scheduler {key!r} planned nothing in {_STALLED} steps, while {len(self.sequences)} sequences wait"
            )

    def check_open(self) -> None:
        """Raise ExecutionError where nothing more can run."""
        if self.closed is not None:
            raise ExecutionError(f"the engine can run nothing more: {self.closed}")

    def close(self, why: str) -> None:
        """Drop everything, and run nothing more."""
        self.closed, self.planned = why, None
        self._flight.clear()
        self.sequences.clear()
        self.parked.clear()
        self._groups.clear()
