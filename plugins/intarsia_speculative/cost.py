"""What a step costs, as a function of its tokens: measured, robust to noise, with a shape assumed where unknown."""

from __future__ import annotations

from collections import deque
from statistics import median

from attrs import Factory, define

#: A step of this many tokens is assumed to cost twice what reading the weights does, until it is measured.
KNEE = 8
#: Samples of a bucket that its median is taken over.
SAMPLES = 9
#: Up to this many tokens, each count is a bucket of its own; beyond, an eighth of a power of two is one.
FINE = 32


def bucket(num_tokens: int) -> int:
    """Return the largest token count of the bucket."""
    if num_tokens <= FINE:
        return num_tokens
    width = 1 << (num_tokens.bit_length() - 4)
    return -(-num_tokens // width) * width


def assumed(num_tokens: int) -> float:
    """Return the assumed shape of the cost: bound by memory at first, by arithmetic later."""
    return 1 + num_tokens / KNEE


@define
class CostCurve:
    """Seconds of a step by its tokens: C(T) = assumed(T) * ratio(T).

    At a bucket that was measured, ratio is the median of its last samples over the assumed cost. Between two of them
    it is interpolated linearly, and beyond the outermost it is theirs. The first sample of a bucket is left out: what
    runs for the first time is slow.
    """

    _samples: dict[int, deque[float]] = Factory(dict)
    _points: list[tuple[int, float]] = Factory(list)
    _last_step: dict[int, int] = Factory(dict)
    _step: int = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take in what a step took."""
        key = bucket(num_tokens)
        self._step += 1
        self._last_step[key] = self._step
        if key not in self._samples:
            self._samples[key] = deque(maxlen=SAMPLES)
            return
        self._samples[key].append(seconds)
        self._points = sorted((key, median(found) / assumed(key)) for key, found in self._samples.items() if found)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points)

    def age(self, num_tokens: int) -> int | None:
        """Return how many samples ago this bucket was last measured; None if it never was."""
        last = self._last_step.get(bucket(num_tokens))
        return None if last is None else self._step - last

    def seconds(self, num_tokens: int) -> float:
        """Return C(T); the assumed shape alone where nothing was measured."""
        return assumed(num_tokens) * self._ratio(num_tokens)

    def _ratio(self, num_tokens: int) -> float:
        if not self._points:
            return 1.0
        before = self._points[0]
        for point in self._points:
            if point[0] >= num_tokens:
                if point[0] == before[0] or num_tokens <= before[0]:
                    return point[1]
                part = (num_tokens - before[0]) / (point[0] - before[0])
                return before[1] + part * (point[1] - before[1])
            before = point
        return before[1]

    def measured(self) -> dict[int, float]:
        """Return bucket -> seconds, for the buckets that were measured."""
        return {key: median(found) for key, found in sorted(self._samples.items()) if found}
