"""An executor's dealings with its drafter: what was proposed, what became of it, what it took.

What a drafter fails with costs its guesses for that step and no more: the step's tokens are the target's, and whole
without them. It does not pass in silence: it is logged once, and every failure is reported with the step's result.

Shape legend: k drafts, V vocab.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from attrs import define, evolve, field

from intarsia.errors import IntarsiaError, PluginError
from intarsia.protocols import Drafter, DraftRequest, StepCost, Target, Verified
from intarsia.sampling.rejection import trusted
from intarsia.saying import is_raised, said
from intarsia.times import Times
from intarsia.types import Draft, Entered, Row, RowResult, SequenceId

_log = logging.getLogger(__name__)


@define
class Drafting:
    """Asks a drafter, and keeps what it said until it is verified.

    Attributes:
        drafter: whom to ask.
        num_ids: ids from here on are never run.
        keeps_probabilities: whether what drafts were drawn from is read when they are verified.
        title: what messages call it: the part, its plugin, distribution and version.
        name: what it is called where `times` counts its seconds.
    """

    drafter: Drafter
    num_ids: int
    keeps_probabilities: bool
    title: str = "drafter"
    name: str = "drafter"
    times: Times = field(factory=Times)
    _proposed: dict[SequenceId, Draft] = field(factory=dict, init=False)
    _draft_s: float = field(default=0.0, init=False)
    _error: str | None = field(default=None, init=False)
    _logged: bool = field(default=False, init=False)

    def start(self, target: Target) -> None:
        """Let the drafter get ready; what it raises here ends the engine's start."""
        try:
            self.drafter.start(target)
        except IntarsiaError:
            raise
        except BaseException as error:
            if not is_raised(error):
                raise
            raise PluginError(f"{self.title} failed in start: {said(error)}") from error

    def stop(self) -> None:
        """Let the drafter free what it took."""
        with self._excused("stop"):
            self.drafter.stop()

    def enter(self, entered: Entered) -> None:
        """Tell it of a sequence, whose proposals from before a preemption are void."""
        self.drop(entered.sequence_id)
        with self._excused("enter"):
            self.drafter.enter(entered)

    def drop(self, sequence_id: SequenceId) -> None:
        """Forget what was proposed for a sequence."""
        self._proposed.pop(sequence_id, None)

    def forget(self, sequence_id: SequenceId) -> None:
        """Tell it that a sequence left."""
        self.drop(sequence_id)
        with self._excused("forget"):
            self.drafter.forget(sequence_id)

    def probabilities(self, rows: Sequence[Row]) -> Mapping[SequenceId, torch.Tensor]:
        """Return what the drafts of these rows were drawn from (k, V), float64, where it is known and can be true."""
        if not self.keeps_probabilities:
            return {}
        found = {}
        for row in rows:
            draft = self._proposed.get(row.sequence_id)
            if draft is None or draft.probabilities is None or not row.num_drafts:
                continue
            # A scheduler may cut proposals short. What it made up itself came from nowhere.
            if row.token_ids[-row.num_drafts :] == draft.token_ids[: row.num_drafts]:
                found[row.sequence_id] = draft.probabilities[: row.num_drafts]
        return found

    def observe(self, rows: Sequence[Row], results: Sequence[RowResult], target_s: float) -> None:
        """Tell it what became of its drafts, and what the step took."""
        verified = [
            Verified(sequence_id=row.sequence_id, drafted=row.num_drafts, accepted=len(result.token_ids) - 1)
            for row, result in zip(rows, results, strict=True)
            if row.num_drafts and result.token_ids
        ]
        num_tokens = sum(len(row.token_ids) for row in rows)
        cost = StepCost(num_rows=len(rows), num_tokens=num_tokens, target_s=target_s, draft_s=self._draft_s)
        with self._excused("observe"):
            self.drafter.observe(verified, cost)

    def propose(
        self,
        rows: Sequence[Row],
        results: Sequence[RowResult],
        token_ids: Callable[[SequenceId], Sequence[int]],
    ) -> list[RowResult]:
        """Return the results with proposals for the rows that want some.

        Args:
            rows: the step's.
            results: what it chose, one a row.
            token_ids: gives a sequence's prompt and accepted tokens.
        """
        begun = time.perf_counter()
        asked = [
            DraftRequest(
                sequence_id=row.sequence_id,
                token_ids=token_ids(row.sequence_id),
                wanted=row.drafts_wanted,
                pages=row.pages,
            )
            for row, result in zip(rows, results, strict=True)
            if row.drafts_wanted and result.token_ids
        ]
        for row in rows:
            self.drop(row.sequence_id)
        if asked:
            with self._excused("propose"):
                drafts = self.drafter.propose(asked)
                usable = [self._usable(draft, a.wanted) for a, draft in zip(asked, drafts, strict=True)]
                self._proposed.update(zip((a.sequence_id for a in asked), usable, strict=True))
        self._draft_s = time.perf_counter() - begun
        return [
            evolve(result, drafts=self._proposed[row.sequence_id].token_ids)
            if row.sequence_id in self._proposed
            else result
            for row, result in zip(rows, results, strict=True)
        ]

    @property
    def draft_s(self) -> float:
        """Seconds of the last `propose`."""
        return self._draft_s

    def take_error(self) -> str | None:
        """Return what the drafter failed with since this was asked last."""
        error, self._error = self._error, None
        return error

    def _usable(self, draft: Draft, wanted: int) -> Draft:
        """A drafter can say anything: only ids that exist are run, and no more than were asked for."""
        usable: list[int] = []
        for token in draft.token_ids[:wanted]:
            if not 0 <= token < self.num_ids:
                break
            usable.append(int(token))
        if draft.probabilities is None or not usable or not self.keeps_probabilities:
            return Draft(tuple(usable))
        return Draft(tuple(usable), trusted(draft.probabilities[: len(usable)], self.num_ids))

    @contextmanager
    def _excused(self, doing: str) -> Iterator[None]:
        """Let a step go on without the drafter, and report what it failed with."""
        try:
            with self.times.at(self.name):
                yield
        except BaseException as error:
            if not is_raised(error):
                raise
            self._error = f"{self.title} failed in {doing}: {said(error)}"
            if not self._logged:
                _log.exception("%s; steps go on without its guesses, and this is logged once", self._error)
                self._logged = True
