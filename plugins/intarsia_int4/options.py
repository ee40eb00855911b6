"""The quantizer's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_


@frozen(kw_only=True)
class Int4Options:
    """Options of the int4 quantizer."""

    #: columns that share a scale: 32, 64 or 128
    group: int = field(default=64, validator=in_((32, 64, 128)))
    #: give each group a number that stands for 0, for weights that lie to one side of it
    zero_points: bool = False
    #: canonical names of weights that may be quantized, as patterns: `["layers.*.down.weight"]`
    include: tuple[str, ...] = ("*",)
    #: quantize the head; one that is tied to the embedding gets a weight of its own
    head: bool = False
    #: quantize the embedding too, and with it a head that is tied to it
    embed: bool = False
