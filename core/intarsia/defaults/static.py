"""Static batching: a batch is filled, runs until its last sequence is finished, and only then is the next one filled.

The "before" of in-flight batching: a short answer's place stays empty until the longest answer of its batch is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import Factory, define, field, frozen
from attrs.validators import ge

from intarsia.errors import OverloadedError
from intarsia.protocols import CacheAllocator, HeldSequence, PartContext, SequenceView
from intarsia.types import BatchPlan, Entered, Row, RowResult, SequenceId, Want


@frozen(kw_only=True)
class StaticOptions:
    """Options of static batching."""

    #: sequences a batch
    max_batch: int = field(default=8, validator=ge(1))
    #: sequences that may wait; beyond it a request is answered with an overload error
    max_waiting: int = field(default=4096, validator=ge(1))


@define
class StaticScheduler:
    """Runs one batch at a time: whole prompts in its first step, then a token (and its drafts) a sequence a step."""

    options: StaticOptions
    allocator: CacheAllocator
    _waiting: deque[SequenceView] = Factory(deque)
    _running: dict[SequenceId, SequenceView] = Factory(dict)
    _cached: dict[SequenceId, int] = Factory(dict)  #: leading tokens that were found in the cache as a sequence began
    _drafts: dict[SequenceId, tuple[int, ...]] = Factory(dict)
    _left: list[SequenceId] = Factory(list)

    def add(self, sequence: SequenceView) -> None:
        """Queue a sequence, first come first served, higher priorities before lower ones."""
        if len(self._waiting) >= self.options.max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} sequences are waiting, the most that scheduler.max_waiting allows",
                retry_after_s=1.0,
            )
        self._queue(sequence)

    def _queue(self, sequence: SequenceView) -> None:
        behind = sum(sequence.priority <= other.priority for other in self._waiting)
        self._waiting.insert(behind, sequence)

    def plan(self) -> BatchPlan:
        """Run the batch on, or fill a new one where it is empty."""
        entered = () if self._running else self._fill()
        left, self._left = tuple(self._left), []
        rows = tuple(self._row(sequence) for sequence in self._running.values())
        return BatchPlan(rows=rows, entered=entered, left=left, moves=self.allocator.take_moves())

    def _fill(self) -> tuple[Entered, ...]:
        entered = []
        while self._waiting and len(self._running) < self.options.max_batch:
            sequence = self._waiting[0]
            # Room for the longest it can get, drafts included: nothing is ever preempted.
            known, salt = sequence.token_ids, sequence.salt
            cached = self.allocator.reserve(sequence.sequence_id, known, sequence.max_total, salt)
            if cached is None:
                break
            self._cached[sequence.sequence_id] = cached
            self._running[sequence.sequence_id] = self._waiting.popleft()
            entered.append(sequence.entered())
        return tuple(entered)

    def _row(self, sequence: SequenceView) -> Row:
        start = max(sequence.num_computed, self._cached[sequence.sequence_id])
        # The last token that a sequence can hold needs no slot, and each step adds one besides its drafts.
        room = max(0, sequence.max_total - len(sequence.token_ids) - 1)
        drafts = self._drafts.pop(sequence.sequence_id, ())[:room]
        return Row(
            sequence_id=sequence.sequence_id,
            token_ids=(*sequence.token_ids[start:], *drafts),
            start=start,
            num_drafts=len(drafts),
            drafts_wanted=max(0, room - len(drafts) - 1),
            want=Want.LAST,
            pages=self.allocator.pages(sequence.sequence_id),
        )

    def update(self, plan: BatchPlan, results: Sequence[RowResult]) -> None:
        """Keep the proposals for the next step."""
        del plan
        for result in results:
            if result.sequence_id in self._running and result.drafts:
                self._drafts[result.sequence_id] = result.drafts

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence, waiting or running."""
        self._drafts.pop(sequence_id, None)
        if self._running.pop(sequence_id, None) is not None:
            del self._cached[sequence_id]
            self._left.append(sequence_id)
            self.allocator.release(sequence_id)
            return
        self._waiting = deque(other for other in self._waiting if other.sequence_id != sequence_id)

    def held(self) -> list[HeldSequence]:
        """Return the batch, and those of later ones."""
        running = [
            HeldSequence(
                sequence=sequence,
                pages="device",
                num_computed=max(sequence.num_computed, self._cached[sequence_id]),
                drafts=self._drafts.get(sequence_id, ()),
            )
            for sequence_id, sequence in self._running.items()
        ]
        return running + [HeldSequence(sequence=sequence) for sequence in self._waiting]

    def take_over(self, held: Sequence[HeldSequence]) -> set[SequenceId]:
        """Make a batch of those that run, as many as it holds and as have room to their ends; queue the others."""
        could_run = sum(one.pages == "device" for one in held)
        num_waiting = len(held) - min(could_run, self.options.max_batch)
        if num_waiting > self.options.max_waiting:
            raise OverloadedError(
                f"{num_waiting} sequences would wait, and scheduler.max_waiting allows {self.options.max_waiting}",
                retry_after_s=1.0,
            )
        for one in held:
            if not (one.pages == "device" and len(self._running) < self.options.max_batch and self._keep(one)):
                self._queue(one.sequence)
        return set(self._running)

    def _keep(self, held: HeldSequence) -> bool:
        """Run a sequence on if there is room for the longest that it can get."""
        sequence = held.sequence
        cached = self.allocator.reserve(sequence.sequence_id, sequence.token_ids, sequence.max_total, sequence.salt)
        if cached is None:
            return False
        self._running[sequence.sequence_id] = sequence
        self._cached[sequence.sequence_id] = cached
        if held.drafts:
            self._drafts[sequence.sequence_id] = held.drafts
        return True

    @property
    def num_waiting(self) -> int:
        """Sequences of later batches."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences of this batch that are not finished."""
        return len(self._running)


def build(context: PartContext) -> StaticScheduler:
    """Bind the scheduler to the cache's books."""
    return StaticScheduler(context.options, context.parts["cache"])
