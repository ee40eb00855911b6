"""Which layers each pipeline stage has: contiguous ranges, balanced by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import TypeAlias

#: Bytes of a stage that has the layers from a start to a stop.
_Size: TypeAlias = Callable[[int, int, int], int]


def stage_sizes(weights: Sequence[int], first: int, last: int, num_stages: int) -> tuple[range, ...]:
    """Return each stage's layers: every layer on exactly one stage, every stage with at least one.

    The largest stage is as small as it can be; among such splits the one of the least sum of squares is taken, and
    among these the one whose first stages have more layers.

    Args:
        weights: bytes of each layer.
        first: bytes that the first stage has besides: the embedding.
        last: bytes that the last stage has besides: the head, which is the embedding again where it is tied.
        num_stages: at most as many as there are layers.
    """
    assert 1 <= num_stages <= len(weights), f"{num_stages} stages of {len(weights)} layers"
    sums = [0, *accumulate(weights)]

    def size(stage: int, start: int, stop: int) -> int:
        ends = first * (stage == 0) + last * (stage == num_stages - 1)
        return sums[stop] - sums[start] + ends

    largest = _largest(len(weights), num_stages, size)

    @cache
    def best(stage: int, start: int) -> tuple[int, int] | None:
        """Return (sum of squares from this stage on, where it stops), or None where it cannot be."""
        if stage == num_stages - 1:
            own = size(stage, start, len(weights))
            return (own * own, len(weights)) if own <= largest else None
        found: tuple[int, int] | None = None
        for stop in range(len(weights) - (num_stages - 1 - stage), start, -1):
            own = size(stage, start, stop)
            rest = best(stage + 1, stop) if own <= largest else None
            if rest is not None and (found is None or own * own + rest[0] < found[0]):
                found = own * own + rest[0], stop
        return found

    ranges, start = [], 0
    for stage in range(num_stages):
        choice = best(stage, start)
        assert choice is not None, "some split has no stage larger than the largest"
        ranges.append(range(start, choice[1]))
        start = choice[1]
    return tuple(ranges)


def _largest(num_layers: int, num_stages: int, size: _Size) -> int:
    """Return the size of the largest stage in the split whose largest stage is smallest."""

    @cache
    def least(stage: int, start: int) -> int:
        if stage == num_stages - 1:
            return size(stage, start, num_layers)
        stops = range(start + 1, num_layers - (num_stages - 1 - stage) + 1)
        return min(max(size(stage, start, stop), least(stage + 1, stop)) for stop in stops)

    return least(0, 0)
