"""The weight formats `int4_g<group>` and `int4_g<group>_zero`, and the quantizer that makes them.

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `weight` | uint8 | (N, ceil(C / 2)) | numbers q from 0 to 15, two a byte: even columns in the low half |
| `scale` | bfloat16 | (N, G) | one a group of `group` columns; G = ceil(C / group), the last group may be smaller |
| `zero` | uint8 | (N, G) | of `_zero` formats alone: the q that stands for 0 |

The weight is `(q - zero) * scale`, where zero is 8 without zero points. There the number of largest magnitude in a
group becomes -8, and scales can be negative; others are at most half a scale off, and one scale where a number of the
other sign is as large. With zero points the range from the smallest to the largest number, 0 included, is cut into 15
steps. A group of zeros has scale 0. Numbers are rounded to nearest, with the scale as it is stored.

Shape legend: N out features, C in features, G groups, S columns a group.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CheckpointError, CompositionError
from intarsia.protocols import PartContext
from intarsia.types import Weight
from intarsia_int4.options import Int4Options

_EMBED, _POSITIONS, _HEAD = "embed.weight", "positions.weight", "head.weight"
#: Numbers quantized at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 22
_MIDDLE = 8


@frozen
class Int4Format:
    """See the module.

    Attributes:
        group: columns that share a scale.
        has_zeros: whether groups have zero points.
    """

    group: int
    has_zeros: bool = False

    @property
    def name(self) -> str:
        """The format's key."""
        return f"int4_g{self.group}{'_zero' if self.has_zeros else ''}"

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight in float32, (N, C)."""
        pairs, scale = weight.tensors["weight"], weight.tensors["scale"].float()
        columns = weight.shape[1]
        numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :columns].float()
        zero = weight.tensors["zero"].float() if self.has_zeros else torch.full_like(scale, _MIDDLE)
        return (numbers - self._spread(zero, columns)) * self._spread(scale, columns)

    def _spread(self, per_group_NG: torch.Tensor, columns: int) -> torch.Tensor:
        return per_group_NG.repeat_interleave(self.group, dim=1)[:, :columns]

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Return rows or columns.

        Raises:
            CompositionError: columns are cut within a group.
        """
        outs, ins = weight.shape
        if dim == 0:
            rows = {name: tensor.narrow(0, start, stop - start) for name, tensor in weight.tensors.items()}
            return Weight(self, rows, (stop - start, ins))
        if start % self.group or (stop % self.group and stop != ins):
            raise CompositionError(
                f"columns {start} to {stop} of {ins} cut a group: {self.name} has a scale for each {self.group} of them"
            )
        groups = slice(start // self.group, -(-stop // self.group))
        parts = {name: tensor[:, groups] for name, tensor in weight.tensors.items() if name != "weight"}
        parts["weight"] = weight.tensors["weight"][:, start // 2 : (stop + 1) // 2]
        return Weight(self, parts, (outs, stop - start))


def quantize(name: str, weight_NC: torch.Tensor, layout: Int4Format) -> Weight:
    """Round a floating weight to int4.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    outs, ins = weight_NC.shape
    num_rows = max(1, _CHUNK // max(1, ins))
    chunks = [_quantize(name, rows.float(), layout) for rows in torch.split(weight_NC, num_rows)]
    tensors = {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}
    return Weight(layout, tensors, (outs, ins))


def _quantize(name: str, rows_NC: torch.Tensor, layout: Int4Format) -> dict[str, torch.Tensor]:
    if not rows_NC.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity, which int4 cannot represent")
    columns = rows_NC.shape[1]
    # Zeros fill the last group: they change neither its largest number nor its range, which holds 0.
    groups_NGS = functional.pad(rows_NC, (0, -columns % layout.group)).view(len(rows_NC), -1, layout.group)
    scale_NG, zero_NG = _ranged(groups_NGS) if layout.has_zeros else _symmetric(groups_NGS)
    divisor = scale_NG.float()[..., None]
    steps = groups_NGS / torch.where(divisor == 0, 1.0, divisor)
    numbers = (steps.round_() + zero_NG[..., None]).clamp_(0, 15).to(torch.uint8).flatten(1)
    numbers = numbers[:, : columns + columns % 2]
    if columns % 2:
        numbers[:, columns:] = _MIDDLE
    tensors = {"weight": numbers[:, 0::2] | (numbers[:, 1::2] << 4), "scale": scale_NG}
    return tensors | ({"zero": zero_NG.to(torch.uint8)} if layout.has_zeros else {})


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
    def _format(self) -> Int4Format:
        return Int4Format(self.options.group, self.options.zero_points)

    @property
    def format(self) -> str:
        """`int4_g64` and the like."""
        return self._format.name

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the options include it."""
        del shape
        if name == _POSITIONS or name.endswith(".router.weight"):
            return False
        if (name == _EMBED and not self.options.embed) or (name == _HEAD and not self.options.head):
            return False
        return any(fnmatchcase(name, pattern) for pattern in self.options.include)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Half a byte a number, and two or three bytes a group."""
        del name
        outs, ins = shape
        groups = -(-ins // self.options.group)
        return outs * (-(-ins // 2) + groups * (3 if self.options.zero_points else 2))

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in int4; raise CheckpointError that names it where it holds NaN or infinity."""
        return quantize(name, weight.dequantize(), self._format)


def build(context: PartContext) -> Int4Quantizer:
    """Make the part."""
    return Int4Quantizer(context.options)
