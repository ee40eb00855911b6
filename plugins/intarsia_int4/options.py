"""The quantizer's options."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import in_

from intarsia.quantizing.options import QuantizerOptions, check_calibration


@frozen(kw_only=True)
class Int4Options(QuantizerOptions):
    """Options of the int4 quantizer."""

    #: columns that share a scale: 32, 64 or 128
    group: int = field(default=64, validator=in_((32, 64, 128)))
    #: give each group a number that stands for 0, for weights that lie to one side of it
    zero_points: bool = False
    #: whether kernels may round activations to int8 as they come (W4A8), or leave them in floats (W4A16)
    activations: Literal["int8", "float"] = "int8"
    #: a file that `intarsia calibrate` wrote: says which columns matter
    calibration: str = ""
    #: search for each group's scale of least squared error, weighed by calibration; None is where there is one
    clip: bool | None = None
    #: scale columns that matter up before they are rounded (AWQ); None is where there is a calibration
    awq: bool | None = None
    #: round column by column, each making up for the errors of those before (GPTQ); takes longer, and a calibration
    gptq: bool = False
    #: keep what takes long (clip, awq, gptq) on disk for the next start, in INTARSIA_CACHE or the user's cache folder
    cache: bool = True
    #: quantize the head; one that is tied to the embedding gets a weight of its own
    head: bool = False

    def __attrs_post_init__(self) -> None:
        needed_by = next((f"quantizer.{name} = true" for name in ("awq", "gptq") if getattr(self, name)), "")
        reads = self.gptq or self.awq is not False or self.clip is not False
        check_calibration(self.calibration, needed_by, "" if reads else "awq, clip and gptq, and all are false")
