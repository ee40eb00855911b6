"""Figures of speculation, counted from plans and results: whoever drafts, and wherever the model runs."""

from __future__ import annotations

from typing import Any

from attrs import define

from intarsia.protocols import Parts
from intarsia.saying import said
from intarsia.types import BatchPlan, StepResult


@define
class Speculation:
    """Sums over all steps so far.

    Attributes:
        drafted: drafts that were verified.
        accepted: of these, how many were accepted.
        num_verified: rows that had drafts.
        num_chosen: rows that chose tokens, with drafts or without.
        num_tokens: tokens that they chose.
        target_s: seconds for running and choosing, in steps that verified drafts.
        draft_s: seconds for drafting.
        failures: steps in which the drafter failed.
        last_failure: what it failed with last.
    """

    drafted: int = 0
    accepted: int = 0
    num_verified: int = 0
    num_chosen: int = 0
    num_tokens: int = 0
    target_s: float = 0.0
    draft_s: float = 0.0
    failures: int = 0
    last_failure: str | None = None

    def count(self, plan: BatchPlan, result: StepResult) -> None:
        """Add a step."""
        verifies = False
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            if not row_result.token_ids:
                continue
            self.num_chosen += 1
            self.num_tokens += len(row_result.token_ids)
            if row.num_drafts:
                verifies = True
                self.num_verified += 1
                self.drafted += row.num_drafts
                self.accepted += len(row_result.token_ids) - 1
        if verifies:
            self.target_s += result.target_s
        self.draft_s += result.draft_s
        if result.draft_error is not None:
            self.failures += 1
            self.last_failure = result.draft_error

    def stats(self, parts: Parts) -> dict[str, Any]:
        """Return the figures.

        Keys:
            drafter, verify: the key of the drafter, and how its drafts are verified.
            drafted, accepted: drafts.
            mean_accepted: accepted drafts a row that had some, and None before the first.
            tokens_per_step: chosen tokens a row and step, 1 without speculation, and None before the first.
            draft_s, verify_s: seconds for drafting, and for running and choosing in the steps that verified drafts.
            failures, last_failure: steps in which the drafter failed, and what it said last.
            own: the drafter's own figures.
        """
        assert parts.drafter is not None
        try:
            own = dict(parts.drafter.stats())
        except Exception as error:  # a drafter costs its figures alone
            own = {"error": said(error)}
        return {
            "drafter": parts.selection("drafter").provider.key,
            "verify": parts.engine.verify,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_accepted": self.accepted / self.num_verified if self.num_verified else None,
            "tokens_per_step": self.num_tokens / self.num_chosen if self.num_chosen else None,
            "draft_s": self.draft_s,
            "verify_s": self.target_s,
            "failures": self.failures,
            "last_failure": self.last_failure,
            "own": own,
        }
