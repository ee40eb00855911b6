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


#: Columns that share a scale, where nothing is said.
_GROUP, _ROTATED_GROUP = 32, 64


@frozen(kw_only=True)
class Int8Options(QuantizerOptions):
    """Options of the int8 quantizer."""

    #: how kernels multiply: int8 rounds activations too, as they come; float leaves them as they are
    activations: Literal["int8", "float"] = "int8"
    #: columns that share a scale: 32, 64 or 128; 0 is one scale an output; by default 32, or 64 where rotated
    group: int | None = field(default=None, validator=in_((None, 0, 32, 64, 128)))
    #: whether columns are rotated in blocks of 64, and activations as they come, so that both keep more bits (QuaRot);
    #: by default on CPUs, whose kernels have it, where activations are rounded and no group is named
    rotate: bool | None = None
    #: SmoothQuant's exponent, from 0 to 1: how much of the activations' spread goes into the weights; 0 is off
    smooth: float = field(default=0.0, validator=_share)
    #: path of the file that `intarsia calibrate` wrote for this model, which smoothing needs
    calibration: str = ""

    def rotates(self, device: str) -> bool:
        """Whether weights for an engine on a device are rotated."""
        if self.rotate is not None:
            return self.rotate
        return device == "cpu" and self.activations == "int8" and self.group is None

    def columns(self, device: str) -> int | None:
        """Columns that share a scale; None where an output has one."""
        group = self.group if self.group is not None else _ROTATED_GROUP if self.rotates(device) else _GROUP
        return group or None

    def __attrs_post_init__(self) -> None:
        if self.rotate and self.activations != "int8":
            raise ConfigError(
                "quantizer.activations: quantizer.rotate = true is for activations that are rounded; leave it out, or "
                "set it to int8",
                field="quantizer.activations",
            )
        needed_by = f"quantizer.smooth = {self.smooth:g}" if self.smooth else ""
        read_for = "" if self.smooth else "smoothing alone; quantizer.smooth = 0.5 asks for it"
        check_calibration(self.calibration, needed_by, read_for)
