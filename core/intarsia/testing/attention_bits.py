"""Claims of attention backends: what a row's bits depend on, at the level of invariance that is promised."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from intarsia.testing.attention_case import AttentionCase, Trial
from intarsia.testing.attention_rows import AttentionRow, attention_of
from intarsia.types import AttentionSpec, Invariance, Unfit

__all__ = ["BitClaims"]


#: Layers that see all, and layers that do not.
_SPECS = (attention_of(6, 2, 64), attention_of(4, 4, 20, window=9))
#: Windows that end within a tile and beyond one, and scores that are bent.
_CUT = (*_SPECS, attention_of(5, 1, 33, window=133), attention_of(6, 2, 16, soft_cap=5.0))


class BitClaims(AttentionCase):
    """Equal bits."""

    def _promised(self, specs: Sequence[AttentionSpec], *levels: Invariance) -> Iterator[tuple[Trial, str]]:
        """Yield the backend where it promises one of these levels, for each layer that it fits, with an entry format.

        That is the queries' dtype, and int8 where it reads that.
        """
        for number, spec in enumerate(specs):
            if number and all(isinstance(self.fit(dtype, spec), Unfit) for dtype in self.dtypes):
                continue
            for trial in self.promising(spec, *levels):
                for entry in dict.fromkeys((trial.placement().entry, "int8")):
                    if entry in trial.entries:
                        yield trial, entry

    def test_its_neighbours_show_in_no_bit(self) -> None:
        """A row has the same bits alone, again, and among any neighbours, where `neighbours` or more is promised."""
        for trial, entry in self._promised(_SPECS, "neighbours", "bitwise"):
            rows = trial.rows([*self.rows, (0, 150), (300, 1)])
            alone = [trial.attend([row], entry=entry)[0] for row in rows]
            draw = random.Random(1)
            for number in range(8):
                among = draw.sample(range(len(rows)), draw.randint(2, len(rows)))
                outs = trial.attend([rows[i] for i in among], entry=entry, padding=number % 2)
                for i, out in zip(among, outs, strict=True):
                    _same(out, alone[i], rows[i], f"among {len(among)} rows")

    def test_where_its_pages_lie_shows_in_no_bit(self) -> None:
        """A row has the same bits wherever its pages lie, where `neighbours` or more is promised."""
        for trial, entry in self._promised(_SPECS, "neighbours", "bitwise"):
            rows = trial.rows(self.rows)
            alone = trial.attend(rows, entry=entry)
            for scatter in range(4):
                outs = trial.attend(rows, entry=entry, scatter=scatter)
                for out, right, row in zip(outs, alone, rows, strict=True):
                    _same(out, right, row, "with its pages elsewhere")

    def test_pages_that_it_shares_show_in_no_bit(self) -> None:
        """A row has the same bits whether others have its first pages or their own, where `neighbours` is promised."""
        for trial, entry in self._promised(_SPECS, "neighbours", "bitwise"):
            for shared in (64, 128):
                rows = trial.rows([(130, 1), (150, 3), (300, 1), (131, 1), (140, 20)])
                rows = [rows[0], *(row.behind(rows[0], shared) for row in rows[1:])]
                apart = trial.attend(rows, entry=entry, scatter=1)
                for among in (rows, rows[::-1], rows[1:3]):
                    outs = trial.attend(among, entry=entry, scatter=2, shared=shared)
                    for out, row in zip(outs, among, strict=True):
                        right = next(bits for bits, other in zip(apart, rows, strict=True) if other is row)
                        _same(out, right, row, f"with {shared} tokens in pages of others")

    def test_its_chunks_show_in_no_bit(self) -> None:
        """However a prompt is cut into chunks, its bits are the same, where `bitwise` is promised."""
        for trial, entry in self._promised(_CUT, "bitwise"):
            neighbours = trial.rows([(100, 1), (0, 9)], seed=50)
            (whole,) = trial.rows([(0, 300)], seed=7)
            (bits,) = trial.attend([whole], entry=entry)
            draw = random.Random(2)
            for length in self.chunks:
                pieces = whole.chunks(length)
                some = draw.sample(pieces, min(8, len(pieces)))
                outs = trial.attend([neighbours[0], *some, neighbours[1]], entry=entry, scatter=length)
                for out, piece in zip(outs[1:-1], some, strict=True):
                    _same(out, bits[piece.start : piece.stop], piece, f"in chunks of {length}")


def _same(out: torch.Tensor, right: torch.Tensor, row: AttentionRow, how: str) -> None:
    assert torch.equal(out, right), (
        f"{how}, a row of {row.length} tokens from position {row.start} on has other bits: off by "
        f"{float((out.float() - right.float()).abs().max()):.2g}, {str(out.dtype).removeprefix('torch.')}"
    )
