"""Weights in integer formats with random numbers, and what they stand for, in numpy and float64."""

import numpy as np
import torch

from intarsia.quantizing.integers import FORMATS, pack_nibbles
from intarsia.quantizing.rotated import ROTATED as ROTATED_FORMATS
from intarsia.quantizing.rotated import RotatedFormat
from intarsia.types import Weight

BY_NAME = {layout.name: layout for layout in FORMATS}
ROTATED = {layout.name: layout for layout in ROTATED_FORMATS}
#: One of each way that a kernel goes.
VARIED = [
    BY_NAME[name]
    for name in (
        *("int8", "int8_g16", "int8_g32_min", "int8_g128", "int4_g64", "int4_g128_zero", "int4_g32_min", "int4_g16"),
        *("int8_a16", "int8_g64_a16", "int8_g128_min_a16", "int4_g16_min_a16", "int4_g64_zero_a16", "int4_g128_a16"),
    )
]


def integer_weight(name, outs, ins, *, seed=0, dtype=torch.bfloat16, min_dtype=None, input_scale=False, unit=False):
    """A random weight (N, C); `unit` makes scales 1 and minima whole, so that products are whole numbers."""
    if name in ROTATED:
        plain = integer_weight(
            ROTATED[name].source.name, outs, ins, seed=seed, dtype=dtype, input_scale=input_scale, unit=unit
        )
        return Weight(ROTATED[name], plain.tensors, plain.shape)
    layout = BY_NAME[name]
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if layout.bits == 4 else (-128, 128)
    numbers = torch.randint(low, high, (outs, ins), generator=generator)
    groups = () if layout.group is None else (-(-ins // layout.group),)
    tensors = {"weight": pack_nibbles(numbers) if layout.bits == 4 else numbers.to(torch.int8)}
    scale = torch.rand(outs, *groups, generator=generator) * 0.01 + 1e-4
    if layout.group is not None:  # scales can be negative
        scale = scale * (torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1)
    tensors["scale"] = (torch.ones_like(scale) if unit else scale).to(torch.float32 if layout.group is None else dtype)
    if layout.offset == "zero":
        tensors["zero"] = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.uint8)
    if layout.offset == "min":
        minima = torch.randint(-9, 9, scale.shape, generator=generator).float()
        tensors["min"] = (minima if unit else minima * 0.03).to(min_dtype or dtype)
    if input_scale:
        tensors["input_scale"] = torch.rand(ins, generator=generator) + 0.5
    return Weight(layout, tensors, (outs, ins))


def parts_of(weight):
    """Whole numbers (int64), and scales, offsets and minima a column (float64), as the format's table has them."""
    layout, (_, ins) = weight.format, weight.shape
    layout = layout.source if isinstance(layout, RotatedFormat) else layout
    stored = weight.tensors["weight"].numpy()
    if layout.bits == 4:
        numbers = np.stack((stored & 15, stored >> 4), axis=-1).reshape(len(stored), -1)[:, :ins].astype(np.int64)
    else:
        numbers = stored.astype(np.int64)
    group = np.arange(ins) // (layout.group or ins)

    def spread(name):
        tensor = weight.tensors[name].double().numpy()
        return tensor[:, None] if tensor.ndim == 1 else tensor[:, group]

    zero = spread("zero") if "zero" in weight.tensors else 8.0 if layout.bits == 4 and layout.offset == "none" else 0.0
    least = spread("min") if "min" in weight.tensors else 0.0
    return numbers, np.broadcast_to(spread("scale"), numbers.shape), zero, least


def values_of(weight):
    """What a weight stands for before its input scale, in float64, and a bound of the magnitudes that make it up.

    Of a rotated one that is what rotated rows are multiplied by.
    """
    numbers, scale, zero, least = parts_of(weight)
    return (numbers - zero) * scale + least, (np.abs(numbers) + zero) * np.abs(scale) + np.abs(least)


def as_int8(rows, group):
    """Rows of float32 as integer kernels see them, in float64: per token and group, the largest is 127."""
    count, ins = rows.shape
    padded = np.pad(rows.astype(np.float32), ((0, 0), (0, -ins % group))).reshape(count, -1, group)
    largest = np.abs(padded).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    whole = np.rint(padded * inverse).astype(np.float64)  # ties to even
    return (whole * (largest / np.float32(127)).astype(np.float64)).reshape(count, -1)[:, :ins]
