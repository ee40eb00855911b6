"""The weight formats `nf4_g64` and the like: NormalFloat of 4 bits (Dettmers et al. 2023, QLoRA).

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `weight` | uint8 | (N, ceil(C / 2)) | q from 0 to 15, two a byte, even columns in the low half |
| `scale` | float32 | (N, G) | the largest magnitude of a group of columns; the last group may be smaller |

The weight is `LEVELS[q] * scale`. The levels are quantiles of the standard normal distribution, scaled to -1 to 1, with
0 among them. Formats that end in `_dq` have scales of a byte (double quantization), and two numbers a row:

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `scale` | uint8 | (N, G) | b; the scale is `low * 2 ** (b * step)` |
| `low` | float32 | (N,) | the smallest scale of the row that is not 0 |
| `step` | float32 | (N,) | log2(largest / smallest scale) / 255 |

QLoRA stores such scales as floats of 8 bits, in blocks of 256 that cross rows. Here rows stand alone, so that they can
be looked up and shared out between ranks; and bytes are logarithms, so that a group that is much smaller than others of
its row keeps a scale of its own size.

Shape legend: N out features, C in features, G groups.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from attrs import frozen

from intarsia.errors import CompositionError
from intarsia.quantizing.integers import pack_nibbles
from intarsia.types import Weight

#: From the paper's appendix E.
LEVELS: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
#: A byte -> the levels of its low and its high half, (256,): two floats in the place of an int64, so that one look-up
#: brings both.
_PAIRS = torch.tensor([(LEVELS[byte & 15], LEVELS[byte >> 4]) for byte in range(256)]).view(torch.int64).flatten()
#: A number is nearest to the level below as far as these, (15,).
_MIDDLES = torch.tensor([(low + high) / 2 for low, high in pairwise(LEVELS)])
_LARGEST_BYTE = 255


@frozen
class Nf4Format:
    """See the module.

    Attributes:
        group: columns that share a scale.
        double_quant: whether scales are bytes.
    """

    group: int
    double_quant: bool = False

    @property
    def name(self) -> str:
        """The format's key."""
        return f"nf4_g{self.group}{'_dq' if self.double_quant else ''}"

    @property
    def column_step(self) -> int:
        """Columns that share a scale: they stay together."""
        return self.group

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight (N, C)."""
        outs, ins = shape
        groups = -(-ins // self.group)
        return outs * (-(-ins // 2) + (groups + 8 if self.double_quant else 4 * groups))

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight in float32, (N, C)."""
        packed, columns = weight.tensors["weight"], weight.shape[1]
        pairs = _PAIRS.to(packed.device).index_select(0, packed.flatten().int())
        values_NC = pairs.view(torch.float32).view(len(packed), -1)
        scale_NG = scales(weight)
        if columns % self.group == 0:
            values_NC.view(*scale_NG.shape, self.group).mul_(scale_NG[..., None])
            return values_NC
        return values_NC[:, :columns] * scale_NG.repeat_interleave(self.group, dim=1)[:, :columns]

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        """Return the rows at these indices."""
        tensors = {key: tensor[index] for key, tensor in weight.tensors.items()}
        return Weight(self, tensors, (len(tensors["weight"]), weight.shape[1]))

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Return rows or columns.

        Raises:
            CompositionError: columns are cut within a group.
        """
        if dim == 0:
            return self.rows(weight, slice(start, stop))
        outs, ins = weight.shape
        if start % self.group or (stop % self.group and stop != ins):
            raise CompositionError(
                f"columns {start} to {stop} of {ins} cut a group: {self.name} has a scale for each {self.group} of them"
            )
        tensors = dict(weight.tensors)
        tensors["weight"] = tensors["weight"][:, start // 2 : -(-stop // 2)]
        tensors["scale"] = tensors["scale"][:, start // self.group : -(-stop // self.group)]
        return Weight(self, tensors, (outs, stop - start))


def nearest_levels(groups_NGS: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the nearest levels of the first columns of groups from -1 to 1, two a byte, (N, ceil(C / 2))."""
    numbers_NGS = torch.bucketize(groups_NGS.contiguous(), _MIDDLES.to(groups_NGS.device), out_int32=True)
    return pack_nibbles(numbers_NGS.flatten(1)[:, :columns])


def store_scales(scale_NG: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that scales from 0 on are stored in with double quantization. A scale of 0 is stored as any.

    All of this is in float64, so that bits do not depend on how logarithms and powers are computed.
    """
    scale = scale_NG.double()
    high_N = scale.amax(-1)
    low_N = torch.where(scale > 0, scale, torch.inf).amin(-1).clamp(max=high_N).float()
    # A row of zeros has no logarithms; what it is stored as is multiplied by zeros.
    span_N = torch.where(high_N > 0, torch.log2(high_N / low_N.double()), 0.0).clamp(min=0)
    step_N = (span_N / _LARGEST_BYTE).float()
    places_NG = torch.log2(torch.where(scale > 0, scale / low_N.double()[:, None], 1.0)) / step_N.double()[:, None]
    numbers = places_NG.nan_to_num(0.0).round().clamp(0, _LARGEST_BYTE).to(torch.uint8)
    return {"scale": numbers, "low": low_N, "step": step_N}


def scales(weight: Weight) -> torch.Tensor:
    """Return the scales of a weight, float32 (N, G)."""
    stored = weight.tensors["scale"]
    if stored.dtype != torch.uint8:
        return stored
    exponents = stored.double() * weight.tensors["step"].double()[:, None]
    return (weight.tensors["low"].double()[:, None] * torch.exp2(exponents)).float()
