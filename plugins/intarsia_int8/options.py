"""The quantizer's options."""

from __future__ import annotations

from typing import Literal

from attrs import Attribute, field, frozen
from attrs.validators import in_

from intarsia.errors import ConfigError
from intarsia.quantizing.options import QuantizerOptions, check_calibration


def _share(_: object, attribute: Attribute[float], value: float) -> None:
    # Written so that NaN is refused too.
    if not 0 <= value <= 1:
        raise ConfigError(
            f"quantizer.{attribute.name}: {value} is not from 0 to 1", field=f"quantizer.{attribute.name}"
        )


@frozen(kw_only=True)
class Int8Options(QuantizerOptions):
    """Options of the int8 quantizer."""

    #: how kernels multiply: int8 rounds activations too, as they come; float leaves them as they are
    activations: Literal["int8", "float"] = "int8"
    #: columns that share a scale: 32, 64 or 128; 0 is one scale an output
    group: int = field(default=32, validator=in_((0, 32, 64, 128)))
    #: SmoothQuant's exponent, from 0 to 1: how much of the activations' spread goes into the weights; 0 is off
    smooth: float = field(default=0.0, validator=_share)
    #: path of the file that `intarsia calibrate` wrote for this model, which smoothing needs
    calibration: str = ""

    def __attrs_post_init__(self) -> None:
        needed_by = f"quantizer.smooth = {self.smooth:g}" if self.smooth else ""
        read_for = "" if self.smooth else "smoothing alone; quantizer.smooth = 0.5 asks for it"
        check_calibration(self.calibration, needed_by, read_for)
