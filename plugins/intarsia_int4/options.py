"""The quantizer's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_

from intarsia.quantizing.options import QuantizerOptions


@frozen(kw_only=True)
class Int4Options(QuantizerOptions):
    """Options of the int4 quantizer."""

    #: columns that share a scale: 32, 64 or 128
    group: int = field(default=64, validator=in_((32, 64, 128)))
    #: give each group a number that stands for 0, for weights that lie to one side of it
    zero_points: bool = False
    #: quantize the head; one that is tied to the embedding gets a weight of its own
    head: bool = False
