"""The quantizer's options."""

from __future__ import annotations

from attrs import frozen

from intarsia.quantizing.options import QuantizerOptions


@frozen(kw_only=True)
class Int8Options(QuantizerOptions):
    """Options of the int8 quantizer."""
