"""A scheduler that runs the shortest remaining request first, with ageing."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_srpt.options import SrptOptions


@hookimpl
def provide_schedulers() -> list[Provider]:
    """The scheduler `srpt`."""
    return [
        Provider(
            key="srpt",
            summary="the shortest remaining request first, as far as max_tokens bounds it; waiting makes shorter",
            options=SrptOptions,
            requires=("cache",),
            build=lazy("intarsia_srpt.scheduler:build"),
        )
    ]
