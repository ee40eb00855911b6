"""The quantizer's options."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Int8Options:
    """Options of the int8 quantizer."""

    #: canonical names of weights that may be quantized, as patterns: `["layers.*"]`, `["head.*"]`
    include: tuple[str, ...] = ("*",)
    #: quantize the head; one that is tied to the embedding gets a weight of its own
    head: bool = True
    #: quantize the embedding too, and with it a head that is tied to it
    embed: bool = False
