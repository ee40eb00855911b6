"""Benchmarks: fixed workloads on compositions and on other engines in turn, beside the machine's limits."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy


@hookimpl
def provide_commands() -> list[Provider]:
    """Offer `intarsia bench`."""
    summary = "Measure an engine, others beside it, and the machine's limits."
    return [Provider(key="bench", summary=summary, build=lazy("intarsia_bench.command:build"))]
