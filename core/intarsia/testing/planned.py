"""Plans made by hand: sequences, their pages and their rows, as an executor is given them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from attrs import define, field

from intarsia.protocols import Executor, Parts
from intarsia.testing.leftovers import calling
from intarsia.types import (
    PENDING,
    BatchPlan,
    CacheMove,
    Entered,
    Row,
    RowResult,
    SamplingParams,
    SequenceId,
    StepResult,
    Want,
)

__all__ = ["PlannedSequence", "Trial", "no_progress"]

#: Pages that a trial uses: few, so that each is used again soon.
_MOST_PAGES = 48


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing of an executor's start."""
    del what, done, total


@define(eq=False)
class PlannedSequence:
    """One choice of a request.

    Attributes:
        token_ids: prompt and accepted tokens.
        num_computed: how many of them are in the cache.
        num_run: how many of them have been run at least once.
        expected: tokens that steps in flight choose.
        logprobs, prompt_logprobs: what was told of them: (id, log-probability).
        drafts: what the drafter proposed after its last row.
        error: what its row failed with.
        entered: whether a plan has named it since it came, or was preempted.
    """

    sequence_id: SequenceId
    params: SamplingParams
    seed: int
    prompt: tuple[int, ...]
    token_ids: list[int]
    pages: list[int] = field(factory=list, init=False)
    num_computed: int = field(default=0, init=False)
    num_run: int = field(default=0, init=False)
    expected: int = field(default=0, init=False)
    logprobs: list[tuple[int, float]] = field(factory=list, init=False)
    prompt_logprobs: list[tuple[int, float]] = field(factory=list, init=False)
    drafts: tuple[int, ...] = field(default=(), init=False)
    error: str | None = field(default=None, init=False)
    entered: bool = field(default=False, init=False)

    @property
    def answer(self) -> list[int]:
        """What was accepted behind the prompt."""
        return self.token_ids[len(self.prompt) :]


