"""Random steps of attention, for the claim that speaks of any."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from intarsia.testing.attention_case import AttentionCase
from intarsia.testing.attention_rows import attention_of
from intarsia.types import Unfit

__all__ = ["try_batches"]

_SHAPES = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=4)


def try_batches(case: AttentionCase) -> None:
    """Compare random steps with float64, of layers that the backend's `fit` takes.

    Args:
        case: whose backend it is, and how many to try.
    """
    head_dims = st.one_of(st.integers(1, 70), st.sampled_from(sorted(case.head_dims)))
    windows = st.one_of(st.none(), st.integers(1, 60))
    page_sizes = st.sampled_from(sorted(case.page_sizes))

    @settings(
        max_examples=case.examples,
        deadline=None,
        database=None,
        derandomize=case.derandomize,
        # To shrink what fails takes long, and is of use where somebody looks at it.
        phases=(Phase.generate,) if case.derandomize else (Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(
        st.sampled_from(sorted(case.dtypes)),
        st.sampled_from(sorted(case.heads)),
        head_dims,
        windows,
        st.sampled_from([None, None, 5.0]),
        _SHAPES,
        page_sizes,
        st.integers(0, 9),
        st.data(),
    )
    def check(
        dtype: str,
        heads: tuple[int, int],
        head_dim: int,
        window: int | None,
        soft_cap: float | None,
        shapes: Sequence[tuple[int, int]],
        page_size: int,
        scatter: int,
        data: st.DataObject,
    ) -> None:
        spec = attention_of(*heads, head_dim, window=window, soft_cap=soft_cap)
        if soft_cap is not None and isinstance(case.fit(dtype, spec), Unfit):
            spec = evolve(spec, soft_cap=None)
        if isinstance(case.fit(dtype, spec), Unfit):
            return
        trial = case.trial(dtype, spec)
        order, entry = (data.draw(st.sampled_from(each)) for each in (trial.orders, trial.entries))
        placed = {"order": order, "entry": entry, "page_size": page_size, "scatter": scatter}
        trial.check(trial.rows(shapes), **placed, padding=data.draw(st.integers(0, 2)))

    check()
