"""Weights in int8, rounded to nearest while a model loads: half the bytes of bf16."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_int8.options import Int8Options


@hookimpl
def provide_quantizers() -> list[Provider]:
    """The format `int8`."""
    return [
        Provider(
            key="int8",
            summary="int8 weights with a scale an output, rounded to nearest",
            options=Int8Options,
            build=lazy("intarsia_int8.quantizer:build"),
        )
    ]
