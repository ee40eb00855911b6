"""Weights in NF4: four bits a number, at the quantiles of a normal distribution."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_nf4.options import Nf4Options


@hookimpl
def provide_quantizers() -> list[Provider]:
    """The formats `nf4_g32`, `nf4_g64` and `nf4_g128`, `_dq` with scales of a byte."""
    return [
        Provider(
            key="nf4",
            summary="NF4 weights: 16 levels where normal numbers are, a scale a group of 32, 64 or 128 columns",
            options=Nf4Options,
            build=lazy("intarsia_nf4.quantizer:build"),
        )
    ]
