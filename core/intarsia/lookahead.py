"""How many steps an engine keeps in flight, and why: known from its parts, before any step."""

from __future__ import annotations

from attrs import frozen

from intarsia.protocols import Parts, PlansAhead, ResolvesPending


@frozen
class Lookahead:
    """How far an engine plans ahead of results.

    Attributes:
        depth: steps in flight at most. At 1 each step is collected before the next one is planned.
        names_pending: whether a sequence can be in several of them at once, see `PlansAhead.expect`.
        reason: what this depth comes from.
    """

    depth: int
    names_pending: bool
    reason: str


def look_ahead(parts: Parts) -> Lookahead:
    """Return how many steps these parts can have in flight: more than one only where all of them can."""
    executor, scheduler = parts.executor, parts.scheduler
    names = {slot: f"{slot} {parts.selection(slot).provider.key!r}" for slot in ("executor", "scheduler")}
    names_pending = isinstance(executor, ResolvesPending) and executor.resolves_pending
    if executor.depth <= 1:
        return Lookahead(1, False, f"{names['executor']} runs one step at a time here")
    if not isinstance(scheduler, PlansAhead):
        return Lookahead(1, False, f"{names['scheduler']} plans a step from the results of the one before")
    if names_pending and parts.drafter is not None:
        return Lookahead(1, False, "how many drafts a row has is not known before the step in front of it is over")
    if names_pending:
        return Lookahead(executor.depth, True, "planning and accepting overlap the device")
    return Lookahead(executor.depth, False, f"{names['executor']} has a sequence in one of its steps at a time")
