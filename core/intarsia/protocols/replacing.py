"""What parts can do besides, so that they can be replaced while requests run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol, runtime_checkable

from attrs import frozen

from intarsia.protocols.choosing import Drafter
from intarsia.protocols.composition import Selection
from intarsia.protocols.scheduling import SequenceView
from intarsia.types import Entered, SequenceId


@frozen(kw_only=True)
class HeldSequence:
    """What a scheduler knows of one of its sequences, for the scheduler that takes over.

    Attributes:
        pages: where its keys and values are: it runs with pages of the `device`, it waits and has some in `host`
            memory, or it waits and has `none`.
        num_computed: how many of its tokens have valid slots there.
        drafts: proposals for its next row.
        num_waited: steps that it has waited so far.
    """

    sequence: SequenceView
    pages: Literal["device", "host", "none"] = "none"
    num_computed: int = 0
    drafts: tuple[int, ...] = ()
    num_waited: int = 0


@runtime_checkable
class HandsOver(Protocol):
    """What a scheduler can do besides: be replaced by another one, or replace one, with its sequences' pages kept.

    Any scheduler can be replaced, and replace another. Where one of the two cannot do this, all sequences give their
    pages back, are given to the new one by `add`, those that ran first, and their tokens are run again, but for those
    that the cache still has. No step is in flight.
    """

    def held(self) -> Sequence[HeldSequence]:
        """Return every sequence, those that run before those that wait, each in the order of their turn.

        No side effects: where the other does not take over, this one goes on.
        """
        ...

    def take_over(self, held: Sequence[HeldSequence]) -> Collection[SequenceId]:
        """Take another's sequences; return those whose pages, on the device or in host memory, stay theirs.

        The engine gives back the pages of all others, which wait. Called once, before anything else. May `reserve` more
        for those that keep theirs; changes no pages otherwise. Raise OverloadedError where the queue has no room for
        them: then the other goes on.
        """
        ...


@runtime_checkable
class ReplacesDrafter(Protocol):
    """What an executor can do besides: take another drafter while requests run."""

    def replace_drafter(
        self, drafter: Drafter | None, entered: Sequence[Entered], owner: Selection | None = None
    ) -> None:
        """Start a drafter, which takes no memory of the device, and stop the one before; None drafts nothing from here.

        No step is in flight. Where it raises, nothing has changed.

        Args:
            drafter: not started.
            entered: the sequences that have rows, with their tokens so far.
            owner: whose drafter it is, for messages and figures.
        """
        ...
