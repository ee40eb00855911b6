"""The quantizer of the format `int8`, by rounding to nearest: `intarsia.quantizing.integers` describes the format.

A row's scale is its largest magnitude / 127, so that every number is at most half a scale off; a row of zeros has scale
0.

Shape legend: N out features, C in features.
"""

from __future__ import annotations

import torch
from attrs import frozen

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.quantizing.integers import IntegerFormat
from intarsia.types import Weight
from intarsia_int8.options import Int8Options

#: Numbers quantized at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 22

INT8 = IntegerFormat(8)


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
        return self.options.takes(name)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """A byte a number and a float32 a row."""
        del name
        return INT8.num_bytes(shape)

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in int8; raise CheckpointError that names it where it holds NaN or infinity."""
        return quantize(name, weight.dequantize())


def build(context: PartContext) -> Int8Quantizer:
    """Make the part."""
    return Int8Quantizer(context.options)
