"""What a step's rows ask of the kernels, as numbers: pieces of work and page tables, in one tensor.

All of it comes from the rows' own lengths: a row's pieces are the same whatever rows are beside it. Counts are rounded
up to a few sizes and filled up with pieces of no work, so that steps of about equal size launch the same grids over
tensors of the same shapes, and a CUDA graph can be replayed.

Shape legend: R rows, I pieces of work, T tokens, G query heads a kv head.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

Ints: TypeAlias = npt.NDArray[np.int64]
#: Numbers of one piece of work.
RECORD = 8
#: Rows of so many packed queries at most are decoded: one token, or a few that are verified.
DECODED = 64


@frozen(eq=False)
class Rows:
    """Per row of a step: its first token, how many it has, and the position of the first; int64 (R,)."""

    first: Ints
    count: Ints
    start: Ints

    @classmethod
    def of(cls, bounds: Sequence[int], starts: Sequence[int]) -> Rows:
        """Read a batch's bounds and starts."""
        spans = list(pairwise(bounds))
        counts = [stop - first for first, stop in spans]
        return cls(*(np.array(one, dtype=np.int64) for one in ([first for first, _ in spans], counts, starts)))

    def decoded(self, group_size: int) -> npt.NDArray[np.bool_]:
        """Return which rows are decoded, (R,): it depends on a row's own count alone."""
        decoded: npt.NDArray[np.bool_] = (self.count == 1) | (self.count * group_size <= DECODED)
        return decoded


@frozen(eq=False)
class Tables:
    """Page tables of one cache group end to end, and where each row's begins, (R,)."""

    pages: array[int]
    begins: Ints

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]]) -> Tables:
        """Lay tables end to end."""
        return cls(array("i", chain.from_iterable(tables)), _before(np.array([len(t) for t in tables], dtype=np.int64)))


def _before(counts: Ints) -> Ints:
    """Return for each entry the sum of those before it."""
    return np.cumsum(counts) - counts


def _each(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for entries that stand for so many pieces, each piece's entry and its number within it."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - np.repeat(_before(counts), counts)


def _records(*columns: Ints | int) -> Ints:
    """Put columns side by side in records, (I, RECORD)."""
    length = next(len(column) for column in columns if isinstance(column, np.ndarray))
    records = np.zeros((length, RECORD), dtype=np.int64)
    for index, column in enumerate(columns):
        records[:, index] = column
    return records


def whole_rows(rows: Rows, tables: Tables, chosen: npt.NDArray[np.bool_], group_size: int, num_packed: int) -> Ints:
    """Return records (I, RECORD) of `chosen` rows in tiles of `num_packed` packed queries, those of most keys first."""
    index = np.flatnonzero(chosen & (rows.count > 0))
    entry, tile = _each(-(-rows.count[index] * group_size // num_packed))
    row = index[entry]
    last = np.minimum((tile + 1) * num_packed // group_size, rows.count[row])
    order = np.argsort(-(rows.start[row] + last), kind="stable")
    row, tile = row[order], tile[order]
    return _records(rows.first[row], rows.count[row], rows.start[row], tables.begins[row], tile, 0, -1)


@frozen(eq=False)
class Splits:
    """Rows that are decoded.

    Attributes:
        items: records of `attend_tile`.
        merges: records of `merge_splits`: tokens whose row has more than one split.
        num_slots: places for partial results.
    """

    items: Ints
    merges: Ints
    num_slots: int

    @classmethod
    def of(
        cls,
        rows: Rows,
        tables: Tables,
        chosen: npt.NDArray[np.bool_],
        group_size: int,
        num_packed: int,
        split: int,
        window: int | None,
    ) -> Splits:
        """Cut `chosen` rows into tiles of `num_packed` packed queries and splits of `split` keys."""
        index = np.flatnonzero(chosen & (rows.count > 0))
        first, count, start = rows.first[index], rows.count[index], rows.start[index]
        lowest = np.zeros_like(start) if window is None else np.maximum(start - window + 1, 0) // split
        splits = -(-(start + count) // split) - lowest
        pieces = -(-count * group_size // num_packed) * splits
        # One split is the whole row, and needs no place.
        placed = np.where(splits > 1, pieces, 0)
        begin = _before(placed)
        entry, piece = _each(pieces)
        place = np.where(splits[entry] > 1, begin[entry] + piece, -1)
        tile, number = piece // splits[entry], lowest[entry] + piece % splits[entry]
        items = _records(first[entry], count[entry], start[entry], tables.begins[index[entry]], tile, number, place)
        token, query = _each(np.where(splits > 1, count, 0))
        merges = _records(first[token] + query, query, begin[token], lowest[token], splits[token])
        return cls(items, merges, int(placed.sum()))


@frozen
class Room:
    """How many pieces of work there is room for, of one cache group and number of query heads a kv head."""

    pages: int
    whole: int
    items: int
    merges: int
    slots: int

    @classmethod
    def around(cls, tables: Tables, whole: Ints, splits: Splits) -> Room:
        """Return a little more than a step takes."""
        counts = (len(tables.pages), len(whole), len(splits.items), len(splits.merges), splits.num_slots)
        return cls(*map(rounded, counts))

    @classmethod
    def of_decoding(cls, num_rows: int, pages_a_row: int, tiles: int, splits: int) -> Room:
        """Return the most that rows of one token take: so many tiles each, of up to so many splits; 0 is no splits."""
        pieces, is_merged = num_rows * tiles, splits > 1
        whole, items = (0, pieces * splits) if splits else (pieces, 0)
        counts = (num_rows * pages_a_row, whole, items, num_rows * is_merged, items * is_merged)
        return cls(*map(rounded, counts))


def rounded(count: int) -> int:
    """Return the next of a few sizes, a quarter larger at most from 64 on, a multiple of 16; 0 stays 0."""
    step = max(16, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step


def packed(
    parts: Sequence[Ints | array[int]], room: Sequence[int]
) -> tuple[npt.NDArray[np.int32], list[tuple[int, int]]]:
    """Lay records and page tables end to end, with room for so many each; return the numbers, and where parts lie."""
    spans, stop = [], 0
    for part, count in zip(parts, room, strict=True):
        assert len(part) <= count, (len(part), count)
        width = part.shape[1] if isinstance(part, np.ndarray) else 1
        spans.append((stop, stop + count * width))
        stop = spans[-1][1]
    numbers = np.zeros(stop, dtype=np.int32)
    for (begin, _), part in zip(spans, parts, strict=True):
        flat = np.asarray(part, dtype=np.int32).ravel()
        numbers[begin : begin + len(flat)] = flat
    return numbers, spans
