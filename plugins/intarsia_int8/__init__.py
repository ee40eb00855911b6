"""Weights in int8, rounded while a model loads: half the bytes of bf16; and products with them through torch alone."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_int8.options import Int8Options


@hookimpl
def provide_quantizers() -> list[Provider]:
    """The formats `int8`, `int8_g32` and the like, for activations in int8 or in floats, and rotated ones."""
    return [
        Provider(
            key="int8",
            summary="int8 weights with a scale a group or an output; rotated (QuaRot), smoothed (SmoothQuant) if asked",
            options=Int8Options,
            build=lazy("intarsia_int8.quantizer:build"),
        )
    ]


@hookimpl
def provide_kernels() -> list[Provider]:
    """Linear layers over int8 weights."""
    return [
        Provider(
            key="int8",
            summary="int8 matrix products on CPUs through torch, which need no compiler; bitwise for a scale an output",
            fit=lazy("intarsia_int8.kernels:fit"),
            build=lazy("intarsia_int8.kernels:build"),
        )
    ]
