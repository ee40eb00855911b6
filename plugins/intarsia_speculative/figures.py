"""What drafts came to: the counts behind a drafter's `stats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define

from intarsia.protocols import StepCost, Verified


@define
class Figures:
    """Counts since the start.

    Attributes:
        steps: with rows; `drafting_steps` are those that verified drafts.
        drafts: non-empty ones.
        drafted, accepted: guesses.
        draft_s: seconds in drafting.
        verify_s: seconds of the steps that verified drafts.
    """

    steps: int = 0
    drafting_steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def add(self, verified: Sequence[Verified], cost: StepCost) -> None:
        """Count a step."""
        tried = [one for one in verified if one.drafted]
        self.steps += 1
        self.drafts += len(tried)
        self.drafted += sum(one.drafted for one in tried)
        self.accepted += sum(one.accepted for one in tried)
        self.draft_s += cost.draft_s
        if tried:
            self.drafting_steps += 1
            self.verify_s += cost.target_s

    def plain(self) -> dict[str, Any]:
        """Return the counts, and accepted guesses a draft."""
        return {
            "steps": self.steps,
            "drafting_steps": self.drafting_steps,
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_accepted": round(self.accepted / self.drafts, 4) if self.drafts else 0.0,
            "draft_s": round(self.draft_s, 6),
            "verify_s": round(self.verify_s, 6),
        }
