"""A step loop without a model, for schedulers and allocators: the engine's calls, in the engine's order.

The next token is a function of all tokens before it, as a model's is, so that answers can be compared with solo runs.
Each plan is checked as it comes. Cache memory is `SlotMemory`: before a row runs, every slot that it may read is
compared with the row's own tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence

from attrs import define, evolve, field, frozen

from intarsia.errors import PluginError
from intarsia.handing_over import hand_over
from intarsia.protocols import CacheAllocator, PlansAhead, Scheduler, StorageMaker
from intarsia.testing.memory import SlotMemory
from intarsia.types import (
    PENDING,
    BatchPlan,
    CacheLayout,
    Entered,
    Row,
    RowResult,
    SamplingParams,
    SequenceId,
    Want,
)

__all__ = ["Limits", "SimulatedSequence", "Simulation", "answer", "next_token", "tables"]


def next_token(token_ids: Sequence[int]) -> int:
    """What the simulated model says after these tokens: few different tokens, so that prefixes meet often."""
    return hashlib.blake2b(bytes(token_ids), digest_size=1).digest()[0] % 4


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a solo run says."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def tables(allocator: CacheAllocator) -> int:
    """How many pages an allocator's page tables can name."""
    return allocator.num_page_ids if isinstance(allocator, StorageMaker) else allocator.num_pages


@frozen(kw_only=True)
class Limits:
    """What a scheduler promises to keep to; None where it promises nothing.

    Attributes:
        max_batch: sequences that run at once.
        max_tokens: tokens a step.
        max_waiting: sequences that may wait.
    """

    max_batch: int | None = None
    max_tokens: int | None = None
    max_waiting: int | None = None


