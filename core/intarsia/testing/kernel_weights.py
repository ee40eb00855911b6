"""Weights of every documented format with random numbers, and what they stand for, read number by number.

Shape legend: N out features, C in features, G groups.
"""

from __future__ import annotations

import torch
from attrs import frozen

from intarsia.ops import ANY_FORMAT
from intarsia.quantizing.integers import FORMATS, IntegerFormat, pack_nibbles
from intarsia.quantizing.rotated import ROTATED, RotatedFormat
from intarsia.quantizing.sparse import GROUP, KEPT, SparseFormat, best_two, compress
from intarsia.testing.kernel_calls import normal
from intarsia.types import Weight, dense

__all__ = ["read_formats", "values_of", "weight_in"]

_INTEGERS = {layout.name: layout for layout in FORMATS}
_ROTATED = {layout.name: layout for layout in ROTATED}
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@frozen
class _Tenths:
    """A format that no kernel knows: whole numbers, a tenth each. Whoever reads any format reads it."""

    name: str = "tenths"

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return weight.tensors["tenths"].float() / 10

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        numbers = weight.tensors["tenths"][index]
        return Weight(self, {"tenths": numbers}, tuple(numbers.shape))

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        numbers = weight.tensors["tenths"].narrow(dim, start, stop - start)
        return Weight(self, {"tenths": numbers}, tuple(numbers.shape))


def read_formats(formats: frozenset[str]) -> tuple[str, ...]:
    """Return the formats that a kernel is tried with; in the place of all formats some of each kind."""
    if ANY_FORMAT not in formats:
        return tuple(sorted(formats))
    return (
        "dense",
        "int8",
        "int4_g64_zero",
        "int8_g32_min",
        "int8_rotated",
        "sparse24",
        "sparse24_int8",
        _Tenths().name,
    )


def weight_in(name: str, outs: int, ins: int, dtype: torch.dtype, seed: int) -> Weight | None:
    """Return a random weight in a format; None where the format is not known here.

    Args:
        name: of the format.
        outs: out features, its rows.
        ins: in features, its columns.
        dtype: of numbers that are floats.
        seed: decides its numbers, which dtype its scales have, and whether it has an `input_scale`.
    """
    if name == "dense":
        return dense(normal(seed, outs, ins, dtype=dtype))
    if name == _Tenths().name:
        numbers = torch.randint(-30, 30, (outs, ins), generator=torch.Generator().manual_seed(seed))
        return Weight(_Tenths(), {"tenths": numbers.to(torch.int8)}, (outs, ins))
    if name in ("sparse24", "sparse24_int8"):
        return _sparse(outs, ins, dtype if name == "sparse24" else torch.int8, seed)
    if name in _ROTATED:
        plain = _integers(_ROTATED[name].source, outs, ins, seed)
        return Weight(_ROTATED[name], plain.tensors, plain.shape)
    return _integers(_INTEGERS[name], outs, ins, seed) if name in _INTEGERS else None


def _sparse(outs: int, ins: int, dtype: torch.dtype, seed: int) -> Weight:
    numbers = normal(seed, outs, ins)
    mask = best_two(numbers.abs())
    if dtype != torch.int8:
        return compress("w", numbers.to(dtype), mask)
    whole = (numbers * 40).round().clamp(-127, 127).to(torch.int8)
    return compress("w", whole, mask, normal(seed + 1, outs).abs() * 0.02 + 1e-4)


def _integers(layout: IntegerFormat, outs: int, ins: int, seed: int) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if layout.bits == 4 else (-128, 128)
    numbers = torch.randint(low, high, (outs, ins), generator=generator)
    grouped = () if layout.group is None else (-(-ins // layout.group),)
    scale = torch.rand(outs, *grouped, generator=generator) * 0.01 + 1e-3
    if layout.group is not None:  # scales can be negative
        scale = scale * (torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1)
        scale = scale.to(_SCALES[seed % 3])
    tensors = {"weight": pack_nibbles(numbers) if layout.bits == 4 else numbers.to(torch.int8), "scale": scale}
    if layout.offset == "zero":
        tensors["zero"] = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.uint8)
    if layout.offset == "min":
        tensors["min"] = (torch.randn(scale.shape, generator=generator) * 0.05).to(_SCALES[seed % 3])
    if seed % 2:
        tensors["input_scale"] = torch.rand(ins, generator=generator) + 0.5
    return Weight(layout, tensors, (outs, ins))


def values_of(weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a weight stands for before its input scale, and the magnitudes that make it up, (N, C) in float64.

    Of a rotated weight that is what rotated rows are multiplied by.
    """
    if isinstance(weight.format, RotatedFormat):
        return _read_integers(weight, weight.format.source)
    if isinstance(weight.format, IntegerFormat):
        return _read_integers(weight, weight.format)
    values = _read_sparse(weight) if isinstance(weight.format, SparseFormat) else weight.dequantize().double()
    return values, values.abs()


def _read_integers(weight: Weight, layout: IntegerFormat) -> tuple[torch.Tensor, torch.Tensor]:
    outs, ins = weight.shape
    stored = weight.tensors["weight"].long()
    if layout.bits == 4:
        numbers = torch.empty(outs, 2 * stored.shape[1], dtype=torch.float64)
        numbers[:, 0::2], numbers[:, 1::2] = (stored % 16).double(), (stored // 16).double()
        numbers = numbers[:, :ins]
    else:
        numbers = stored.double()
    columns = torch.arange(ins) // (layout.group or ins)

    def spread(key: str, without: float) -> torch.Tensor:
        if key not in weight.tensors:
            return torch.full((outs, ins), without, dtype=torch.float64)
        return weight.tensors[key].double().view(outs, -1)[:, columns]

    zero = spread("zero", 8.0 if layout.bits == 4 and layout.offset == "none" else 0.0)
    scale, least = spread("scale", 1.0), spread("min", 0.0)
    return (numbers - zero) * scale + least, (numbers.abs() + zero) * scale.abs() + least.abs()


def _read_sparse(weight: Weight) -> torch.Tensor:
    outs, ins = weight.shape
    groups = -(-ins // GROUP)
    stored, values = weight.tensors["indices"].long(), weight.tensors["values"].double()
    whole = torch.zeros(outs, groups, GROUP, dtype=torch.float64)
    for group in range(groups):
        half = stored[:, group // 2] // 16 if group % 2 else stored[:, group // 2] % 16
        for place, column in enumerate((half % 4, half // 4)):
            whole[torch.arange(outs), group, column] = values[:, KEPT * group + place]
    scale = weight.tensors.get("scale")
    return whole.flatten(1)[:, :ins] * (1 if scale is None else scale.double()[:, None])
