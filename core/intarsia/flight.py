"""The steps in flight: submitted, not collected yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from attrs import define, evolve, field, frozen

from intarsia.sequence import Sequence
from intarsia.types import BatchPlan, RowResult, StepResult


@frozen(eq=False)
class Step:
    """A step in flight.

    Attributes:
        sequences: whose rows they are, one a row. Until the step is collected, another sequence can have taken the id.
        begun: when it was planned, in seconds of the engine's clock.
    """

    plan: BatchPlan
    sequences: tuple[Sequence, ...]
    begun: float

    def brought(self, result: StepResult, is_live: Callable[[Sequence], bool]) -> tuple[BatchPlan, StepResult]:
        """Return plan and result without the rows of sequences that ended while the step was in flight."""
        if all(map(is_live, self.sequences)):
            return self.plan, result
        rows, results = [], list[RowResult]()
        for row, row_result, sequence in zip(self.plan.rows, result.rows, self.sequences, strict=True):
            if is_live(sequence):
                rows.append(row)
                results.append(row_result)
        return evolve(self.plan, rows=tuple(rows)), evolve(result, rows=tuple(results))


def is_empty(plan: BatchPlan) -> bool:
    """Whether a plan leaves an executor nothing to do or to hear."""
    return not (plan.rows or plan.entered or plan.left or plan.moves)


@define
class Flight:
    """Steps in the order of their submission."""

    _steps: deque[Step] = field(factory=deque, init=False)
    _landed: float = field(default=0.0, init=False)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Take a step that was submitted."""
        self._steps.append(step)

    def take(self) -> Step:
        """Return the oldest step, which is collected now."""
        return self._steps.popleft()

    def seconds(self, step: Step) -> float:
        """Return what a step took, now that it is over, beyond what overlapped the one before; their sum is time."""
        since, self._landed = max(step.begun, self._landed), time.perf_counter()
        return self._landed - since

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()
