"""The quantizer `int4`: rounding to nearest, with a search for each group's scale, with AWQ and with GPTQ.

Shape legend: N out features, C in features.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import evolve, frozen

from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.options import CALIBRATION
from intarsia.quantizing.remembered import RememberedWeights, code_digest, digest
from intarsia.types import EMBED, Weight
from intarsia_int4 import gptq, rounding
from intarsia_int4.awq import scale_columns
from intarsia_int4.options import Int4Options


@frozen(eq=False)
class Int4Quantizer:
    """Takes every matrix of the layers, and more as its options say. Routers stay.

    Attributes:
        calibration: where one is given; it says nothing of embeddings, whose rows are looked up.
        remembered: what took long at an earlier start; None where nothing is kept.
    """

    options: Int4Options
    calibration: Calibration | None
    remembered: RememberedWeights | None = None

    @property
    def _format(self) -> IntegerFormat:
        options = self.options
        return IntegerFormat(4, options.group, "zero" if options.zero_points else "none", options.activations)

    @property
    def format(self) -> str:
        """`int4_g64` and the like."""
        return self._format.name

    @property
    def column_step(self) -> int:
        """Columns that share a scale or a group: where ranks share a model, they stay together."""
        return self._format.column_step

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
        if self.remembered is None or (inputs is None and not self._clips):
            return self._quantized(name, weight_NC, inputs)
        statistics = (inputs.largest, inputs.mean_square, inputs.sample) if inputs else ()
        methods = (self._format.name, self._clips, self.options.awq is not False, self.options.gptq)
        key = digest(code_digest(__file__), *methods, weight_NC, *statistics)
        return self.remembered.get(key, lambda: self._quantized(name, weight_NC, inputs), weight_NC.device)

    def _quantized(self, name: str, weight_NC: torch.Tensor, inputs: InputStatistics | None) -> Weight:
        if inputs is None:
            return rounding.quantize(name, weight_NC, self._format, clip=self._clips)
        rounding.check_finite(name, weight_NC)
        device = weight_NC.device
        inputs = InputStatistics(*(t.to(device) for t in (inputs.largest, inputs.mean_square, inputs.sample)))
        scale_C = None if self.options.awq is False else self._scale(name, weight_NC, inputs)
        feedback_CC = gptq.feedback(inputs) if self.options.gptq else None
        return self._rounded(name, weight_NC, inputs, scale_C, feedback_CC)

    def _scale(self, name: str, weight_NC: torch.Tensor, inputs: InputStatistics) -> torch.Tensor:
        """Return what AWQ multiplies the columns by, (C,)."""

        def rounded(rows_NC: torch.Tensor, scale_C: torch.Tensor) -> torch.Tensor:
            return self._rounded(name, rows_NC, inputs, scale_C, None).dequantize()

        return scale_columns(weight_NC, inputs, rounded)

    def _rounded(
        self,
        name: str,
        weight_NC: torch.Tensor,
        inputs: InputStatistics,
        scale_C: torch.Tensor | None,
        feedback_CC: torch.Tensor | None,
    ) -> Weight:
        """Return the weight in int4, its columns multiplied by `scale_C` and its inputs by what undoes it."""
        importance_C, extra = inputs.mean_square, {}
        if scale_C is not None:
            weight_NC, importance_C, extra = (
                weight_NC * scale_C,
                importance_C / scale_C**2,
                {"input_scale": 1 / scale_C},
            )
        if feedback_CC is None:
            weight = rounding.quantize(name, weight_NC, self._format, clip=self._clips, importance_C=importance_C)
        else:
            if scale_C is not None:
                feedback_CC = feedback_CC * scale_C / scale_C[:, None]
            weight = gptq.quantize(name, weight_NC, self._format, feedback_CC, importance_C, clip=self._clips)
        return evolve(weight, tensors={**weight.tensors, **extra})

    def _inputs(self, name: str, columns: int) -> InputStatistics | None:
        if self.calibration is None or name == EMBED:
            return None
        return self.calibration.of(name, columns, CALIBRATION)


def build(context: PartContext) -> Int4Quantizer:
    """Make the part; raise ConfigError where the calibration's file is none."""
    options: Int4Options = context.options
    calibration = Calibration.open(Path(options.calibration), CALIBRATION) if options.calibration else None
    return Int4Quantizer(options, calibration, RememberedWeights() if options.cache else None)
