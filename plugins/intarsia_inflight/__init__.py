"""In-flight batching: each step is filled anew (Yu et al. 2022), prompts in chunks (Agrawal et al. 2024)."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Fit, Provider, lazy
from intarsia_inflight.options import InflightOptions


@hookimpl
def provide_schedulers() -> list[Provider]:
    """The in-flight scheduler."""
    return [
        Provider(
            key="inflight",
            summary="a token budget a step: running rows first, then prompts in chunks; preempts when pages run out",
            options=InflightOptions,
            requires=("cache",),
            fit=lambda _: Fit(50, "fills every step anew"),
            build=lazy("intarsia_inflight.scheduler:build"),
        )
    ]
