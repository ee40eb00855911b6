"""The in-flight scheduler.

A step is filled in this order, each within the token budget:

1. A waiting sequence whose priority is above a running one's rank takes its place: the lowest-ranked, latest arrival is
   preempted.
2. Running rows that decode: one token each. Where pages run out, the lowest-ranked, latest arrival that has no row in
   this step is preempted: its pages go, to host memory where the cache has some and copying is cheaper; else it is run
   again later, prompt and answer so far. Drafts take what budget the decoding rows behind them leave, and pages that
   are free: they preempt nobody, and pages of those that were rejected are given back.
3. Running prompts, in chunks.
4. Waiting sequences, in the order of their turn, while pages last. Nobody overtakes the first in line, but for those
   that wait for a prompt in front of them to compute what they share: that takes its steps, and spares theirs.

**How long anything waits.** Every `ageing_steps` of waiting raise the rank by one and nothing lowers it, so after
(p - q) * ageing_steps steps of waiting, a sequence of priority q stands before every later arrival of priority up to p,
and once it runs none of those preempts it. What stands before it then is at most `max_waiting + max_batch` sequences,
and each of these ends within its own tokens' steps of running: the first in turn always gets its pages from the others.

**Planning ahead.** While steps are in flight, a row that wants a token is taken to bring one, and the next row of its
sequence names that token PENDING. Nobody is preempted while steps are in flight: where that would be, who has room goes
on in this step, none is planned behind it until all are collected, and then it is done as if there had been none.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from intarsia.errors import OverloadedError
from intarsia.protocols import CacheAllocator, HeldSequence, PartContext, SequenceView, SwappingAllocator
from intarsia.types import PENDING, BatchPlan, Entered, Row, RowResult, SequenceId, Want
from intarsia_inflight.options import InflightOptions
from intarsia_inflight.queue import Entry, Queue, common_prefix

#: Tokens of a common prefix for which a waiting sequence waits until the running prompt that has it too has run it.
_WORTH_WAITING = 64


@define
class _Step:
    """A plan in the making."""

    budget: int
    rows: dict[SequenceId, Row] = field(factory=dict)
    preempted: list[SequenceId] = field(factory=list)
    entered: list[Entered] = field(factory=list)


@define
class InflightScheduler:
    """Fills every step anew with decoding rows, chunks of prompts and new arrivals."""

    options: InflightOptions
    allocator: CacheAllocator
    _waiting: Queue = field(init=False)
    _running: dict[SequenceId, Entry] = field(factory=dict, init=False)
    _left: list[SequenceId] = field(factory=list, init=False)
    _arrivals: int = field(default=0, init=False)
    #: somebody has to be preempted once nothing is in flight
    _is_cramped: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._waiting = Queue(self.options.ageing_steps)

    # --- coming and going -------------------------------------------------------------------------------------------

    def add(self, sequence: SequenceView) -> None:
        """Queue a sequence."""
        if len(self._waiting) >= self.options.max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} sequences are waiting, the most that scheduler.max_waiting allows",
                retry_after_s=1.0,
            )
        self._arrivals += 1
        self._waiting.add(Entry(sequence, self._arrivals))

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence, waiting or running."""
        if self._running.pop(sequence_id, None) is None:
            entry = self._waiting.find(sequence_id)
            if entry is None:
                return
            self._waiting.discard(entry)
        # One that waits can hold host memory.
        self.allocator.release(sequence_id)
        self._left.append(sequence_id)

    def held(self) -> list[HeldSequence]:
        """Return those that run and those that wait, each in the order of their turn."""
        running = sorted(self._running.values(), key=lambda entry: entry.turn)
        return [
            *(entry.held("device") for entry in running),
            *(entry.held("host" if entry.swapped else "none") for entry in self._waiting),
        ]

    def take_over(self, held: Sequence[HeldSequence]) -> set[SequenceId]:
        """Run those that ran, as many as may, and queue the others; what they have waited counts."""
        places = range(self.options.max_batch)
        runs = {
            one.sequence.sequence_id for one, _ in zip((h for h in held if h.pages == "device"), places, strict=False)
        }
        if len(held) - len(runs) > self.options.max_waiting:
            raise OverloadedError(
                f"{len(held) - len(runs)} sequences would wait, and scheduler.max_waiting allows "
                f"{self.options.max_waiting}",
                retry_after_s=1.0,
            )
        for one in held:
            self._arrivals += 1
            entry = Entry.of(one, self._arrivals, self.options.ageing_steps)
            if one.sequence.sequence_id in runs:
                entry.computed, entry.drafts = one.num_computed, one.drafts
                self._running[one.sequence.sequence_id] = entry
            else:
                self._waiting.add(entry)
        return runs | {one.sequence.sequence_id for one in held if one.pages == "host"}

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages of the device."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    # --- the step ---------------------------------------------------------------------------------------------------

    def plan(self) -> BatchPlan:
        """Fill a step."""
        self._is_cramped = self._is_cramped and self._in_flight
        step = _Step(0 if self._is_cramped else self.options.max_tokens)
        if step.budget:
            self._waiting.age()
            self._make_way(step)
        decoding, prompts = self._turns()
        for place, entry in enumerate(decoding, start=1):
            self._decode(entry, step, num_behind=len(decoding) - place)
        for entry in prompts:
            self._prefill(entry, step)
        if not (step.preempted or self._is_cramped):
            self._admit(step)
        left, self._left = tuple(self._left), []
        return BatchPlan(
            rows=tuple(step.rows.values()),
            preempted=tuple(step.preempted),
            entered=tuple(step.entered),
            left=left,
            moves=self.allocator.take_moves(),
        )

    def _turns(self) -> tuple[list[Entry], list[Entry]]:
        """Return the running entries that are ready, those that decode and those that run a prompt, in their turn."""
        decoding, prompts = list[Entry](), list[Entry]()
        for entry in sorted(self._running.values(), key=_turn):
            if not entry.is_ready:
                continue
            remaining = entry.remaining
            if remaining == 1:
                decoding.append(entry)
            elif remaining > 1:
                prompts.append(entry)
        return decoding, prompts

    @property
    def _in_flight(self) -> bool:
        return any(entry.ahead for entry in self._running.values())

    def expect(self, plan: BatchPlan, *, names_pending: bool) -> None:
        """Count on a plan that was submitted."""
        for row in plan.rows:
            self._running[row.sequence_id].expect(row, names_pending=names_pending)

    def update(self, plan: BatchPlan, results: Sequence[RowResult]) -> None:
        """Note how far each sequence is, and keep the proposals for its next row."""
        for row, result in zip(plan.rows, results, strict=True):
            entry = self._running.get(result.sequence_id)
            if entry is not None:
                entry.settle(row, result.drafts)
                if not entry.ahead and entry.computed < row.start + len(row.token_ids):
                    # Slots of rejected drafts.
                    self.allocator.rewind(result.sequence_id, entry.computed)

    def _make_way(self, step: _Step) -> None:
        """Preempt for waiting sequences whose priority is above a running one's rank.

        Rank that comes of waiting preempts nobody: two that wait for one place would take it from each other for ever.
        """
        for entry in list(self._waiting):
            victim = self._victim(step)
            if victim is None or victim.rank >= entry.sequence.priority:
                return
            while not self._enter(entry, step):
                victim = self._victim(step)
                if victim is None or victim.rank >= entry.sequence.priority or not self._preempt(victim, step):
                    return

    def _decode(self, entry: Entry, step: _Step, num_behind: int) -> None:
        sequence = entry.sequence
        if sequence.sequence_id not in self._running or not step.budget:
            return
        drafts: tuple[int, ...] = ()
        if entry.drafts:
            drafts, entry.drafts = entry.drafts[: max(0, step.budget - 1 - num_behind)], ()
            total = entry.computed + 1 + len(drafts)
            room = self.allocator.reserve(sequence.sequence_id, sequence.token_ids, total, sequence.salt)
            drafts = drafts if room is not None else ()
        if self._secure(entry, entry.computed + 1 + len(drafts), step):
            self._put(entry, 1, drafts, step)

    def _prefill(self, entry: Entry, step: _Step) -> None:
        if entry.sequence.sequence_id not in self._running or not step.budget:
            return
        chunk = min(entry.remaining, step.budget)
        if self._secure(entry, entry.computed + chunk, step):
            self._put(entry, chunk, (), step)

    def _admit(self, step: _Step) -> None:
        """Let waiting sequences in, in the order of their turn, while there is room for each whole prompt."""
        for entry in list(self._waiting):
            if not step.budget:
                return
            if not entry.swapped and (self._awaits_parent(entry) or self._awaits_prefix(entry)):
                continue
            if not self._enter(entry, step):
                return
            self._prefill(entry, step)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _enter(self, entry: Entry, step: _Step) -> bool:
        """Give a waiting sequence room for its known tokens, and let it run; False where there is none."""
        sequence = entry.sequence
        sequence_id, known = sequence.sequence_id, sequence.token_ids
        if len(self._running) >= self.options.max_batch or sequence_id in step.preempted:
            return False
        parent = None if entry.swapped else self._parent(entry)
        if parent is not None and len(known) == sequence.num_prompt <= parent.settled:
            # The prompt is in the parent's pages. Its last token is run again, for its logits.
            self.allocator.fork(parent.sequence.sequence_id, sequence_id, len(known) - 1)
        computed = self.allocator.reserve(sequence_id, known, len(known), sequence.salt)
        if computed is None:
            if not entry.swapped:
                self.allocator.release(sequence_id)
            return False
        self._waiting.discard(entry)
        self._running[sequence_id] = entry
        entry.computed, entry.swapped = computed, False
        step.entered.append(sequence.entered())
        return True

    def _parent(self, entry: Entry) -> Entry | None:
        """The running choice 0 of the same request, whose prompt further choices take over."""
        request_id, choice = entry.sequence.sequence_id
        return self._running.get((request_id, 0)) if choice else None

    def _awaits_parent(self, entry: Entry) -> bool:
        """Whether a further choice does best to wait a little: the prompt that it would take over is being run."""
        parent = self._parent(entry)
        return parent is not None and parent.settled < entry.sequence.num_prompt

    def _awaits_prefix(self, entry: Entry) -> bool:
        """Whether a running prompt is about to compute what this one begins with: then it is found, not run again."""
        if not self.allocator.shares_prefixes:
            return False
        known, salt = entry.sequence.token_ids, entry.sequence.salt
        shared = max(
            (
                common_prefix(known, leader.sequence.token_ids)
                for leader in self._running.values()
                if len(leader.sequence.token_ids) - leader.settled > 1 and leader.sequence.salt == salt
            ),
            default=0,
        )
        return shared >= _WORTH_WAITING and shared - self.allocator.lookup(known, salt) >= _WORTH_WAITING

    def _secure(self, entry: Entry, num_tokens: int, step: _Step) -> bool:
        """Get pages for a running sequence, from others or, at last, by giving up its own."""
        sequence = entry.sequence
        while self.allocator.reserve(sequence.sequence_id, sequence.token_ids, num_tokens, sequence.salt) is None:
            victim = self._victim(step)
            assert victim is not None, "an entry without a row can always give up its own pages"
            if not self._preempt(victim, step) or victim is entry:
                return False
        return True

    def _victim(self, step: _Step) -> Entry | None:
        """The lowest-ranked, latest arrival that has no row in this step."""
        free = [entry for sequence_id, entry in self._running.items() if sequence_id not in step.rows]
        return max(free, key=lambda entry: entry.turn, default=None)

    def _preempt(self, entry: Entry, step: _Step) -> bool:
        """Take a running sequence's pages. While steps are in flight let them come to their end first: return False."""
        if self._in_flight:
            self._is_cramped = True
            return False
        sequence_id, allocator = entry.sequence.sequence_id, self.allocator
        entry.swapped = isinstance(allocator, SwappingAllocator) and allocator.swap_out(sequence_id)
        if not entry.swapped:
            allocator.release(sequence_id)
        del self._running[sequence_id]
        entry.computed, entry.drafts = 0, ()
        step.preempted.append(sequence_id)
        step.entered[:] = [entered for entered in step.entered if entered.sequence_id != sequence_id]
        self._waiting.add(entry)
        return True

    def _put(self, entry: Entry, num_tokens: int, drafts: tuple[int, ...], step: _Step) -> None:
        """Add a row."""
        sequence, start = entry.sequence, entry.computed
        sequence_id, known, stop = sequence.sequence_id, entry.num_tokens, start + num_tokens
        token_ids = tuple(sequence.token_ids[start:stop])
        step.budget -= num_tokens + len(drafts)
        step.rows[sequence_id] = Row(
            sequence_id=sequence_id,
            token_ids=token_ids + (PENDING,) * (num_tokens - len(token_ids)) + drafts,
            start=start,
            num_drafts=len(drafts),
            # The last token needs no slot, and a step adds one token besides its drafts.
            drafts_wanted=max(0, sequence.max_total - known - 2 - len(drafts)) if stop == known else 0,
            want=Want.LAST if stop == known else Want.NONE,
            pages=self.allocator.pages(sequence_id),
        )


def _turn(entry: Entry) -> tuple[int, int]:
    return entry.turn


def build(context: PartContext) -> InflightScheduler:
    """Make the scheduler over the cache's books."""
    return InflightScheduler(context.options, context.parts["cache"])
