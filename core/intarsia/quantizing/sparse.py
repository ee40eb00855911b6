"""2:4 sparse weights: of every four columns of a row at most two are kept (Mishra et al. 2021).

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `values` | a float, or int8 | (N, 2 G) | the two numbers that each group keeps, in the order of their columns |
| `indices` | uint8 | (N, ceil(G / 2)) | their columns in the group, two groups a byte, even groups in the low half |
| `scale` | float32 | (N,) | of int8: what a row's numbers are multiplied by |

A group is four columns, of which a row's last may have fewer; G is ceil(C / 4). Its half byte is `first | second << 2`,
with first < second from 0 to 3. A group that keeps fewer than two numbers names other columns too, with values of 0;
half a byte behind an odd last group is 4, as of a group that keeps its first two.

The formats are called `sparse24`, whose values are floats, and `sparse24_int8`. A weight in bfloat16 takes 1.125 bytes
a number in place of 2, one in int8 0.625 in place of 1.

Shape legend: N out features, C in features, G groups of four columns.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CheckpointError, CompositionError
from intarsia.types import Weight

#: Columns a group, and how many of them are kept.
GROUP, KEPT = 4, 2
SparseValues: TypeAlias = Literal["float32", "float16", "bfloat16", "int8"]
_HALF_BYTE = 15


def _half_byte(kept: int) -> int:
    """Return the two columns of a group whose kept columns are the bits that are set; its first ones fill up."""
    columns = [column for column in range(GROUP) if kept >> column & 1]
    columns += [column for column in range(GROUP) if column not in columns][: max(0, KEPT - len(columns))]
    first, second = sorted(columns)[:KEPT]
    return first | second << 2


#: Bits of the kept columns -> their half byte.
_HALF_BYTES = torch.tensor([_half_byte(kept) for kept in range(1 << GROUP)], dtype=torch.uint8)
#: Of a group that keeps its first two columns.
_FILLING = _half_byte(0)


@frozen
class SparseFormat:
    """See the module.

    Attributes:
        values: the dtype of the numbers that are kept.
    """

    values: SparseValues

    @property
    def name(self) -> str:
        """The format's key: that of float values does not say which."""
        return "sparse24_int8" if self.values == "int8" else "sparse24"

    @property
    def column_step(self) -> int:
        """Columns of a group: they stay together."""
        return GROUP

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight (N, C)."""
        outs, ins = shape
        dtype: torch.dtype = getattr(torch, self.values)
        groups = -(-ins // GROUP)
        return outs * (groups * KEPT * dtype.itemsize + -(-groups // 2) + (4 if self.values == "int8" else 0))

    def half_bytes(self, weight: Weight) -> torch.Tensor:
        """Return the half byte of each group, (N, G) in uint8."""
        return _halves(weight.tensors["indices"])[:, : -(-weight.shape[1] // GROUP)]

    def numbers(self, weight: Weight) -> torch.Tensor:
        """Return the whole matrix (N, C) in the dtype of its values, without scales."""
        halves, values = self.half_bytes(weight).long(), weight.tensors["values"]
        columns = torch.stack((halves & 3, halves >> 2), dim=-1)
        groups = values.new_zeros(*columns.shape[:2], GROUP)
        return groups.scatter_(2, columns, values.view(columns.shape)).flatten(1)[:, : weight.shape[1]]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight (N, C), in the dtype of its values or, of int8, in float32."""
        numbers = self.numbers(weight)
        return numbers.float() * weight.tensors["scale"][:, None] if self.values == "int8" else numbers

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        """Return the rows at these indices."""
        tensors = {key: tensor[index] for key, tensor in weight.tensors.items()}
        return Weight(self, tensors, (len(tensors["values"]), weight.shape[1]))

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Return rows or columns.

        Raises:
            CompositionError: columns are cut within a group of four.
        """
        if dim == 0:
            return self.rows(weight, slice(start, stop))
        outs, ins = weight.shape
        if start % GROUP or (stop % GROUP and stop != ins):
            raise CompositionError(
                f"columns {start} to {stop} of {ins} cut a group: {self.name} keeps {KEPT} of every {GROUP} of them"
            )
        first, last = start // GROUP, -(-stop // GROUP)
        tensors = dict(weight.tensors) | {
            "values": weight.tensors["values"][:, KEPT * first : KEPT * last],
            "indices": _some(weight.tensors["indices"], first, last),
        }
        return Weight(self, tensors, (outs, stop - start))


def _halves(stored: torch.Tensor) -> torch.Tensor:
    """Return half bytes, each in a byte."""
    return torch.stack((stored & _HALF_BYTE, stored >> 4), dim=-1).flatten(1)


def _some(stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the bytes of groups `first` to `last`, packed from a low half on."""
    part = stored[:, first // 2 : -(-last // 2)]
    if first % 2 == 0 and last % 2 == 0:
        return part
    return pack_half_bytes(_halves(part)[:, first % 2 :][:, : last - first])


def pack_half_bytes(halves_NG: torch.Tensor) -> torch.Tensor:
    """Return half bytes two a byte, (N, ceil(G / 2))."""
    halves = functional.pad(halves_NG, (0, halves_NG.shape[1] % 2), value=_FILLING)
    return halves[:, 0::2] | halves[:, 1::2] << 4


def _groups(tensor_NC: torch.Tensor) -> torch.Tensor:
    """Return (N, G, 4), a ragged last group filled with zeros."""
    padded = functional.pad(tensor_NC, (0, -tensor_NC.shape[1] % GROUP))
    return padded.view(len(padded), -1, GROUP)


def _taken(numbers_NC: torch.Tensor, halves_NG: torch.Tensor) -> torch.Tensor:
    """Return the two numbers of each group that half bytes name, (N, 2 G)."""
    groups = _groups(numbers_NC)
    # Of two columns in order the first is not the last, and the second not the first.
    first, second = halves_NG & 3, halves_NG >> 2
    lower = torch.where(first == 0, groups[..., 0], torch.where(first == 1, groups[..., 1], groups[..., 2]))
    upper = torch.where(second == 1, groups[..., 1], torch.where(second == 2, groups[..., 2], groups[..., 3]))
    return torch.stack((lower, upper), dim=-1).flatten(1)


def best_two(scores_NC: torch.Tensor) -> torch.Tensor:
    """Return which columns have the two highest scores of their group of four, (N, C). Of equal ones the first wins.

    A last group of fewer columns keeps two of them too, or the one that it has. Scores are numbers, none of them NaN.
    """
    padded = functional.pad(scores_NC, (0, -scores_NC.shape[1] % GROUP), value=-torch.inf)
    columns = padded.view(len(padded), -1, GROUP).unbind(-1)
    better = [torch.zeros_like(column, dtype=torch.int8) for column in columns]  # how many are before each
    for right in range(1, GROUP):
        for left in range(right):
            first = columns[left] >= columns[right]
            better[right] += first
            better[left] += ~first
    return (torch.stack(better, dim=-1) < KEPT).flatten(1)[:, : scores_NC.shape[1]]


def check_mask(name: str, mask_NC: torch.Tensor) -> None:
    """Check that a mask keeps at most two of every four columns.

    Raises:
        CheckpointError: it keeps more; names the weight, the first such row and the columns.
    """
    counts = _groups(mask_NC.to(torch.int8)).sum(-1, dtype=torch.int8)
    crowded = (counts > KEPT).nonzero()
    if len(crowded):
        row, group = map(int, crowded[0])
        last = min(GROUP * group + GROUP, mask_NC.shape[1]) - 1
        raise CheckpointError(
            f"{name} is not 2:4 sparse: row {row} keeps {int(counts[row, group])} of its columns {GROUP * group} to "
            f"{last}, and a group of {GROUP} keeps at most {KEPT}; {len(crowded)} of {counts.numel()} groups keep more"
        )


def compress(
    name: str,
    numbers_NC: torch.Tensor,
    mask_NC: torch.Tensor | None = None,
    scale_N: torch.Tensor | None = None,
) -> Weight:
    """Return a weight in `sparse24`, or in `sparse24_int8` where the numbers are int8.

    Numbers that are kept stay bit for bit; the others become 0, whatever they were.

    Args:
        name: the weight's, for messages.
        numbers_NC: floats, or int8.
        mask_NC: which of them are kept; None is those that are not 0.
        scale_N: of int8, float32: what a row's numbers are multiplied by.

    Raises:
        CheckpointError: more than two of four are kept; names the weight, and where.
    """
    assert (scale_N is not None) == (numbers_NC.dtype == torch.int8)
    mask = (numbers_NC != 0) if mask_NC is None else mask_NC.bool()
    assert mask.shape == numbers_NC.shape
    check_mask(name, mask)
    first, second, third, fourth = _groups(mask.to(torch.uint8)).unbind(-1)
    halves = _HALF_BYTES.to(mask.device)[(first | second << 1 | third << 2 | fourth << 3).int()]
    tensors = {"values": _taken(torch.where(mask, numbers_NC, 0), halves), "indices": pack_half_bytes(halves)}
    if scale_N is not None:
        tensors["scale"] = scale_N
    dtype: SparseValues = str(numbers_NC.dtype).removeprefix("torch.")  # type: ignore[assignment]
    return Weight(SparseFormat(dtype), tensors, tuple(numbers_NC.shape))