@define(eq=False)
class Trial:
    """An executor that has started, and the engine's side of it: books of sequences and pages, and no scheduler.

    Attributes:
        in_flight: rows, and whose, of the plans that were submitted and not collected yet.
        results: of all steps so far.
    """

    parts: Parts
    executor: Executor
    sequences: dict[SequenceId, PlannedSequence] = field(factory=dict, init=False)
    in_flight: deque[tuple[tuple[Row, PlannedSequence], ...]] = field(factory=deque, init=False)
    results: list[StepResult] = field(factory=list, init=False)
    _free: list[int] = field(init=False)
    _left: list[SequenceId] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        count = min(_MOST_PAGES, self.parts.num_pages)
        # In no order that memory has.
        stride = next(step for step in range(count // 3 + 1, count + 2) if math.gcd(step, count) == 1)
        self._free = [page * stride % count for page in range(count)]

    def start(self) -> None:
        """Start the executor."""
        with calling("start"):
            self.executor.start(no_progress)

    # --- sequences --------------------------------------------------------------------------------------------------

    def add(
        self, name: str, prompt: Sequence[int], params: SamplingParams, *, choice: int = 0, seed: int = 7
    ) -> PlannedSequence:
        """Add a sequence; its first row's plan says that it has entered."""
        sequence_id = (name, choice)
        assert sequence_id not in self.sequences, "the suite uses an id twice"
        filled = params.filled(self.parts.sampling)
        made = self.sequences[sequence_id] = PlannedSequence(sequence_id, filled, seed, tuple(prompt), list(prompt))
        return made

    def take_pages(self, count: int) -> list[int]:
        """Take pages; those that were given back last come first."""
        assert count <= len(self._free), "the suite's pages are few"
        return [self._free.pop() for _ in range(count)]

    def give_pages(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        self._free += pages

    def preempt(self, *sequences: PlannedSequence) -> None:
        """Take sequences' pages; their next rows' plan says that they have entered, with what they had said by then."""
        for sequence in sequences:
            self.give_pages(sequence.pages)
            sequence.pages, sequence.num_computed, sequence.entered, sequence.drafts = [], 0, False, ()

    def leave(self, *sequences: PlannedSequence) -> None:
        """End sequences; the next plan says that they have left."""
        for sequence in sequences:
            self.give_pages(sequence.pages)
            sequence.pages = []
            del self.sequences[sequence.sequence_id]
            self._left.append(sequence.sequence_id)

    def leave_all(self) -> None:
        """End all sequences, in a plan of their own."""
        self.leave(*list(self.sequences.values()))
        self.step()

    # --- rows -------------------------------------------------------------------------------------------------------

    def row(
        self, sequence: PlannedSequence, count: int | None = None, *, drafts: Sequence[int] = (), wanted: int = 0
    ) -> Row:
        """Return the row of a sequence's next tokens.

        Args:
            sequence: whose.
            count: tokens of it; None is all that are not in the cache. If others follow, nothing is chosen.
            drafts: guesses behind them.
            wanted: drafts that may be proposed after the step.
        """
        start = sequence.num_computed
        stop = len(sequence.token_ids) if count is None else start + count
        ids = [*sequence.token_ids[start:stop], *drafts]
        if sequence.expected:
            assert count is None and not drafts, "drafts do not follow what is not known"
            start, ids = len(sequence.token_ids) - 1 + sequence.expected, [PENDING]
        self._make_room(sequence, start + len(ids))
        return Row(
            sequence_id=sequence.sequence_id,
            token_ids=tuple(ids),
            start=start,
            num_drafts=len(drafts),
            drafts_wanted=wanted,
            want=Want.LAST if stop == len(sequence.token_ids) else Want.NONE,
            pages=(tuple(sequence.pages),) * len(self.parts.layout.groups),
        )

    def _make_room(self, sequence: PlannedSequence, num_tokens: int) -> None:
        missing = -(-num_tokens // self.parts.layout.page_size) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.take_pages(missing)

    # --- steps ------------------------------------------------------------------------------------------------------

    def submit(self, *rows: Row, moves: Sequence[CacheMove] = (), left: Sequence[SequenceId] = ()) -> None:
        """Submit a plan of rows: what it says besides follows from the books. `left` names more that have left."""
        entered = []
        for row in rows:
            sequence = self.sequences[row.sequence_id]
            if not sequence.entered:
                sequence.entered = True
                entered.append(_entered(sequence))
            if row.want is Want.LAST:
                sequence.expected += 1
        # Who enters is named in another order than whose rows run.
        plan = BatchPlan(rows=rows, entered=tuple(reversed(entered)), left=(*self._left, *left), moves=tuple(moves))
        self._left = []
        with calling("submit"):
            self.executor.submit(plan)
        self.in_flight.append(tuple((row, self.sequences[row.sequence_id]) for row in rows))

    def collect(self) -> StepResult:
        """Collect the oldest step, check what every result must be, and let the sequences take what it brought."""
        planned = self.in_flight.popleft()
        with calling("collect"):
            result = self.executor.collect()
        assert isinstance(result, StepResult), f"collect returned {result!r:.80}, which is no StepResult"
        asked, brought = [row.sequence_id for row, _ in planned], [row.sequence_id for row in result.rows]
        assert brought == asked, f"the plan has rows of {asked}, and the result of {brought}"
        for (row, sequence), row_result in zip(planned, result.rows, strict=True):
            if self.sequences.get(row.sequence_id) is sequence:
                _take(sequence, row, row_result)
        self.results.append(result)
        return result

    def step(self, *rows: Row, **plan: Any) -> StepResult:
        """Submit a plan and collect it."""
        self.submit(*rows, **plan)
        return self.collect()

    def decode(self, sequences: Sequence[PlannedSequence], num_tokens: int) -> None:
        """Run sequences side by side until each that does not fail has said so much."""
        while rows := [self.row(s) for s in sequences if s.error is None and len(s.answer) < num_tokens]:
            self.step(*rows)


def _entered(sequence: PlannedSequence) -> Entered:
    return Entered(
        sequence_id=sequence.sequence_id,
        params=sequence.params,
        seed=sequence.seed,
        token_ids=tuple(sequence.token_ids),
        num_prompt=len(sequence.prompt),
    )


def _take(sequence: PlannedSequence, row: Row, result: RowResult) -> None:
    """Check a row's result and accept its tokens."""
    who, wants = f"the row of {row.sequence_id}", row.want is Want.LAST
    sequence.expected -= wants
    scores = [(entry.token_id, entry.logprob) for entry in result.prompt_logprobs]
    # A prompt that runs once more after a preemption is scored once more.
    known = max(0, len(sequence.prompt_logprobs) - row.start)
    sequence.prompt_logprobs += scores[known:]
    if result.error is not None:
        assert result.error, f"{who} failed, and its error is empty"
        assert not result.token_ids, f"{who} failed, and has tokens {result.token_ids}"
        sequence.error = result.error
        return
    sequence.num_run = max(sequence.num_run, row.start + len(row.token_ids) - row.num_drafts)
    if not wants:
        assert not result.token_ids, f"{who} wants no token, and has {result.token_ids}"
        sequence.num_computed = row.start + len(row.token_ids)
        return
    most = row.num_drafts + 1
    assert 1 <= len(result.token_ids) <= most, f"{who} has {len(result.token_ids)} tokens, of 1 to {most}"
    asked = len(result.token_ids) if sequence.params.logprobs is not None else 0
    assert len(result.logprobs) == asked, f"{who} has {len(result.logprobs)} log-probabilities, and {asked} are wanted"
    assert len(result.drafts) <= row.drafts_wanted, (
        f"{who} wants {row.drafts_wanted} drafts, and has {len(result.drafts)}"
    )
    sequence.token_ids += result.token_ids
    sequence.num_computed = len(sequence.token_ids) - 1
    sequence.logprobs += [(entry.token_id, entry.logprob) for entry in result.logprobs]
    sequence.drafts = result.drafts