@define(eq=False)
class SimulatedSequence:
    """What an engine would own, as a `SequenceView`.

    Attributes:
        max_total: the most tokens that it can hold.
        stops_after: tokens of its answer after which it ends before its limit, as at a stop id.
        fails_after: tokens of its answer after which its row fails.
        device_ids: its tokens, and those that steps in flight have chosen.
        cached_tokens: where its first row began.
        in_flight: its rows in flight; `chosen` of them choose tokens, with or without drafts.
        proposed: guesses that its next row can have.
    """

    sequence_id: SequenceId
    token_ids: list[int]
    max_total: int
    priority: int = 0
    salt: str = ""
    stops_after: int | None = None
    fails_after: int | None = None
    params: SamplingParams = field(factory=SamplingParams)
    seed: int = 0
    num_prompt: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    cached_tokens: int | None = field(default=None, init=False)
    device_ids: list[int] = field(init=False)
    in_flight: int = field(default=0, init=False)
    chosen: int = field(default=0, init=False)
    has_drafts: bool = field(default=False, init=False)
    proposed: tuple[int, ...] = field(default=(), init=False)

    def __attrs_post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)
        self.device_ids = list(self.token_ids)

    def entered(self) -> Entered:
        """Return what a plan tells executors."""
        return Entered(
            sequence_id=self.sequence_id,
            params=self.params,
            seed=self.seed,
            token_ids=tuple(self.token_ids),
            num_prompt=self.num_prompt,
            salt=self.salt,
        )

    @property
    def output(self) -> list[int]:
        """Its answer so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def is_finished(self) -> bool:
        """Whether it is at its limit or stop."""
        stop = self.max_total if self.stops_after is None else self.num_prompt + self.stops_after
        return len(self.token_ids) >= min(stop, self.max_total)

    @property
    def expected(self) -> list[int]:
        """What it says where nothing goes wrong."""
        prompt = self.token_ids[: self.num_prompt]
        num_tokens = self.max_total - self.num_prompt
        return answer(prompt, min(num_tokens, num_tokens if self.stops_after is None else self.stops_after))


@frozen(eq=False)
class _Step:
    plan: BatchPlan
    sequences: tuple[SimulatedSequence, ...]
    results: tuple[RowResult, ...]


@define(eq=False)
class Simulation:
    """Runs a scheduler's plans, and checks each of them.

    Attributes:
        propose: a drafter: tokens so far -> guesses. None drafts nothing.
        depth: steps in flight at most; more than 1 takes a scheduler that `PlansAhead`.
        names_pending: whether a sequence can be in several of them.
        sequences: those that are not finished, by id.
        finished, failed: the others, but for those that were cancelled.
        log: the plans so far.
    """

    scheduler: Scheduler
    allocator: CacheAllocator
    layout: CacheLayout
    limits: Limits = field(factory=Limits)
    propose: Callable[[Sequence[int]], Sequence[int]] | None = None
    depth: int = 1
    names_pending: bool = False
    sequences: dict[SequenceId, SimulatedSequence] = field(factory=dict, init=False)
    finished: dict[SequenceId, SimulatedSequence] = field(factory=dict, init=False)
    failed: dict[SequenceId, SimulatedSequence] = field(factory=dict, init=False)
    log: list[BatchPlan] = field(factory=list, init=False)
    known: set[SequenceId] = field(factory=set, init=False)
    _removed: Counter[SequenceId] = field(factory=Counter, init=False)
    _memory: SlotMemory = field(init=False)
    _flight: deque[_Step] = field(factory=deque, init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = SlotMemory(self.layout, tables(self.allocator))

    # --- what a test does -------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        choice: int = 0,
        priority: int = 0,
        salt: str = "",
        stops_after: int | None = None,
        fails_after: int | None = None,
    ) -> SimulatedSequence:
        """Add a sequence that fits an empty cache; raises what the scheduler raises."""
        sequence = SimulatedSequence(
            (name, choice),
            list(prompt),
            len(prompt) + num_tokens,
            priority=priority,
            salt=salt,
            stops_after=stops_after,
            fails_after=fails_after,
        )
        assert self.allocator.capacity(sequence.max_total), "the test asks for more than the cache holds"
        assert sequence.sequence_id not in self.sequences, "the test uses an id twice"
        self.scheduler.add(sequence)
        self.sequences[sequence.sequence_id] = sequence
        self._check_counts()
        return sequence

    def cancel(self, sequence_id: SequenceId) -> None:
        """Remove a sequence, known or not."""
        self.scheduler.remove(sequence_id)
        if self.sequences.pop(sequence_id, None) is not None:
            self._removed[sequence_id] += 1
        self._check_counts()

    def step(self) -> BatchPlan:
        """Plan and submit as many steps as may be in flight, and collect the oldest; return the last plan."""
        while len(self._flight) < self.depth and self._launch():
            pass
        if self._flight:
            self._land()
        self.allocator.check_integrity()
        self._check_counts()
        return self.log[-1]

    def run(self, limit: int = 10_000) -> None:
        """Step until all are finished. AssertionError after `limit` steps, or 100 in turn that run nothing."""
        idle = 0
        for _ in range(limit):
            if not self.sequences:
                return self._rest()
            idle = 0 if self.step().rows else idle + 1
            assert idle < 100, f"{list(self.sequences)} wait, and 100 plans ran nothing"
        raise AssertionError(f"{list(self.sequences)} are not finished after {limit} steps")

    def replace(self, scheduler: Scheduler, limits: Limits) -> None:
        """Give all sequences to another scheduler, as an engine does between two steps; where it raises, do nothing."""
        self._rest()
        ordered = sorted(self.sequences.values(), key=lambda sequence: sequence.cached_tokens is None)
        try:
            kept = hand_over(self.scheduler, scheduler, ordered)
        except PluginError as error:  # what the engine finds out by itself
            raise AssertionError(str(error)) from error
        self.known &= kept
        self._removed.clear()
        for sequence in ordered:
            if sequence.sequence_id not in kept:
                self.allocator.release(sequence.sequence_id)
                sequence.num_computed, sequence.proposed = 0, ()
        self.scheduler, self.limits = scheduler, limits
        self._check_counts()

    def check_answers(self) -> None:
        """Raise AssertionError unless every finished sequence says what it says alone."""
        for sequence_id, sequence in self.finished.items():
            assert sequence.output == sequence.expected, (
                f"{sequence_id} says {sequence.output}, and alone {sequence.expected}"
            )

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is left of anybody: call it once all are finished."""
        self._rest()
        counts = self.scheduler.num_waiting, self.scheduler.num_running
        assert counts == (0, 0), f"{counts[0]} wait and {counts[1]} run, when all have left"
        used = self.allocator.stats().used
        assert used == 0, f"{used} pages are in use when all have left"
        plan = self.scheduler.plan()
        assert not plan.rows, "an idle scheduler plans rows"
        self._meet(plan)
        assert not self.known, f"no plan said that {sorted(self.known)} left"

    # --- the step ---------------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        while self._flight:
            self._land()

    def _launch(self) -> bool:
        plan = self.scheduler.plan()
        self.log.append(plan)
        self._meet(plan)
        self._check_plan(plan)
        self._memory.move(plan.moves)
        sequences = tuple(self.sequences[row.sequence_id] for row in plan.rows)
        results = tuple(self._run(row, sequence) for row, sequence in zip(plan.rows, sequences, strict=True))
        if not (plan.rows or plan.left or plan.moves):
            return False
        self._flight.append(_Step(plan, sequences, results))
        if self.depth > 1:
            assert isinstance(self.scheduler, PlansAhead)
            self.scheduler.expect(plan, names_pending=self.names_pending)
        return bool(plan.rows)

    def _land(self) -> None:
        step = self._flight.popleft()
        rows, results = [], []
        for row, sequence, result in zip(step.plan.rows, step.sequences, step.results, strict=True):
            sequence.in_flight -= 1
            sequence.chosen -= row.want is Want.LAST
            if self.sequences.get(row.sequence_id) is sequence:
                rows.append(row)
                results.append(result)
        for row, result in zip(rows, results, strict=True):
            self._accept(row, result)
        if step.plan.rows:
            self.scheduler.update(evolve(step.plan, rows=tuple(rows)), results)
        for row, result in zip(rows, results, strict=True):
            sequence = self.sequences[row.sequence_id]
            if result.error is not None or sequence.is_finished:
                (self.finished if result.error is None else self.failed)[row.sequence_id] = sequence
                self.cancel(row.sequence_id)

    def _accept(self, row: Row, result: RowResult) -> None:
        sequence = self.sequences[row.sequence_id]
        if result.error is not None:
            return
        if not result.token_ids:
            sequence.num_computed = row.start + len(row.token_ids)
        else:
            limit = sequence.num_prompt + (sequence.stops_after or sequence.max_total)
            sequence.token_ids += result.token_ids[: min(limit, sequence.max_total) - len(sequence.token_ids)]
            sequence.num_computed = len(sequence.token_ids) - 1
            sequence.has_drafts, sequence.proposed = False, result.drafts
        if not sequence.is_finished:
            self.allocator.commit(row.sequence_id, sequence.token_ids, sequence.num_computed)

    def _run(self, row: Row, sequence: SimulatedSequence) -> RowResult:
        num_known = len(row.token_ids) - row.num_drafts
        drafts = row.token_ids[num_known:]
        context = sequence.device_ids[: row.start + num_known]
        prefixes = self._memory.prefixes([*context, *drafts], sequence.salt)
        self._memory.write(row.pages, row.start, prefixes, row.sequence_id)
        self._memory.check(row.pages, row.start, prefixes, row.sequence_id)
        sequence.in_flight += 1
        if row.want is Want.NONE:
            return RowResult(sequence_id=row.sequence_id)
        sequence.chosen += 1
        sequence.has_drafts = bool(drafts)
        if sequence.fails_after is not None and len(context) - sequence.num_prompt >= sequence.fails_after:
            return RowResult(sequence_id=row.sequence_id, error="it was meant to fail")
        accepted: list[int] = []
        for draft in (*drafts, None):
            accepted.append(next_token(context))
            context.append(accepted[-1])
            if accepted[-1] != draft:
                break
        sequence.device_ids = context
        guesses = () if self.propose is None else tuple(self.propose(context)[: row.drafts_wanted])
        return RowResult(sequence_id=row.sequence_id, token_ids=tuple(accepted), drafts=guesses)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_counts(self) -> None:
        waiting, running = self.scheduler.num_waiting, self.scheduler.num_running
        assert waiting + running == len(self.sequences), (
            f"{waiting} wait and {running} run, of {len(self.sequences)} sequences"
        )
        most = self.limits.max_batch
        assert most is None or running <= most, f"{running} sequences run, and max_batch is {most}"

    def _meet(self, plan: BatchPlan) -> None:
        """Follow who is known to executors, as they do."""
        self._removed.subtract(plan.left)
        strangers = [sequence_id for sequence_id in plan.left if self._removed[sequence_id] < 0]
        assert not strangers, f"a plan says that {strangers} left, once more or before they did"
        self.known -= set(plan.left)
        for sequence_id in plan.preempted:
            assert sequence_id in self.known, f"{sequence_id} is preempted and was not running"
            assert not self.sequences[sequence_id].in_flight, f"{sequence_id} is preempted with a row in flight"
            self.sequences[sequence_id].num_computed = 0
            self.known.discard(sequence_id)
        for entered in plan.entered:
            sequence = self.sequences.get(entered.sequence_id)
            assert sequence is not None, f"{entered.sequence_id} enters and is gone"
            assert entered.sequence_id not in self.known, f"{entered.sequence_id} enters and is there already"
            assert entered == sequence.entered(), f"{entered.sequence_id} enters with other facts than its own"
            self.known.add(entered.sequence_id)

    def _check_plan(self, plan: BatchPlan) -> None:
        ids = [row.sequence_id for row in plan.rows]
        assert len(set(ids)) == len(ids), "a sequence has two rows"
        assert set(ids) <= self.sequences.keys(), f"{sorted(set(ids) - self.sequences.keys())} run and are gone"
        assert not set(ids) & set(plan.preempted), "a sequence is scheduled and preempted in one step"
        assert set(ids) <= self.known, f"{sorted(set(ids) - self.known)} run and never entered"
        most = self.limits.max_tokens
        assert most is None or plan.num_tokens <= most, f"{plan.num_tokens} tokens run, and max_tokens is {most}"
        for row in plan.rows:
            self._check_row(row, self.sequences[row.sequence_id])

    def _check_row(self, row: Row, sequence: SimulatedSequence) -> None:
        who = row.sequence_id
        if sequence.cached_tokens is None:
            sequence.cached_tokens = row.start
        assert self.names_pending or not sequence.chosen, f"{who}: which token comes next is not known yet"
        assert not (sequence.chosen and sequence.has_drafts), f"{who}: what comes of its drafts is not known yet"
        accepted = len(sequence.token_ids)
        known = [*sequence.token_ids, *(PENDING,) * (len(sequence.device_ids) - accepted)]
        num_known = len(row.token_ids) - row.num_drafts
        assert num_known >= 1, f"{who} has a row without a token of its own"
        here = known[row.start : row.start + num_known]
        assert list(row.token_ids[:num_known]) == here, f"{who} runs {row.token_ids[:num_known]}, and has {here} there"
        is_last = row.start + num_known == len(known)
        assert row.want is (Want.LAST if is_last else Want.NONE), (
            f"{who}: {row.want} after token {row.start + num_known}"
        )
        drafts = row.token_ids[num_known:]
        assert is_last or not drafts, f"{who} has drafts in the middle of its tokens"
        assert drafts == sequence.proposed[: len(drafts)], f"{who} runs drafts {drafts}, proposed {sequence.proposed}"
        assert row.start + len(row.token_ids) <= sequence.max_total, f"{who} runs beyond its limit"
        assert row.start + len(row.token_ids) + row.drafts_wanted < sequence.max_total or not row.drafts_wanted, (
            f"{who} wants {row.drafts_wanted} drafts beyond its limit"
        )
