"""Giving the sequences of one scheduler to another, between two steps; whoever fails, none is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from intarsia.errors import IntarsiaError, OverloadedError, PluginError
from intarsia.protocols import HandsOver, Parts, Scheduler, SequenceView
from intarsia.saying import is_fault, said, text_of
from intarsia.types import SequenceId

__all__ = ["hand_over", "refused", "take_all"]


def hand_over(old: Scheduler, new: Scheduler, sequences: Sequence[SequenceView]) -> frozenset[SequenceId]:
    """Give sequences to another scheduler, which has none yet; return those that keep their pages.

    Nothing is in flight. Where it raises, the old scheduler still has them all, and their pages.

    Args:
        old: has exactly these.
        new: takes them.
        sequences: those that ran before the others, each in the order of its arrival.
    """
    if not (isinstance(old, HandsOver) and isinstance(new, HandsOver)):
        take_all(new, sequences)
        return frozenset()
    held = old.held()
    live = {sequence.sequence_id for sequence in sequences}
    if {one.sequence.sequence_id for one in held} != live or len(held) != len(live):
        raise PluginError(f"{type(old).__name__}.held names {len(held)} sequences, and others than the {len(live)}")
    kept = frozenset(new.take_over(held))
    if not kept <= {one.sequence.sequence_id for one in held if one.pages != "none"}:
        raise PluginError(f"{type(new).__name__}.take_over keeps pages of sequences that have none")
    _check_all(new, len(live))
    return kept


def take_all(new: Scheduler, sequences: Sequence[SequenceView]) -> None:
    """Add sequences to a scheduler that has none, in their order."""
    for sequence in sequences:
        new.add(sequence)
    _check_all(new, len(sequences))


def _check_all(new: Scheduler, count: int) -> None:
    found = new.num_waiting + new.num_running
    if found != count:
        raise PluginError(f"{type(new).__name__} has {found} sequences, and was given {count}")


@contextmanager
def refused(parts: Parts, slot: str, before: str) -> Iterator[None]:
    """Name the new part that fails while it takes over, and say that the one before goes on."""
    try:
        yield
    except BaseException as error:
        if not is_fault(error):
            raise
        chosen = next((one for one in parts.selections if one.slot == slot), None)
        what = f"{slot}: the part that was to replace {before!r}" if chosen is None else chosen.title
        text = text_of(error) if isinstance(error, IntarsiaError) else said(error)
        message = f"{what} did not take over, and {before!r} goes on: {text}"
        if isinstance(error, OverloadedError):
            raise OverloadedError(message, retry_after_s=error.retry_after_s) from error
        raise PluginError(message, field=slot) from error
