"""CPU kernels in C++, compiled at first use for the CPU at hand: linears, attention, row ops, and whole steps fused."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy


@hookimpl
def provide_kernels() -> list[Provider]:
    """Ops in C++."""
    return [
        Provider(
            key="cpu",
            summary="every op in C++, over fp32, bf16, int8 and int4 weights; bitwise whatever the batch",
            fit=lazy("intarsia_cpu.kernels:fit"),
            build=lazy("intarsia_cpu.kernels:build"),
        )
    ]


@hookimpl
def provide_attention_backends() -> list[Provider]:
    """Attention over pages."""
    return [
        Provider(
            key="cpu",
            summary="flash attention over pages in C++, rows of all kinds in one call; bitwise whatever the batch",
            fit=lazy("intarsia_cpu.attention:fit"),
            build=lazy("intarsia_cpu.attention:build"),
        )
    ]


@hookimpl
def provide_runners() -> list[Provider]:
    """The fused step."""
    return [
        Provider(
            key="cpu_fused",
            summary="a whole layer range in one native call: one parallel region a step",
            provides=("attention",),
            invariance={"float32": "bitwise", "bfloat16": "bitwise"},
            fit=lazy("intarsia_cpu.runner:fit"),
            build=lazy("intarsia_cpu.runner:build"),
        )
    ]
