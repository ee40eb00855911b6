"""The quantizer `int4`: rounding to nearest, with a search for each group's scale, and with AWQ.

Shape legend: N out features, C in features.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import evolve, frozen

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.options import EMBED
from intarsia.types import Weight
from intarsia_int4.awq import scale_columns
from intarsia_int4.options import CALIBRATION, Int4Options
from intarsia_int4.rounding import quantize


@frozen(eq=False)
class Int4Quantizer:
    """Takes every matrix of the layers, and more as its options say. Routers stay.

    Attributes:
        calibration: where one is given; it says nothing of embeddings, whose rows are looked up.
    """

    options: Int4Options
    calibration: Calibration | None

    @property
    def _format(self) -> IntegerFormat:
        options = self.options
        return IntegerFormat(4, options.group, "zero" if options.zero_points else "none", options.activations)

    @property
    def format(self) -> str:
        """`int4_g64` and the like."""
        return self._format.name

    @property
    def _clips(self) -> bool:
        return self.calibration is not None if self.options.clip is None else self.options.clip

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the options include it."""
        del shape
        return self.options.takes(name)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Half a byte a number, two or three a group, four a column that AWQ scales.

        Raises:
            ConfigError: the calibration is of another model.
        """
        scaled = self._inputs(name, shape[1]) is not None and self.options.awq is not False
        return self._format.num_bytes(shape) + (4 * shape[1] if scaled else 0)

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in int4; raise CheckpointError that names it where it holds NaN or infinity."""
        weight_NC = weight.dequantize()
        inputs = self._inputs(name, weight.shape[1])
        if inputs is None:
            return quantize(name, weight_NC, self._format, clip=self._clips)
        inputs = InputStatistics(*(t.to(weight_NC.device) for t in (inputs.largest, inputs.mean_square, inputs.sample)))
        if self.options.awq is False:
            return quantize(name, weight_NC, self._format, clip=self._clips, importance_C=inputs.mean_square)
        if not weight_NC.isfinite().all():
            raise CheckpointError(f"{name} holds NaN or infinity, which int4 cannot represent")
        scale_C = scale_columns(
            weight_NC, inputs, lambda rows_NC, scale_C: self._scaled(name, rows_NC, inputs, scale_C).dequantize()
        )
        return self._scaled(name, weight_NC, inputs, scale_C)

    def _scaled(self, name: str, weight_NC: torch.Tensor, inputs: InputStatistics, scale_C: torch.Tensor) -> Weight:
        """Return the weight in int4, its columns multiplied by `scale_C` and its inputs by what undoes it."""
        importance_C = inputs.mean_square / scale_C.square()
        rounded = quantize(name, weight_NC * scale_C, self._format, clip=self._clips, importance_C=importance_C)
        return evolve(rounded, tensors={**rounded.tensors, "input_scale": 1 / scale_C})

    def _inputs(self, name: str, columns: int) -> InputStatistics | None:
        if self.calibration is None or name == EMBED:
            return None
        return self.calibration.of(name, columns, CALIBRATION)


def build(context: PartContext) -> Int4Quantizer:
    """Make the part; raise ConfigError where the calibration's file is none."""
    options: Int4Options = context.options
    calibration = Calibration.open(Path(options.calibration), CALIBRATION) if options.calibration else None
    return Int4Quantizer(options, calibration)
