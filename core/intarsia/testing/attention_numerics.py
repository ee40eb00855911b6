"""Claims of attention backends: every result that `fit` takes on equals float64."""

from __future__ import annotations

from itertools import product

from attrs import evolve

from intarsia.testing.attention_case import AttentionCase
from intarsia.testing.attention_rows import attention_of
from intarsia.testing.claims import hypothesis, unclaimed
from intarsia.types import AttentionSpec, Unfit

__all__ = ["NumericClaims"]

#: Layers that few backends are written for: each is refused, or right.
UNUSUAL: tuple[AttentionSpec, ...] = (
    *(attention_of(2, 1, head_dim) for head_dim in (1, 7, 33, 80, 96, 192, 256, 264, 320)),
    attention_of(71, 1, 16),
    attention_of(12, 3, 24),
    attention_of(4, 2, 16, window=5),
    attention_of(4, 2, 16, soft_cap=1.0),
    attention_of(4, 2, 32, window=20, soft_cap=2.0),
)
_FEW = ((0, 19), (70, 1), (33, 5))


class NumericClaims(AttentionCase):
    """Results against float64."""

    def test_rows_of_every_kind_equal_float64(self) -> None:
        """Prompts, chunks, single tokens and drafts in one batch equal float64, in all dtypes, for heads that fit."""
        specs = [attention_of(*heads, head_dim) for heads, head_dim in product(self.heads, self.head_dims)]
        for trial in self.fitting(*specs):
            trial.check(trial.rows(self.rows), scatter=1)

    def test_pages_of_any_size_can_lie_anywhere(self) -> None:
        """Pages of any size, side by side or scattered, give the same result, in each cache order that it reads."""
        for trial in self.fitting(attention_of(6, 2, 16)):
            rows = trial.rows(self.rows)
            for order, page_size, scatter in product(trial.orders, self.page_sizes, (None, 2)):
                trial.check(rows, order=order, page_size=page_size, scatter=scatter)

    def test_rows_can_share_their_first_pages(self) -> None:
        """Rows whose page tables begin alike, behind one prompt, each go on with their own keys."""
        for trial in self.fitting(attention_of(6, 2, 16), attention_of(4, 4, 20, window=90)):
            for shared, entry in product((16, 80, 144), trial.entries):
                rows = trial.rows([(144, 1), (200, 1), (150, 4), (144, 40), (250, 1), (160, 1)])
                rows = [rows[0], *(row.behind(rows[0], shared) for row in rows[1:])]
                trial.check(rows, shared=shared, entry=entry, scatter=shared)

    def test_entries_of_every_format_are_read_as_what_they_stand_for(self) -> None:
        """Entries of each format that it reads count as what they stand for: int8 as numbers times their scales."""
        for trial in self.fitting(attention_of(6, 2, 40), attention_of(6, 2, 16, window=20)):
            rows = trial.rows(self.rows)
            for order, entry in product(trial.orders, trial.entries):
                trial.check(rows, order=order, entry=entry, scatter=3)

    def test_scores_are_multiplied_by_the_scale(self) -> None:
        """The layer's own scale multiplies the scores, whatever the head dim is."""
        for trial in self.fitting(*(attention_of(4, 2, 16, scale=scale) for scale in (0.01, 1.0))):
            trial.check(trial.rows(self.rows))

    def test_soft_caps_bend_scaled_scores(self) -> None:
        """A soft cap bends scores behind their scale and before what a query does not see is hidden."""
        caps, windows = (0.5, 5.0, 50.0), (None, 7)
        for trial in self.fitting(
            *(attention_of(6, 2, 32, soft_cap=cap, window=window) for cap, window in product(caps, windows))
        ):
            rows = trial.rows(self.rows)
            trial.check([evolve(row, queries=row.queries * 4) for row in rows])

    def test_a_query_sees_the_last_keys_of_its_window(self) -> None:
        """A window's last keys are seen, itself included; pages that it has left behind are gone from the table."""
        for trial in self.fitting(*(attention_of(6, 2, 32, window=window) for window in (1, 2, 5, 16, 40, 1000))):
            rows = trial.rows(self.rows)
            for page_size in self.page_sizes[:3]:
                trial.check(rows, page_size=page_size)

    def test_large_scores_do_not_overflow(self) -> None:
        """Scores whose exponentials no float holds give finite results, and right ones."""
        for trial in self.fitting(attention_of(4, 2, 16)):
            factor = 300.0 if trial.dtype == "float16" else 1e4
            rows = trial.rows([(9, 4), (60, 70)])
            trial.check([evolve(row, queries=row.queries * factor, keys=row.keys * factor) for row in rows])

    def test_many_keys_add_up(self) -> None:
        """Over many keys of about equal weight sums lose nothing: they are kept in fp32 at least."""
        for trial in self.fitting(attention_of(2, 1, 16)):
            rows = trial.rows([(self.long, 1), (self.long - 3, 4), (self.long - 80, 70)])
            trial.check([evolve(row, queries=row.queries * 0.05, values=row.values.abs() + 1) for row in rows])

    def test_what_fits_is_right_and_the_rest_is_refused(self) -> None:
        """Of layers that few are written for each is refused with a reason, or its result is right."""
        for spec, dtype in product(UNUSUAL, self.dtypes):
            if not isinstance(self.fit(dtype, spec), Unfit):
                trial = self.trial(dtype, spec)
                trial.check(trial.rows(_FEW), scatter=4)

    def test_every_layer_is_looked_at(self) -> None:
        """A layer that is refused alone is refused behind one that fits."""
        refused = 0
        plain = attention_of(4, 2, 16)
        for spec, dtype in product(UNUSUAL, self.dtypes):
            if isinstance(self.fit(dtype, plain), Unfit) or not isinstance(self.fit(dtype, spec), Unfit):
                continue
            refused += 1
            said = self.fit(dtype, plain, spec)
            assert isinstance(said, Unfit), f"{spec} is refused alone, and taken as the second layer"
        if not refused:
            unclaimed("its fit refuses no layer of a dtype that it takes")

    def test_any_batch_equals_float64(self) -> None:
        """Whatever rows, heads, pages and windows a step has, its results equal float64."""
        hypothesis()
        from intarsia.testing.attention_batches import try_batches

        try_batches(self)
