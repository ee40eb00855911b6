"""When tokens came: time to first token, inter-token latency, end-to-end latency."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from attrs import frozen

#: What each figure means, as it is printed.
DEFINITIONS = {
    "ttft": "TTFT, time to first token: from a request's arrival to the end of the step that brought its first token",
    "itl": "ITL, inter-token latency: from a token to the next of its answer; tokens of one step share the gap",
    "e2e": "E2E, end-to-end latency: from a request's arrival to the end of the step that brought its last token",
}
PERCENTILES = (50, 99)


@frozen
class Latencies:
    """Seconds: one TTFT and one E2E a request, one ITL for every token but an answer's first.

    TPOT is one a request of several tokens: from its first to its last, over those behind the first.
    """

    ttft: tuple[float, ...] = ()
    itl: tuple[float, ...] = ()
    e2e: tuple[float, ...] = ()
    tpot: tuple[float, ...] = ()

    @classmethod
    def of(cls, arrived: float, answers: Iterable[Sequence[tuple[float, int]]]) -> Latencies:
        """Read the latencies of requests that arrived at once.

        Args:
            arrived: when, in seconds of some clock.
            answers: for each request, in order, (when a step returned, how many of its tokens that step brought).
        """
        return cls.of_each((arrived, steps) for steps in answers)

    @classmethod
    def of_each(cls, requests: Iterable[tuple[float, Sequence[tuple[float, int]]]]) -> Latencies:
        """Read the latencies of requests that arrived each at a time of its own: (when, its answer as in `of`)."""
        ttft, itl, e2e, tpot = [], [], [], []
        for arrived, steps in requests:
            ttft.append(steps[0][0] - arrived)
            e2e.append(steps[-1][0] - arrived)
            itl += [0.0] * (steps[0][1] - 1)
            for (before, _), (now, count) in itertools.pairwise(steps):
                itl += [(now - before) / count] * count
            behind = sum(count for _, count in steps) - 1
            if behind:
                tpot.append((steps[-1][0] - steps[0][0]) / behind)
        return cls(tuple(ttft), tuple(itl), tuple(e2e), tuple(tpot))

    def __add__(self, other: Latencies) -> Latencies:
        return Latencies(self.ttft + other.ttft, self.itl + other.itl, self.e2e + other.e2e, self.tpot + other.tpot)

    def figures(self) -> dict[str, dict[str, float]]:
        """Return figure -> `p50`, `p99` in seconds, interpolated linearly; a figure without values is left out."""
        return {
            name: {f"p{q}": float(np.percentile(getattr(self, name), q)) for q in PERCENTILES}
            for name in DEFINITIONS
            if getattr(self, name)
        }
