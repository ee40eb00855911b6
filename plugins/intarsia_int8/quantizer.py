"""The quantizer of the formats `int8`, `int8_g32` and so on: `intarsia.quantizing.integers` and `.rotated` have them.

Each output's row, or each group of its columns, is rounded to nearest with a scale of its own: its largest magnitude /
127, so that every number is at most half a scale off. A row or group of zeros has scale 0. Scales of rows are float32.
Those of groups are float16, which has three bits more than bfloat16; or bfloat16, where a weight has groups so small or
so large that float16 would be less exact. Numbers are rounded with the scale as it is stored.

To shrink a scale until the squared error is least gains nothing at 8 bits (on SmolLM2 the divergence from the dense
model stays as it is), so it is not done.

Shape legend: N out features, C in features, G groups, S columns a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration
from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.options import CALIBRATION
from intarsia.quantizing.rotated import BLOCK, RotatedFormat, rotate_rows
from intarsia.types import EMBED, Weight
from intarsia_int8.options import Int8Options
from intarsia_int8.smoothing import column_size, smoothing_scale

#: Numbers quantized at once: temporary tensors stay in the caches, however large a weight is.
_CHUNK = 1 << 20
_LARGEST = 127
#: Where magnitudes begin whose sums are looked after.
_HUGE = 2.0**120
#: From here on float16 has at least the 8 bits of bfloat16.
_SMALLEST_HALF = 2.0**-16


def quantize(
    name: str,
    weight_NC: torch.Tensor,
    layout: IntegerFormat | RotatedFormat,
    scale_C: torch.Tensor | None = None,
) -> Weight:
    """Round a floating weight to int8.

    Args:
        name: of the weight, for messages.
        weight_NC: the weight.
        layout: a format of 8 bits without minima.
        scale_C: what its columns are multiplied by before all else; the result's `input_scale` undoes it.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    outs, ins = weight_NC.shape
    num_rows = max(1, _CHUNK // max(1, ins))
    group = (layout.source if isinstance(layout, RotatedFormat) else layout).group
    # Sums of numbers that fill a float32 would not fit it.
    shrink = 1 / BLOCK if isinstance(layout, RotatedFormat) and _is_huge(weight_NC) else 1.0

    def pieces() -> Iterator[torch.Tensor]:
        for rows in torch.split(weight_NC, num_rows):
            scaled = rows.float() if scale_C is None else rows.float() * scale_C
            scaled = scaled if shrink == 1 else scaled * shrink
            yield _groups(rotate_rows(scaled) if isinstance(layout, RotatedFormat) else scaled, group)

    largest_NG = torch.cat([groups_NGS.abs().amax(-1) for groups_NGS in pieces()])
    if not largest_NG.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity, which int8 cannot represent")
    scale_NG = _stored(largest_NG / _LARGEST / shrink, group)
    numbers = torch.empty(outs, ins, dtype=torch.int8, device=weight_NC.device)
    for groups_NGS, divisor_NG, out_NC in zip(
        pieces(), torch.split(scale_NG, num_rows), torch.split(numbers, num_rows), strict=True
    ):
        out_NC.copy_(_round(groups_NGS, divisor_NG.float() * shrink)[:, :ins])
    tensors = {"weight": numbers, "scale": scale_NG if group is not None else scale_NG[:, 0]}
    if scale_C is not None:
        tensors["input_scale"] = 1 / scale_C
    return Weight(layout, tensors, (outs, ins))


def _is_huge(weight_NC: torch.Tensor) -> bool:
    low, high = torch.aminmax(weight_NC)
    return bool(torch.maximum(-low, high) > _HUGE)


def _groups(rows_NC: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return the columns that share a scale apart, (N, G, S); zeros fill the last group, and change no largest one."""
    columns = rows_NC.shape[1]
    width = group or max(1, columns)
    return functional.pad(rows_NC, (0, -columns % width)).view(len(rows_NC), -1, width)


def _stored(scale_NG: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return scales in the dtype that the weight has them in."""
    if group is None:
        return scale_NG
    is_even = (scale_NG == 0) | ((scale_NG >= _SMALLEST_HALF) & (scale_NG <= torch.finfo(torch.float16).max))
    return scale_NG.to(torch.float16 if bool(is_even.all()) else torch.bfloat16)


def _round(groups_NGS: torch.Tensor, scale_NG: torch.Tensor) -> torch.Tensor:
    """Return whole numbers, (N, G S), still in float32."""
    divisor = scale_NG[..., None]
    steps = groups_NGS / torch.where(divisor > 0, divisor, 1.0)
    # Scales among the smallest of floats are rounded themselves, so that a quotient can pass 127.
    return steps.round_().clamp_(-_LARGEST, _LARGEST).flatten(1)


@frozen(eq=False)
class Int8Quantizer:
    """Takes every matrix of the layers, and the head, as its options say. Routers and embeddings stay.

    Attributes:
        calibration: what the layers' inputs look like, where they are smoothed.
        device: where the engine runs.
    """

    options: Int8Options
    calibration: Calibration | None = None
    device: str = "cpu"

    @property
    def layout(self) -> IntegerFormat | RotatedFormat:
        """The format that it makes."""
        columns = self.options.columns(self.device)
        layout = IntegerFormat(8, columns, activations=self.options.activations)
        return RotatedFormat(layout) if self.options.rotates(self.device) else layout

    @property
    def format(self) -> str:
        """`int8`, `int8_g32` and so on; with `_a16` where activations stay floats, `_rotated` where columns are."""
        return self.layout.name

    @property
    def column_step(self) -> int:
        """Columns that share a scale, or are rotated together: where ranks share a model, they stay together."""
        return self.layout.column_step

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the options include it."""
        del shape
        return self.options.takes(name)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """A byte a number, and the scales: four bytes a row, or two a group; four more a column that is smoothed."""
        return self.layout.num_bytes(shape) + (4 * shape[1] if self._smooths(name) else 0)

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in int8.

        Raises:
            CheckpointError: it holds NaN or infinity; names it.
            ConfigError: the calibration has nothing of this weight.
        """
        floats = weight.dequantize()
        return quantize(name, floats, self.layout, self._scale(name, floats) if self._smooths(name) else None)

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
    return Int8Quantizer(options, calibration, context.engine.device)
