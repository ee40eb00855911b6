"""Cutting a step into microbatches, which are in flight at once, one a stage (Huang et al. 2019, GPipe).

Every rank cuts the same plan in the same way, so that none has to tell another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from attrs import evolve, frozen

from intarsia.types import Row, RowResult, SequenceId, Want

#: A prompt is not cut into pieces of fewer tokens: each costs a launch of every kernel.
_SHORTEST = 8


@frozen
class Microbatch:
    """Rows, or pieces of rows, that go through a stage together."""

    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.token_ids) for row in self.rows)


def cut(rows: Sequence[Row], count: int, *, cuts_rows: bool) -> tuple[Microbatch, ...]:
    """Return at most `count` microbatches of about as many tokens each, none of them empty, in the rows' order.

    A long row is cut where `cuts_rows` says so: its tokens need keys and values of those before it alone, and a stage
    runs microbatches in their order. What is verified, or followed by a chosen token, stays in its last piece.
    """
    bounds = [0, *accumulate(len(row.token_ids) for row in rows)]
    marks = _marks(rows, bounds, count, cuts_rows=cuts_rows)
    found: list[list[Row]] = []
    for row, first in zip(rows, bounds, strict=False):
        for piece in _pieces(row, [mark - first for mark in marks]):
            if not found or first + piece.start - row.start in marks:
                found.append([])
            found[-1].append(piece)
    return tuple(Microbatch(tuple(each)) for each in found)


def _marks(rows: Sequence[Row], bounds: Sequence[int], count: int, *, cuts_rows: bool) -> set[int]:
    """Return the tokens, counted over all rows, before which a microbatch ends."""
    total, marks, last = bounds[-1], set[int](), 0
    count = min(count, total)
    for part in range(1, count):
        mark = total * part // count
        index = min(bisect_right(bounds, mark) - 1, len(rows) - 1)
        first, stop = bounds[index], bounds[index + 1]
        tail = max(_SHORTEST, rows[index].num_drafts + 1)
        if not (cuts_rows and mark - max(first, last) >= _SHORTEST and stop - mark >= tail):
            mark = first if mark - first < stop - mark else stop
        if last < mark < total:
            marks.add(mark)
            last = mark
    return marks


def _pieces(row: Row, marks: Iterable[int]) -> Iterator[Row]:
    """Yield a row's pieces: all but the last choose nothing."""
    length = len(row.token_ids)
    edges = [0, *sorted(mark for mark in marks if 0 < mark < length), length]
    for begin, stop in pairwise(edges):
        if stop == length:
            yield evolve(row, token_ids=row.token_ids[begin:], start=row.start + begin) if begin else row
        else:
            yield evolve(
                row,
                token_ids=row.token_ids[begin:stop],
                start=row.start + begin,
                num_drafts=0,
                drafts_wanted=0,
                want=Want.NONE,
            )


def joined(rows: Sequence[Row], results: Iterable[RowResult]) -> list[RowResult]:
    """Put the results of pieces together again, one a row of the plan.

    Args:
        rows: the plan's.
        results: of all microbatches, in their order.
    """
    whole: dict[SequenceId, RowResult] = {}
    for result in results:
        before = whole.get(result.sequence_id)
        if before is not None:
            scores, error = before.prompt_logprobs + result.prompt_logprobs, before.error or result.error
            result = evolve(result, prompt_logprobs=scores, error=error)
        whole[result.sequence_id] = result
    return [whole[row.sequence_id] for row in rows]
