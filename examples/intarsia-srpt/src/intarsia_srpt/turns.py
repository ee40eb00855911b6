"""Whose turn it is: the shortest first, with ageing."""

from __future__ import annotations

from attrs import define, frozen

from intarsia.protocols import SequenceView


@define(eq=False)
class Entry:
    """What the scheduler knows of one sequence.

    Attributes:
        arrival: a number that grows with each arrival.
        step: how many steps were planned before it came; below 0 where another scheduler planned them.
        computed: tokens that have valid slots now.
        furthest: the most tokens that ever had: what was run once does not count as remaining again after a preemption.
        drafts: proposals for its next row.
        is_swapped: whether its pages are in host memory.
    """

    sequence: SequenceView
    arrival: int
    step: int
    computed: int = 0
    furthest: int = 0
    drafts: tuple[int, ...] = ()
    is_swapped: bool = False

    @property
    def num_unrun(self) -> int:
        """Known tokens that are not run yet: 1 is a row that decodes, more is a prompt, or one to be run again."""
        return len(self.sequence.token_ids) - self.computed

    @property
    def remaining(self) -> int:
        """Tokens that it may still need, of prompt and answer."""
        return self.sequence.max_total - self.furthest


@frozen
class Turns:
    """The order of turns.

    A sequence's place is what remains of it, less `ageing` tokens for each step since it came, less `max_len` tokens a
    step of priority. All grow older together, so that between two that do not run the order never changes; and a
    sequence that runs, or has run, only moves forward.

    So one of r tokens that comes at step s is overtaken by no request of equal priority that comes after step
    s + r / ageing, and by none whose priority is p above its own after (r + p * max_len) / ageing more.

    Attributes:
        ageing: tokens a step.
        max_len: tokens that no sequence can be longer than: so size never outweighs priority, and waiting can.
    """

    ageing: int
    max_len: int

    def of(self, entry: Entry) -> tuple[int, int]:
        """Return what sorts entries into the order of their turns."""
        place = entry.remaining + self.ageing * entry.step - self.max_len * entry.sequence.priority
        return place, entry.arrival
