"""The quantizer's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_

from intarsia.quantizing.options import QuantizerOptions


@frozen(kw_only=True)
class Nf4Options(QuantizerOptions):
    """Options of the quantizer `nf4`, besides those of every quantizer."""

    #: columns that share a scale: 32, 64 or 128
    group: int = field(default=64, validator=in_((32, 64, 128)))
    #: store scales in a byte each, with two numbers a row that say what bytes mean
    double_quant: bool = False
