"""The quantizer of the formats `int8`, `int8_g32` and the like: `intarsia.quantizing.integers` describes them.

Each output's row, or each group of its columns, is rounded to nearest with a scale of its own: its largest magnitude /
127, so that every number is at most half a scale off. A row or group of zeros has scale 0. Scales of rows are float32.
Those of groups are bfloat16 rounded up, so that the largest number still is at most 127, and so that scales as small as
the weights' own have a place.

To shrink a scale until the squared error is least gains nothing at 8 bits (on SmolLM2 the divergence from the dense
model stays as it is), so it is not done.

Shape legend: N out features, C in features, G groups, S columns a group.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration
from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.options import EMBED
from intarsia.types import Weight
from intarsia_int8.options import CALIBRATION, Int8Options
from intarsia_int8.smoothing import column_size, smoothing_scale

#: Numbers quantized at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 22
_LARGEST = 127


def quantize(name: str, weight_NC: torch.Tensor, layout: IntegerFormat, scale_C: torch.Tensor | None = None) -> Weight:
    """Round a floating weight to int8.

    Args:
        name: of the weight, for messages.
        weight_NC: the weight.
        layout: a format of 8 bits without minima.
        scale_C: what its columns are multiplied by before they are rounded; the result's `input_scale` undoes it.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    outs, ins = weight_NC.shape
    num_rows = max(1, _CHUNK // max(1, ins))
    numbers = torch.empty(outs, ins, dtype=torch.int8, device=weight_NC.device)
    scales = []
    for start in range(0, outs, num_rows):
        rows = weight_NC[start : start + num_rows].float()
        if not rows.isfinite().all():
            raise CheckpointError(f"{name} holds NaN or infinity, which int8 cannot represent")
        rows = rows if scale_C is None else rows * scale_C
        numbers[start : start + num_rows], scale = _round(rows, layout)
        scales.append(scale)
    tensors = {"weight": numbers, "scale": torch.cat(scales)}
    if scale_C is not None:
        tensors["input_scale"] = 1 / scale_C
    return Weight(layout, tensors, (outs, ins))


def _round(rows_NC: torch.Tensor, layout: IntegerFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers (N, C), still in float32, and scales as the format has them."""
    columns = rows_NC.shape[1]
    width = layout.group or max(1, columns)
    # Zeros fill the last group, and change no largest magnitude.
    groups_NGS = functional.pad(rows_NC, (0, -columns % width)).view(len(rows_NC), -1, width)
    scale_NG = groups_NGS.abs().amax(-1) / _LARGEST
    if layout.group is not None:
        scale_NG = _bfloat16_above(scale_NG)
    divisor = scale_NG.float()[..., None]
    steps = groups_NGS / torch.where(divisor > 0, divisor, 1.0)
    # Scales among the smallest of floats are rounded themselves, so that a quotient can pass 127.
    numbers = steps.round_().clamp_(-_LARGEST, _LARGEST).flatten(1)[:, :columns]
    return numbers, scale_NG if layout.group is not None else scale_NG[:, 0]


def _bfloat16_above(values: torch.Tensor) -> torch.Tensor:
    """Return the least bfloat16 that is at least each of these float32 numbers, none of which is negative."""
    # A bfloat16 is the first half of a float32, and floats without sign are ordered as whole numbers.
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16 << 16).view(torch.float32).bfloat16()


@frozen(eq=False)
class Int8Quantizer:
    """Takes every matrix of the layers, and the head, as its options say. Routers and embeddings stay.

    Attributes:
        calibration: what the layers' inputs look like, where they are smoothed.
    """

    options: Int8Options
    calibration: Calibration | None = None

    @property
    def _format(self) -> IntegerFormat:
        return IntegerFormat(8, self.options.group or None, activations=self.options.activations)

    @property
    def format(self) -> str:
        """`int8`, `int8_g32` and so on; `_a16` behind it where activations stay floats."""
        return self._format.name

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the options include it."""
        del shape
        return self.options.takes(name)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """A byte a number, and the scales: four bytes a row, or two a group; four more a column that is smoothed."""
        return self._format.num_bytes(shape) + (4 * shape[1] if self._smooths(name) else 0)

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in int8.

        Raises:
            CheckpointError: it holds NaN or infinity; names it.
            ConfigError: the calibration has nothing of this weight.
        """
        floats = weight.dequantize()
        return quantize(name, floats, self._format, self._scale(name, floats) if self._smooths(name) else None)

    def _smooths(self, name: str) -> bool:
        """Whether the inputs of this weight are smoothed. An embedding has none, nor has a head that is tied to it."""
        return self.calibration is not None and name != EMBED

    def _scale(self, name: str, weight_NC: torch.Tensor) -> torch.Tensor:
        assert self.calibration is not None
        inputs = self.calibration.of(name, weight_NC.shape[1], CALIBRATION)
        columns_C = column_size(weight_NC, max(1, _CHUNK // max(1, weight_NC.shape[1])))
        if not columns_C.isfinite().all():
            raise CheckpointError(f"{name} holds NaN or infinity, which int8 cannot represent")
        return smoothing_scale(inputs.mean_square.sqrt().to(columns_C.device), columns_C, self.options.smooth)


def build(context: PartContext) -> Int8Quantizer:
    """Make the part; raise ConfigError where the calibration cannot be read."""
    options: Int8Options = context.options
    calibration = Calibration.open(Path(options.calibration), CALIBRATION) if options.calibration else None
    return Int8Quantizer(options, calibration)
