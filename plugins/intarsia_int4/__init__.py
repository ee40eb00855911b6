"""Weights in int4, in groups with scales of their own, while a model loads: near a quarter of the bytes of bf16."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_int4.options import Int4Options


@hookimpl
def provide_quantizers() -> list[Provider]:
    """The formats `int4_g32`, `int4_g64` and `int4_g128`, `_zero` with zero points, `_a16` with float activations."""
    return [
        Provider(
            key="int4",
            summary="int4 weights with a scale a group of 32, 64 or 128 columns, rounded to nearest or calibrated",
            options=Int4Options,
            build=lazy("intarsia_int4.quantizer:build"),
        )
    ]
