"""A quantized matrix of a file: what is known of it at once, and what it becomes when it is read.

Files of every kind are decoded to `Grouped`, whole numbers with scales and zero points a group of columns. That is what
they stand for; `IntegerFormat` is what weights in memory have, and not all of the first can be the second.

Shape legend: N out features, C in features, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from attrs import field, frozen

from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import GROUPS, IntegerFormat, unpack_nibbles
from intarsia.types import Weight

#: Numbers dequantized at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 20
#: Scales past this, times 8 bits, leave float32's range.
_LARGEST = 1e36
_MIDDLE = 8

Activations = Literal["int8", "float"]


@frozen
class Layout:
    """What a file's headers and config say of one matrix.

    Attributes:
        bits: of a number.
        shape: (N, C).
        group: columns that share a scale; None is the whole row.
        symmetric: no group has a zero point of its own.
        activations: what products may do with them.
        ordered: groups are of neighbouring columns, in order.
    """

    bits: Literal[4, 8]
    shape: tuple[int, int]
    group: int | None
    symmetric: bool
    activations: Activations
    ordered: bool = True

    @property
    def group_columns(self) -> int:
        """Columns that share a scale."""
        return self.group or self.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return 1 if self.group is None else -(-self.shape[1] // self.group)

    @property
    def weight_format(self) -> IntegerFormat | None:
        """The format that keeps every bit; None where columns are permuted, or share scales in odd numbers.

        Rows of 4 bits with one scale become groups with equal scales. A zero point of 8 bits becomes a minimum.
        """
        if not self.ordered:
            return None
        if self.group is None and self.bits == 8 and self.symmetric:
            return IntegerFormat(8, activations=self.activations)
        sizes = [size for size in GROUPS if self.group is None or self.group % size == 0]
        if not sizes:
            return None
        offset: Literal["none", "zero", "min"] = "none" if self.symmetric else "zero" if self.bits == 4 else "min"
        return IntegerFormat(self.bits, max(sizes), offset, self.activations)


def check_scales(name: str, scale: torch.Tensor) -> None:
    """Raise CheckpointError that names the matrix where one of its scales is not finite, or too large to use."""
    # Not `> _LARGEST`: NaN fails every comparison.
    if scale.numel() and not bool(scale.float().abs().max() <= _LARGEST):
        raise CheckpointError(f"tensor {name!r}: its scales hold NaN, infinity or numbers past {_LARGEST:g}")


@frozen(eq=False)
class Grouped:
    """A matrix, decoded.

    Attributes:
        numbers: q as `IntegerFormat` stores it, (N, C) int8 or (N, ceil(C / 2)) uint8.
        scale: (N, G), of a floating dtype.
        zero: the q that stands for 0, (N, G) int16; None is 8 of 4 bits and 0 of 8 bits.
        group_of: the group of each column, (C,) int64; None where they are in order.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    group_of: torch.Tensor | None = None

    def check(self, name: str) -> None:
        """Raise CheckpointError that names the matrix where a scale is not finite."""
        check_scales(name, self.scale)

    def dequantize(self, layout: Layout, rows: slice) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        columns = layout.shape[1]
        stored = self.numbers[rows]
        if layout.bits == 4:
            stored = unpack_nibbles(stored)[:, :columns]
        group_of = self.group_of
        if group_of is None:
            group_of = torch.arange(columns) // (layout.group or max(1, columns))
        zero = torch.tensor(_MIDDLE if layout.bits == 4 else 0) if self.zero is None else self.zero[rows][:, group_of]
        return (stored.float() - zero.float()) * self.scale[rows].float()[:, group_of]

    def weight(self, layout: Layout) -> Weight:
        """Return the matrix in the layout's weight format, which it has."""
        kept = layout.weight_format
        assert kept is not None and self.group_of is None
        if kept.group is None:
            return Weight(kept, {"weight": self.numbers, "scale": self.scale[:, 0].float()}, layout.shape)
        num_groups = -(-layout.shape[1] // kept.group)
        times = num_groups if layout.group is None else layout.group // kept.group

        def spread(values_NG: torch.Tensor) -> torch.Tensor:
            return values_NG.repeat_interleave(times, dim=1)[:, :num_groups].contiguous()

        tensors = {"weight": self.numbers, "scale": spread(self.scale)}
        if kept.offset == "zero":
            assert self.zero is not None
            tensors["zero"] = spread(self.zero).to(torch.uint8)
        elif kept.offset == "min":
            assert self.zero is not None
            # In float32, which a scale of 16 bits times a whole number of 8 fits exactly.
            tensors["min"] = spread(-self.zero.float() * self.scale.float())
        return Weight(kept, tensors, layout.shape)


@frozen(eq=False)
class DequantizedTensor:
    """A quantized matrix that memory has no format for, as `intarsia.types.StoredTensor` has it.

    Attributes:
        name: as if it were not quantized.
        layout: what is known of it.
        format: how the file stores it, such as `GPTQ4`.
        num_bytes: of all tensors that it is made of.
        decode: reads these.
    """

    name: str
    layout: Layout
    format: str
    num_bytes: int
    decode: Callable[[], Grouped] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C)."""
        return self.layout.shape

    def grouped(self) -> Grouped:
        """Read and check it; raise CheckpointError that names it where it is not what the config says."""
        found = self.decode()
        found.check(self.name)
        return found

    def read(self, out: torch.Tensor) -> None:
        """Dequantize into `out`; beside it, the packed tensor and a few megabytes are in use."""
        assert tuple(out.shape) == self.shape, f"{self.name}: {tuple(out.shape)} is not {self.shape}"
        found, (outs, ins) = self.grouped(), self.layout.shape
        num_rows = max(1, _CHUNK // max(1, ins))
        for start in range(0, outs, num_rows):
            rows = slice(start, start + num_rows)
            out[rows].copy_(found.dequantize(self.layout, rows))


@frozen(eq=False)
class QuantizedTensor(DequantizedTensor):
    """A quantized matrix as `intarsia.types.StoredWeight` has it."""

    @property
    def weight_format(self) -> IntegerFormat:
        """The format of what `read_weight` returns."""
        kept = self.layout.weight_format
        assert kept is not None
        return kept

    def read_weight(self) -> Weight:
        """Return the weight in its format; raise CheckpointError that names it where it is malformed."""
        return self.grouped().weight(self.layout)


def stored(name: str, layout: Layout, kind: str, num_bytes: int, decode: Callable[[], Grouped]) -> DequantizedTensor:
    """Return the tensor, as a stored weight where memory has a format for it."""
    made = QuantizedTensor if layout.weight_format is not None else DequantizedTensor
    return made(name, layout, f"{kind}{layout.bits}", num_bytes, decode)
