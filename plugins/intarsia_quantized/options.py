"""The loader's options. Needs no torch."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class QuantizedOptions:
    """Options of the loader `quantized`, set in `[model]`."""

    #: what products do with activations: round them to int8, or leave them in floats; auto is what the folder says
    activations: Literal["auto", "int8", "float"] = "auto"

    def resolve(self, says: Literal["int8", "float"]) -> Literal["int8", "float"]:
        """Return what holds for a matrix of which the folder says this."""
        return says if self.activations == "auto" else self.activations
