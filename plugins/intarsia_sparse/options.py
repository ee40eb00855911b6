"""The quantizer's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_

from intarsia.quantizing.options import QuantizerOptions


@frozen(kw_only=True)
class SparseOptions(QuantizerOptions):
    """Options of the sparse24 quantizer."""

    #: which two of four columns are kept: those of largest magnitude, or of magnitude times the size of their inputs
    method: str = field(default="magnitude", validator=in_(("magnitude", "wanda")))
    #: what is kept of them: the numbers as they are, or rounded to int8 with a scale an output
    values: str = field(default="dense", validator=in_(("dense", "int8")))
    #: a file that `intarsia calibrate` wrote, which the method "wanda" reads
    calibration: str = ""
    #: prune the head; one that is tied to the embedding gets a weight of its own
    head: bool = False
