"""What a step costs, as a function of its tokens: measured, robust to noise, with a shape assumed where unknown."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

from attrs import Factory, define

#: A step of this many tokens is assumed to cost twice what reading the weights does, until it is measured.
KNEE = 8
#: Samples of a bucket that its median is taken over.
SAMPLES = 9
#: Steps that the pace is the median of.
PACES = 5
#: Steps are at most so many times slower, or faster, than they were at first.
MAX_PACE = 1000.0
#: A first sample so far above what was expected says more of the first time than of the size.
SLOW = 1.25
#: Clocks can stand still between two readings.
TICK_S = 1e-9
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
    """Seconds of a step by its tokens: C(T) = assumed(T) * ratio(T) * pace.

    `ratio` is, at a bucket that was measured, the median of its last samples over the assumed cost; between two of them
    it is interpolated, and beyond the outermost it is theirs; but past the largest, cost grows at least as fast as it
    did from the smallest to the largest. `pace` is the median, over the last steps, of what a step took over what it
    was known to take: when the machine is busy or contexts have grown, all steps take longer, and that says nothing of
    how many tokens to run. Samples are taken at the pace of their time. The first sample of a bucket is left out where
    it is above what was expected: what runs for the first time is slow.
    """

    _samples: dict[int, deque[float]] = Factory(dict)
    _points: list[tuple[int, float]] = Factory(list)
    _paces: deque[float] = Factory(lambda: deque(maxlen=PACES))

    def add(self, num_tokens: int, seconds: float) -> bool:
        """Take in what a step took; return whether it is trusted."""
        key, sample = bucket(num_tokens), max(seconds, TICK_S) / self.pace
        usual = self._usual(key)
        if key not in self._samples:
            self._samples[key] = deque(maxlen=SAMPLES)
            if not self._points or sample > SLOW * usual:
                return False
        elif self._samples[key]:
            self._paces.append(min(max(max(seconds, TICK_S) / usual, 1 / MAX_PACE), MAX_PACE))
        self._samples[key].append(sample)
        self._points = sorted((key, median(found) / assumed(key)) for key, found in self._samples.items() if found)
        return True

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points)

    @property
    def pace(self) -> float:
        """How much longer steps take of late than when they were first measured."""
        return median(self._paces) if self._paces else 1.0

    def seconds(self, num_tokens: int) -> float:
        """Return C(T); the assumed shape alone where nothing was measured."""
        return self._usual(num_tokens) * self.pace

    def _usual(self, num_tokens: int) -> float:
        usual = assumed(num_tokens) * self._ratio(num_tokens)
        if len(self._points) < 2 or num_tokens <= self._points[-1][0]:
            return usual
        (low, first), (high, last) = self._points[0], self._points[-1]
        slope = (assumed(high) * last - assumed(low) * first) / (high - low)
        return max(usual, assumed(high) * last + slope * (num_tokens - high))

    def _ratio(self, num_tokens: int) -> float:
        if not self._points:
            return 1.0
        right = bisect_left(self._points, (num_tokens, 0.0))
        if right in (0, len(self._points)):
            return self._points[min(right, len(self._points) - 1)][1]
        (low, before), (high, after) = self._points[right - 1 : right + 1]
        return before + (num_tokens - low) / (high - low) * (after - before)

    def measured(self) -> dict[int, float]:
        """Return bucket -> seconds at today's pace, for the buckets that were measured."""
        return {key: assumed(key) * ratio * self.pace for key, ratio in self._points}
