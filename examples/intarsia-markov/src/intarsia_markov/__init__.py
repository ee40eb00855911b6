"""A drafter that learns from answers as they come: a Markov chain with back-off."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_markov.options import MarkovOptions


@hookimpl
def provide_drafters() -> list[Provider]:
    """The drafter `markov`."""
    return [
        Provider(
            key="markov",
            summary="what most often followed the last tokens in the answers so far, of requests of an equal salt",
            options=MarkovOptions,
            build=lazy("intarsia_markov.drafter:build"),
        )
    ]
