"""A drafter between the engine and the one on trial, which notes what is said and what breaks the contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from intarsia.hookspecs import hookimpl
from intarsia.protocols import Drafter, DrafterContext, DraftRequest, StepCost, Target, Verified
from intarsia.types import CacheLayout, Draft, Entered, Provider, SequenceId

__all__ = ["Proposal", "WatchedDrafter", "watching"]


@frozen(eq=False)
class Proposal:
    """What was proposed for a sequence.

    Attributes:
        step: number of the `propose` call.
        token_ids: that were known.
    """

    step: int
    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    draft: Draft


@define(eq=False)
class WatchedDrafter(Drafter):
    """Passes all calls on, and notes what breaks the contract.

    Attributes:
        inner: who is watched.
        num_ids: ids from here on are none; None is not known.
        again: makes another of its kind.
        faults: what was wrong, in words.
        strays: ids outside the vocabulary that were proposed: engines leave them out, and they help nobody.
        entered: how often each sequence has entered since it was forgotten last.
        num_reentered: how often a sequence entered again, after a preemption.
        drafted, accepted: guesses that were verified.
        proposals: all that was proposed.
        target: what it was started with.
    """

    inner: Drafter
    num_ids: int | None = None
    again: Callable[[], Drafter] | None = None
    faults: list[str] = field(factory=list, init=False)
    strays: list[int] = field(factory=list, init=False)
    entered: Counter[SequenceId] = field(factory=Counter, init=False)
    num_reentered: int = field(default=0, init=False)
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    proposals: list[Proposal] = field(factory=list, init=False)
    target: Target | None = field(default=None, init=False)
    _num_calls: int = field(default=0, init=False)

    def num_bytes(self, layout: CacheLayout) -> int:
        """Pass it on."""
        return self.inner.num_bytes(layout)

    def start(self, target: Target) -> None:
        """Pass it on."""
        self.target = target
        self.inner.start(target)

    def enter(self, entered: Entered) -> None:
        """Count."""
        self.entered[entered.sequence_id] += 1
        self.num_reentered += self.entered[entered.sequence_id] > 1
        self._passing("enter", lambda: self.inner.enter(entered))

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Check what is proposed."""
        before = [tuple(request.token_ids) for request in requests]
        drafts: list[Draft] = []
        self._passing("propose", lambda: drafts.extend(self.inner.propose(requests)))
        self._num_calls += 1
        if len(drafts) != len(requests):
            self.faults.append(f"{len(drafts)} drafts for {len(requests)} requests")
            return [Draft() for _ in requests]
        for request, ids, draft in zip(requests, before, drafts, strict=True):
            self._check(request, draft)
            if tuple(request.token_ids) != ids:
                self.faults.append("the request's token ids were changed")
            self.proposals.append(Proposal(self._num_calls, request.sequence_id, ids, draft))
        return drafts

    def _check(self, request: DraftRequest, draft: Draft) -> None:
        if len(draft.token_ids) > request.wanted:
            self.faults.append(f"{len(draft.token_ids)} guesses where {request.wanted} were wanted")
        if draft.probabilities is not None and len(draft.probabilities) != len(draft.token_ids):
            self.faults.append(f"{len(draft.probabilities)} rows of probabilities, {len(draft.token_ids)} guesses")
        if self.num_ids is not None:
            self.strays += [token for token in draft.token_ids if not 0 <= token < self.num_ids]

    def observe(self, verified: Sequence[Verified], cost: StepCost) -> None:
        """Count."""
        self.drafted += sum(one.drafted for one in verified)
        self.accepted += sum(one.accepted for one in verified)
        self._passing("observe", lambda: self.inner.observe(verified, cost))

    def forget(self, sequence_id: SequenceId) -> None:
        """Count."""
        self.entered.pop(sequence_id, None)
        self._passing("forget", lambda: self.inner.forget(sequence_id))

    def stats(self) -> Mapping[str, Any]:
        """Pass it on."""
        return self.inner.stats()

    def stop(self) -> None:
        """Pass it on."""
        self._passing("stop", self.inner.stop)

    def _passing(self, doing: str, call: Callable[[], None]) -> None:
        """An engine goes on without a drafter that fails, so that its failure must be noted here."""
        try:
            call()
        except Exception as error:
            self.faults.append(f"{doing}: {type(error).__name__}: {error}")
            raise


class _Plugin:
    """Offers one drafter under the key `watched`."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    @hookimpl
    def provide_drafters(self) -> list[Provider]:
        return [self._provider]


def watching(provider: Provider) -> object:
    """Return a plugin whose drafter `watched` is the provider's, in a WatchedDrafter."""

    def build(context: DrafterContext) -> WatchedDrafter:
        return WatchedDrafter(provider.build(context), context.num_ids, lambda: provider.build(context))

    return _Plugin(evolve(provider, key="watched", build=build))
