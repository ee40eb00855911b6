"""Claims of attention backends: what a query sees, and what does not reach it."""

from __future__ import annotations

from itertools import product

import torch
from attrs import evolve

from intarsia.testing.attention_case import AttentionCase, grown
from intarsia.testing.attention_rows import attention_of

__all__ = ["VisibilityClaims"]


class VisibilityClaims(AttentionCase):
    """Keys that are seen, and memory that is not."""

    def test_unused_slots_and_pages_are_not_read(self) -> None:
        """Slots without a token, and pages of no row, change nothing, whatever lies there: NaN, infinity, a number."""
        for trial in self.fitting(attention_of(6, 2, 16), attention_of(6, 2, 16, window=9)):
            rows = trial.rows(self.rows)
            for rest, order in product((torch.nan, torch.inf, 1e4), trial.orders):
                trial.check(rows, rest=rest, order=order, page_size=7 if 7 in self.page_sizes else 16)

    def test_no_query_sees_a_later_token(self) -> None:
        """A token behind a query in its own row does not reach it, however large it is."""
        for trial in self.fitting(attention_of(6, 2, 16)):
            rows = trial.rows([(0, 2), (0, 17), (20, 5), (40, 80), (129, 4)])
            # What a query sees can have any score, far below that by which the rest is hidden.
            low = [evolve(row, queries=row.queries.abs() * 200, keys=row.keys.abs() * -200) for row in rows]
            for given, factor in ((rows, 30.0), (rows, -30.0), (low, 1.0)):
                outs = trial.attend([grown(row, slice(row.stop - 1, None), factor) for row in given])
                before = [row.cut(row.start, row.stop - 1) for row in given]
                trial.check_outs([out[:-1] for out in outs], before)

    def test_no_query_sees_a_key_behind_its_window(self) -> None:
        """A key that a window has just left behind does not reach a query, however large it is."""
        for trial in self.fitting(*(attention_of(6, 2, 16, window=window) for window in (1, 5, 16, 33))):
            window = trial.spec.window
            assert window is not None
            for factor in (30.0, -30.0):
                rows = trial.rows([(40, 1), (47, 3), (130, 1), (65, 30)])
                loud = [grown(row, slice(0, row.start - window + 1), factor) for row in rows]
                trial.check_outs(trial.attend(loud), rows)

    def test_a_key_that_is_not_seen_weighs_nothing(self) -> None:
        """A query that shares a batch with one that sees a key does not see it: not even the largest value shows."""
        for trial in self.fitting(attention_of(6, 2, 16), attention_of(6, 2, 16, window=9)):
            (row,) = trial.rows([(0, 60)])
            values = row.values.clone()
            values[30] = torch.finfo(values.dtype).max / 8
            (out,) = trial.attend([evolve(row, values=values)])
            trial.check_outs([out[:30]], [row.cut(0, 30)])
            if trial.spec.window is not None:
                trial.check_outs([out[39:]], [row.cut(39, 60)])

    def test_what_is_cached_counts_like_what_is_new(self) -> None:
        """A prompt in chunks of any length gives what it gives at once, within rounding."""
        for trial in self.fitting(attention_of(6, 2, 16), attention_of(6, 2, 16, window=20)):
            (whole,) = trial.rows([(0, 140)])
            trial.check([whole])
            for length in self.chunks:
                trial.check(whole.chunks(length), scatter=length)

    def test_padding_changes_no_row(self) -> None:
        """Rows of padding, whose keys lie in the spare page and nowhere, leave every other row right."""
        for trial in self.fitting(attention_of(6, 2, 16), attention_of(6, 2, 16, window=9)):
            rows = trial.rows(self.rows)
            for padding, few in ((1, rows[:1]), (5, rows), (3, [row for row in rows if row.length == 1])):
                trial.check(few, padding=padding)

    def test_what_is_not_a_number_shows_in_its_row_alone(self) -> None:
        """NaN among a row's own keys or values shows in that row, and reaches no other."""
        for trial in self.fitting(attention_of(4, 2, 16)):
            for entry, what in product(trial.entries, ("keys", "values")):
                well, sick, other = trial.rows([(20, 3), (70, 3), (130, 1)])
                getattr(sick, what)[5, 0, 3] = torch.nan
                outs = trial.attend([well, sick, other], entry=entry)
                assert outs[1][:, :2].isnan().any(dim=-1).all(), (
                    f"NaN among a row's {what} ({entry}) does not show in its result"
                )
                trial.check_outs([outs[0], outs[2]], [well, other], entry=entry)
