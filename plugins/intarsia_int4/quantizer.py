"""The quantizer of the formats `int4_g<group>` and `int4_g<group>_zero`, by rounding to nearest.

`intarsia.quantizing.integers` describes the formats. Without zero points the number of largest magnitude in a group
becomes -8, and scales can be negative; others are at most half a scale off, and one scale where a number of the other
sign is as large. With zero points the range from the smallest to the largest number, 0 included, is cut into 15 steps.
A group of zeros has scale 0. Numbers are rounded to nearest, with the scale as it is stored, in bfloat16.

Shape legend: N out features, C in features, G groups, S columns a group.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.quantizing.integers import IntegerFormat, pack_nibbles
from intarsia.types import Weight
from intarsia_int4.options import Int4Options

#: Numbers quantized at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 22
_MIDDLE = 8


def quantize(name: str, weight_NC: torch.Tensor, layout: IntegerFormat) -> Weight:
    """Round a floating weight to int4.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    outs, ins = weight_NC.shape
    num_rows = max(1, _CHUNK // max(1, ins))
    chunks = [_quantize(name, rows.float(), layout) for rows in torch.split(weight_NC, num_rows)]
    tensors = {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}
    return Weight(layout, tensors, (outs, ins))


def _quantize(name: str, rows_NC: torch.Tensor, layout: IntegerFormat) -> dict[str, torch.Tensor]:
    if not rows_NC.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity, which int4 cannot represent")
    columns = rows_NC.shape[1]
    # Zeros fill the last group: they change neither its largest number nor its range, which holds 0.
    assert layout.group is not None
    groups_NGS = functional.pad(rows_NC, (0, -columns % layout.group)).view(len(rows_NC), -1, layout.group)
    scale_NG, zero_NG = _ranged(groups_NGS) if layout.offset == "zero" else _symmetric(groups_NGS)
    divisor = scale_NG.float()[..., None]
    steps = groups_NGS / torch.where(divisor == 0, 1.0, divisor)
    numbers = (steps.round_() + zero_NG[..., None]).clamp_(0, 15).to(torch.uint8).flatten(1)
    tensors = {"weight": pack_nibbles(numbers[:, :columns]), "scale": scale_NG}
    return tensors | ({"zero": zero_NG.to(torch.uint8)} if layout.offset == "zero" else {})


def _symmetric(groups_NGS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points (N, G) with which the largest magnitude is -8."""
    at = groups_NGS.abs().argmax(-1, keepdim=True)
    scale = (groups_NGS.gather(-1, at)[..., 0] / -_MIDDLE).bfloat16()
    return scale, torch.full_like(scale, _MIDDLE, dtype=torch.float32)


def _ranged(groups_NGS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points (N, G) with which the smallest number, at most 0, is q = 0."""
    smallest, largest = groups_NGS.amin(-1).clamp(max=0), groups_NGS.amax(-1).clamp(min=0)
    # Halved, since the whole range of the largest floats is none.
    scale = ((largest / 2 - smallest / 2) / 7.5).bfloat16()
    divisor = torch.where(scale == 0, 1.0, scale.float())
    return scale, (-smallest / divisor).round().clamp(0, 15)


@frozen
class Int4Quantizer:
    """Takes every matrix of the layers, and more as its options say. Routers stay."""

    options: Int4Options

    @property
    def _format(self) -> IntegerFormat:
        return IntegerFormat(4, self.options.group, "zero" if self.options.zero_points else "none")

    @property
    def format(self) -> str:
        """`int4_g64` and the like."""
        return self._format.name

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the options include it."""
        del shape
        return self.options.takes(name)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Half a byte a number, and two or three bytes a group."""
        del name
        return self._format.num_bytes(shape)

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in int4; raise CheckpointError that names it where it holds NaN or infinity."""
        return quantize(name, weight.dequantize(), self._format)


def build(context: PartContext) -> Int4Quantizer:
    """Make the part."""
    return Int4Quantizer(context.options)
