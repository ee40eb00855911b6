"""CPU kernels in C++, compiled at first use for the CPU at hand: linears, attention, row ops, and whole steps fused."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy


@hookimpl
def provide_runners() -> list[Provider]:
    """The fused step."""
    return [
        Provider(
            key="cpu_fused",
            summary="a whole layer range in one native call: one parallel region a step",
            provides=("attention",),
            fit=lazy("intarsia_cpu.runner:fit"),
            build=lazy("intarsia_cpu.runner:build"),
        )
    ]
