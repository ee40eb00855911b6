"""What an engine did step by step, seen through the observing hooks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from intarsia.hookspecs import hookimpl

if TYPE_CHECKING:
    from intarsia.protocols import EngineHandle, Parts
    from intarsia.types import Output, StepResult


@frozen
class TracedStep:
    """One step, at its end.

    Attributes:
        at_s: seconds since the recording began.
        rows: sequences that ran.
        tokens: generated.
        used, cached: pages that sequences hold, and pages that are kept for their content alone.
    """

    at_s: float
    rows: int
    tokens: int
    used: int
    cached: int


@define(eq=False)
class Trace:
    """A plugin that records steps between `start` and `take`. It reads the cache's books, which takes time."""

    _parts: Parts | None = field(default=None, init=False)
    _steps: list[TracedStep] | None = field(default=None, init=False)
    _begun: float = field(default=0.0, init=False)

    @hookimpl
    def engine_started(self, engine: EngineHandle, parts: Parts) -> None:
        """Remember whose books to read."""
        del engine
        self._parts = parts

    @hookimpl
    def step_finished(self, result: StepResult, outputs: tuple[Output, ...]) -> None:
        """Record a step."""
        if self._steps is None or self._parts is None:
            return
        books = self._parts.cache.stats()
        self._steps.append(
            TracedStep(
                time.perf_counter() - self._begun,
                len(result.rows),
                sum(len(output.token_ids) for output in outputs),
                books.used,
                books.cached,
            )
        )

    def start(self) -> None:
        """Begin to record."""
        self._steps = []
        self._begun = time.perf_counter()

    def take(self) -> list[TracedStep]:
        """End the recording, and return it."""
        steps, self._steps = self._steps, None
        assert steps is not None, "start() comes first"
        return steps
