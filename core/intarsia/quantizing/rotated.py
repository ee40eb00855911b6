"""int8 weights whose columns are rotated, so that no few of them are much larger than the others (Ashkboos et al. 2024,
QuaRot).

The tensors are those of `int8`, `int8_g64` and so on (see `integers`), and the formats are called `int8_rotated`,
`int8_g64_rotated` and so on. Where the weight that the tensors stand for, without `input_scale`, is R, the product is
`rotate(x * input_scale) @ R.T`: kernels rotate activations as they come, and may round them to int8 then. An outlier's
size is spread over its block, in weights and in activations, and the others keep more bits.

Shape legend: N out features, C in features.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from attrs import evolve, frozen

from intarsia.errors import CompositionError
from intarsia.quantizing.integers import GROUPS, IntegerFormat
from intarsia.types import Weight

#: Columns that are rotated together.
BLOCK: Final = 64
#: One over the matrix's norm: a power of two, so that it rounds nothing.
FACTOR: Final = 0.125


def rotate(numbers: torch.Tensor) -> torch.Tensor:
    """Multiply each whole block of 64 numbers along the last axis by the Hadamard matrix of that order, over its norm.

    The matrix is Sylvester's, symmetric and its own inverse; sums are taken by the fast Walsh-Hadamard transform, so
    that no number depends on what else is rotated. Numbers behind the last whole block stay as they are.
    """
    whole = numbers.shape[-1] // BLOCK * BLOCK
    return torch.cat((_transform(numbers[..., :whole] * FACTOR), numbers[..., whole:]), dim=-1)


def _transform(numbers: torch.Tensor) -> torch.Tensor:
    """Multiply whole blocks by a matrix of 1 and -1."""
    shape, step = numbers.shape, 1
    while step < BLOCK:
        first, second = numbers.reshape(*shape[:-1], shape[-1] // (2 * step), 2, step).unbind(-2)
        numbers = torch.stack((first + second, first - second), dim=-2).reshape(shape)
        step *= 2
    return numbers


def rotate_rows(numbers_NC: torch.Tensor) -> torch.Tensor:
    """Do the same to a weight's rows by one matrix product: many times as quick, and rounded otherwise."""
    whole = numbers_NC.shape[1] // BLOCK * BLOCK
    matrix = _transform(torch.eye(BLOCK, dtype=numbers_NC.dtype, device=numbers_NC.device)) * FACTOR
    rotated_NC = (numbers_NC[:, :whole].reshape(-1, BLOCK) @ matrix).view(len(numbers_NC), whole)
    return rotated_NC if whole == numbers_NC.shape[1] else torch.cat((rotated_NC, numbers_NC[:, whole:]), dim=1)


def spread(limits: torch.Tensor) -> torch.Tensor:
    """Return how large rotated numbers can be that are no larger than these, along the last axis."""
    whole = limits.shape[-1] // BLOCK * BLOCK
    blocks = limits[..., :whole].reshape(*limits.shape[:-1], whole // BLOCK, BLOCK)
    sums = (blocks.sum(-1, keepdim=True) * FACTOR).expand_as(blocks).flatten(-2)
    return torch.cat((sums, limits[..., whole:]), dim=-1)


@frozen
class RotatedFormat:
    """See the module.

    Attributes:
        source: the format of its tensors: of 8 bits, without minima, for activations in int8.
    """

    source: IntegerFormat

    @property
    def name(self) -> str:
        """The format's key."""
        return f"{self.source.name}_rotated"

    @property
    def column_step(self) -> int:
        """Columns that share a scale or are rotated together: they stay together."""
        return math.lcm(BLOCK, self.source.column_step)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight (N, C)."""
        return self.source.num_bytes(shape)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight in float32, (N, C)."""
        plain, input_scale = self.plain(weight), weight.tensors.get("input_scale")
        # The factor comes first: rotated numbers can be larger than a float32 is, and the weight's own are not.
        scale = plain.tensors["scale"].float() * FACTOR
        values = self.source.dequantize(evolve(plain, tensors={**plain.tensors, "scale": scale}))
        whole = weight.shape[1] // BLOCK * BLOCK
        values = torch.cat((_transform(values[:, :whole]), values[:, whole:] / FACTOR), dim=1)
        return values if input_scale is None else values * input_scale

    def plain(self, weight: Weight) -> Weight:
        """Return what rows are multiplied by that are scaled and rotated already."""
        tensors = {key: tensor for key, tensor in weight.tensors.items() if key != "input_scale"}
        return Weight(self.source, tensors, weight.shape)

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        """Return the rows at these indices."""
        part = self.source.rows(weight, index)
        return Weight(self, part.tensors, part.shape)

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Return rows or columns.

        Raises:
            CompositionError: columns are cut within a block.
        """
        ins = weight.shape[1]
        if dim == 1 and (start % BLOCK or (stop % BLOCK and stop != ins)):
            raise CompositionError(
                f"columns {start} to {stop} of {ins} cut a block: {self.name} rotates each {BLOCK} of them"
            )
        part = self.source.shard(weight, dim, start, stop)
        return Weight(self, part.tensors, part.shape)


#: Every format that there is.
ROTATED: Final = tuple(RotatedFormat(IntegerFormat(8, group)) for group in (None, *GROUPS))
