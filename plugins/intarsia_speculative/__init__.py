"""Speculative decoding: drafters that guess what follows, for the target to verify many tokens in one step."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_speculative.options import NgramOptions, SuffixOptions


@hookimpl
def provide_drafters() -> list[Provider]:
    """The drafters; `auto` chooses none."""
    return [
        Provider(
            key="ngram",
            summary="prompt lookup: what followed the last tokens where they came before in the sequence",
            options=NgramOptions,
            build=lazy("intarsia_speculative.ngram:build"),
        ),
        Provider(
            key="suffix",
            summary="the likeliest continuation of the longest suffix that came before, here or in earlier answers",
            options=SuffixOptions,
            build=lazy("intarsia_speculative.suffix:build"),
        ),
    ]
