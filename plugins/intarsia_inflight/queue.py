"""Sequences in the order of their turn: higher rank first, then first come, first served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Self

from attrs import define, field

from intarsia.protocols import HeldSequence, SequenceView
from intarsia.types import Row, SequenceId, Want


@define(eq=False)
class Entry:
    """What the scheduler knows of one sequence.

    Attributes:
        arrival: a number that grows with each arrival; a preempted sequence keeps its own.
        waited: steps that it has waited, over all its waits.
        rank: its priority, raised by waiting. It does not change while it runs.
        computed: tokens that have valid slots once the steps in flight are over.
        ahead: of these, how many the steps in flight run.
        pending: tokens that the steps in flight choose.
        waits: whether its next row cannot be planned before the step in flight is collected.
        drafts: proposals for its next row.
        swapped: whether its pages are in host memory.
    """

    sequence: SequenceView
    arrival: int
    waited: int = 0
    computed: int = 0
    ahead: int = 0
    pending: int = 0
    waits: bool = False
    drafts: tuple[int, ...] = ()
    swapped: bool = False
    rank: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rank = self.sequence.priority

    @classmethod
    def of(cls, held: HeldSequence, arrival: int, ageing_steps: int) -> Self:
        """Return the entry of a sequence that another scheduler had, waiting."""
        entry = cls(held.sequence, arrival, waited=held.num_waited, swapped=held.pages == "host")
        entry.rank = held.sequence.priority + held.num_waited // ageing_steps
        return entry

    def held(self, pages: Literal["device", "host", "none"]) -> HeldSequence:
        """Return what another scheduler has to know; nothing is in flight."""
        return HeldSequence(
            sequence=self.sequence,
            pages=pages,
            num_computed=self.computed,
            drafts=self.drafts,
            num_waited=self.waited,
        )

    @property
    def turn(self) -> tuple[int, int]:
        """Sorts entries into the order of their turn."""
        return -self.rank, self.arrival

    @property
    def num_tokens(self) -> int:
        """Tokens that it has once the steps in flight are over."""
        return len(self.sequence.token_ids) + self.pending

    @property
    def remaining(self) -> int:
        """Of these, how many are not run by then: 1 is a row that decodes, more is a prompt, or one to be run again."""
        return self.num_tokens - self.computed

    @property
    def settled(self) -> int:
        """Tokens that have valid slots now."""
        return self.computed - self.ahead

    @property
    def is_ready(self) -> bool:
        """Whether a row can be planned: its length is known, and it is not at its end with what is in flight."""
        return not self.waits and not (self.pending and self.num_tokens >= self.sequence.max_total)

    def expect(self, row: Row, *, names_pending: bool) -> None:
        """Count on a row that was submitted."""
        self.computed += len(row.token_ids)
        self.ahead += len(row.token_ids)
        if row.want is Want.LAST:
            self.pending += 1
            self.waits = row.num_drafts > 0 or not names_pending

    def settle(self, row: Row, drafts: tuple[int, ...]) -> None:
        """Take a row's outcome: the sequence has its tokens by now."""
        if self.ahead:
            self.ahead -= len(row.token_ids)
            self.pending -= row.want is Want.LAST
        if row.want is Want.LAST:
            self.waits = False
        self.computed = self.sequence.num_computed + self.ahead
        # Proposals follow this row's tokens, and so does a row that is in flight.
        self.drafts = () if self.ahead else drafts


@define
class Queue:
    """Waiting sequences."""

    ageing_steps: int
    _entries: list[Entry] = field(factory=list, init=False)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, entry: Entry) -> None:
        """Put an entry at its turn."""
        self._entries.append(entry)
        self._entries.sort(key=lambda e: e.turn)

    def age(self) -> None:
        """Let one step pass: every `ageing_steps` of waiting raise the rank by one."""
        changed = False
        for entry in self._entries:
            entry.waited += 1
            rank = entry.sequence.priority + entry.waited // self.ageing_steps
            changed |= rank != entry.rank
            entry.rank = rank
        if changed:
            self._entries.sort(key=lambda e: e.turn)

    def discard(self, entry: Entry) -> None:
        """Take an entry out."""
        self._entries.remove(entry)

    def find(self, sequence_id: SequenceId) -> Entry | None:
        """Return the entry of a sequence that waits."""
        return next((e for e in self._entries if e.sequence.sequence_id == sequence_id), None)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two sequences share, by comparing halves."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
