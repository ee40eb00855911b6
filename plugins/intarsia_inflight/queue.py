"""Sequences in the order of their turn: higher rank first, then first come, first served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import define, field

from intarsia.protocols import SequenceView
from intarsia.types import SequenceId


@define(eq=False)
class Entry:
    """What the scheduler knows of one sequence.

    Attributes:
        arrival: a number that grows with each arrival; a preempted sequence keeps its own.
        waited: steps that it has waited, over all its waits.
        rank: its priority, raised by waiting. It does not change while it runs.
        computed: tokens that have valid slots.
        drafts: proposals for its next row.
        swapped: whether its pages are in host memory.
    """

    sequence: SequenceView
    arrival: int
    waited: int = 0
    computed: int = 0
    drafts: tuple[int, ...] = ()
    swapped: bool = False
    rank: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rank = self.sequence.priority

    @property
    def turn(self) -> tuple[int, int]:
        """Sorts entries into the order of their turn."""
        return -self.rank, self.arrival

    @property
    def remaining(self) -> int:
        """Known tokens that have not been run: 1 is a row that decodes, more is a prompt, or one to be run again."""
        return len(self.sequence.token_ids) - self.computed


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
