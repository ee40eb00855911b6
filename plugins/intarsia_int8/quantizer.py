"""The weight format `int8`, and the quantizer that makes it by rounding to nearest.

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `weight` | int8 | (N, C) | whole numbers from -127 to 127 |
| `scale` | float32 | (N,) | at least 0 |

The weight is `weight * scale`, row by row. A row's scale is its largest magnitude / 127, so that every number is at
most half a scale off; a row of zeros has scale 0. Scales are float32: those of small rows would underflow half floats.

Shape legend: N out features, C in features.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from attrs import frozen

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.types import Weight, WeightFormat
from intarsia_int8.options import Int8Options

_EMBED, _POSITIONS, _HEAD = "embed.weight", "positions.weight", "head.weight"
#: Numbers quantized at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 22


@frozen
class Int8Format:
    """See the module."""

    name: str = "int8"

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight in float32, (N, C)."""
        return weight.tensors["weight"] * weight.tensors["scale"][:, None]

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Return rows or columns; any can be cut."""
        numbers, scale = weight.tensors["weight"], weight.tensors["scale"]
        tensors = {
            "weight": numbers.narrow(dim, start, stop - start),
            "scale": scale.narrow(0, start, stop - start) if dim == 0 else scale,
        }
        return Weight(self, tensors, tuple(tensors["weight"].shape))


INT8: WeightFormat = Int8Format()


def quantize(name: str, weight_NC: torch.Tensor) -> Weight:
    """Round a floating weight to int8.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    outs, ins = weight_NC.shape
    numbers = torch.empty(outs, ins, dtype=torch.int8, device=weight_NC.device)
    scale = torch.empty(outs, device=weight_NC.device)
    num_rows = max(1, _CHUNK // max(1, ins))
    for start in range(0, outs, num_rows):
        rows = weight_NC[start : start + num_rows].float()
        largest = rows.abs().amax(1)
        if not largest.isfinite().all():
            raise CheckpointError(f"{name} holds NaN or infinity, which int8 cannot represent")
        scale[start : start + num_rows] = largest / 127
        divisor = scale[start : start + num_rows]
        rows = rows / torch.where(divisor > 0, divisor, 1.0)[:, None]
        numbers[start : start + num_rows] = rows.round_().clamp_(-127, 127)
    return Weight(INT8, {"weight": numbers, "scale": scale}, (outs, ins))


@frozen
class Int8Quantizer:
    """Takes every matrix of the layers, and the head, as its options say. Routers and embeddings stay."""

    options: Int8Options

    @property
    def format(self) -> str:
        """`int8`."""
        return INT8.name

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the options include it."""
        del shape
        if name == _POSITIONS or name.endswith(".router.weight"):
            return False
        if (name == _EMBED and not self.options.embed) or (name == _HEAD and not self.options.head):
            return False
        return any(fnmatchcase(name, pattern) for pattern in self.options.include)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """A byte a number and a float32 a row."""
        del name
        outs, ins = shape
        return outs * ins + 4 * outs

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in int8; raise CheckpointError that names it where it holds NaN or infinity."""
        return quantize(name, weight.dequantize())


def build(context: PartContext) -> Int8Quantizer:
    """Make the part."""
    return Int8Quantizer(context.options)
