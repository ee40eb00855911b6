"""Speculative decoding: drafters that guess what follows, for the target to verify many tokens in one step."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_speculative.model_options import DraftModelOptions, LayerSkipOptions
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
        Provider(
            key="draft_model",
            summary="a second, smaller model with the same vocabulary",
            options=DraftModelOptions,
            build=lazy("intarsia_speculative.draft_model:build"),
        ),
        Provider(
            key="layer_skip",
            summary="the target's own first layers and head",
            options=LayerSkipOptions,
            fit=lazy("intarsia_speculative.layer_skip:fit"),
            build=lazy("intarsia_speculative.layer_skip:build"),
        ),
    ]
