"""Weight formats of whole numbers with scales: one documented layout for quantizers, checkpoints and kernels.

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `weight` | int8 | (N, C) | of 8 bits: q from -128 to 127 |
| `weight` | uint8 | (N, ceil(C / 2)) | of 4 bits: q from 0 to 15, two a byte, even columns in the low half |
| `scale` | a float | (N,) or (N, G) | one a row, or one a group of columns; the last group may be smaller |
| `zero` | uint8 | (N, G) | of `_zero` formats, which have 4 bits: the q that stands for 0 |
| `min` | a float | (N, G) | of `_min` formats: what q = 0 stands for |
| `input_scale` | float32 | (C,) | where it is there: multiplies the activations before the product |

The weight is `(q - zero) * scale`, where zero is 8 of 4 bits and 0 of 8 bits if the format has none; of `_min` formats
`q * scale + min`. Scales a row are float32, since those of small rows underflow half floats; scales and minima a group
are float16, bfloat16 or float32. A kernel that reads a format reads its `input_scale` too: the product is
`(x * input_scale) @ weight.T`, so that activations with outliers can be quantized (Xiao et al. 2022, SmoothQuant) and
important columns keep more bits (Lin et al. 2023, AWQ).

Formats are called `int8`, `int8_g32`, `int4_g64_zero` and so on. `_a16` at the end asks kernels to leave activations
in floats; without it they may round them to int8 as they come.

Shape legend: N out features, C in features, G groups, S columns a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal, TypeAlias

import torch
from attrs import evolve, frozen

from intarsia.errors import CompositionError
from intarsia.types import Weight

#: Columns that can share a scale.
GROUPS = (16, 32, 64, 128)
Offset: TypeAlias = Literal["none", "zero", "min"]
_OFFSETS: tuple[Offset, ...] = ("none", "zero", "min")
_MIDDLE = 8


@frozen
class IntegerFormat:
    """See the module.

    Attributes:
        bits: 4 or 8.
        group: columns that share a scale; None is the whole row, which 8 bits alone can have.
        offset: what is added to whole numbers times scale: nothing, by a zero point, or a minimum.
        activations: `float` where kernels are to leave them as they are.
    """

    bits: Literal[4, 8]
    group: int | None = None
    offset: Offset = "none"
    activations: Literal["int8", "float"] = "int8"

    def __attrs_post_init__(self) -> None:
        assert self.group in GROUPS or (self.group is None and self.bits == 8 and self.offset == "none")
        assert self.offset != "zero" or self.bits == 4

    @property
    def name(self) -> str:
        """The format's key."""
        group = "" if self.group is None else f"_g{self.group}"
        offset = "" if self.offset == "none" else f"_{self.offset}"
        return f"int{self.bits}{group}{offset}{'_a16' if self.activations == 'float' else ''}"

    @property
    def column_step(self) -> int:
        """Columns that share a scale: they stay together."""
        return self.group or 1

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight (N, C), with float32 scales a row or scales of 16 bits a group."""
        outs, ins = shape
        if self.group is None:
            return outs * ins + 4 * outs
        numbers = ins if self.bits == 8 else -(-ins // 2)
        return outs * (numbers + -(-ins // self.group) * {"none": 2, "zero": 3, "min": 4}[self.offset])

    def numbers(self, weight: Weight) -> torch.Tensor:
        """Return the whole numbers q, (N, C), in uint8 of 4 bits and int8 of 8 bits."""
        stored = weight.tensors["weight"]
        if self.bits == 8:
            return stored
        return unpack_nibbles(stored)[:, : weight.shape[1]]

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight in float32, (N, C)."""
        tensors, columns = weight.tensors, weight.shape[1]
        numbers, scale = self.numbers(weight).float(), self._spread(tensors["scale"].float(), columns)
        if self.offset == "min":
            values = numbers * scale + self._spread(tensors["min"].float(), columns)
        elif self.offset == "zero":
            values = (numbers - self._spread(tensors["zero"].float(), columns)) * scale
        else:
            values = (numbers - _MIDDLE if self.bits == 4 else numbers) * scale
        return values * tensors["input_scale"] if "input_scale" in tensors else values

    def _spread(self, scales: torch.Tensor, columns: int) -> torch.Tensor:
        """Return one number a column, (N, C) or (N, 1)."""
        if self.group is None:
            return scales[:, None]
        return scales.repeat_interleave(self.group, dim=1)[:, :columns]

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        """Return the rows at these indices."""
        tensors = {key: tensor if key == "input_scale" else tensor[index] for key, tensor in weight.tensors.items()}
        return Weight(self, tensors, (len(tensors["weight"]), weight.shape[1]))

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Return rows or columns.

        Raises:
            CompositionError: columns are cut within a group.
        """
        if dim == 0:
            return self.rows(weight, slice(start, stop))
        outs, ins = weight.shape
        step = self.group or 1
        if start % step or (stop % step and stop != ins):
            raise CompositionError(
                f"columns {start} to {stop} of {ins} cut a group: {self.name} has a scale for each {step} of them"
            )
        columns = slice(start, stop) if self.bits == 8 else slice(start // 2, (stop + 1) // 2)
        groups = slice(None) if self.group is None else slice(start // step, -(-stop // step))
        parts = {
            key: tensor[start:stop]
            if key == "input_scale"
            else tensor[:, columns]
            if key == "weight"
            else tensor
            if tensor.dim() == 1
            else tensor[:, groups]
            for key, tensor in weight.tensors.items()
        }
        return Weight(self, parts, (outs, stop - start))


def _formats(activations: Literal["int8", "float"]) -> list[IntegerFormat]:
    eight = [
        IntegerFormat(8, group, offset, activations) for group in GROUPS for offset in _OFFSETS if offset != "zero"
    ]
    four = [IntegerFormat(4, group, offset, activations) for group in GROUPS for offset in _OFFSETS]
    return [IntegerFormat(8, activations=activations), *eight, *four]


#: Every format that there is: what our own quantizers make, and GGUF, GPTQ, AWQ and compressed-tensors files have.
FORMATS: tuple[IntegerFormat, ...] = (*_formats("int8"), *_formats("float"))


def pack_nibbles(numbers_NC: torch.Tensor) -> torch.Tensor:
    """Return whole numbers from 0 to 15 two a byte, (N, ceil(C / 2)); the half behind an odd last column is 8."""
    columns = numbers_NC.shape[1]
    numbers = numbers_NC.to(torch.uint8)
    if columns % 2:
        numbers = torch.nn.functional.pad(numbers, (0, 1), value=_MIDDLE)
    return numbers[:, 0::2] | (numbers[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return bytes (N, W) as the numbers from 0 to 15 in them, (N, 2 W), the low half first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def common(formats: Sequence[IntegerFormat]) -> IntegerFormat | None:
    """Return the format that weights of these formats can be laid end to end in without losing a bit; None if none."""
    if len({f.group is None for f in formats}) > 1 or len({f.activations for f in formats}) > 1:
        return None
    offsets = {f.offset for f in formats}
    if "zero" in offsets and len(set(formats)) > 1:
        return None
    group = None if formats[0].group is None else reduce(math.gcd, (f.group or 0 for f in formats))
    offset: Offset = "min" if "min" in offsets else formats[0].offset
    return evolve(formats[0], bits=max(f.bits for f in formats), group=group, offset=offset)


def widen(weight: Weight, target: IntegerFormat) -> Weight:
    """Return the same weight in another format of more bits, smaller groups or minima, exactly.

    `target` must be what `common` gave for this weight's format and others. Where 4 bits get minima, `q * scale + min`
    is exact if scales have 16 bits, and a rounding of float32 off if they have 32.
    """
    source = weight.format
    assert isinstance(source, IntegerFormat)
    if source == target:
        return weight
    numbers, tensors = source.numbers(weight), dict(weight.tensors)
    if source.bits == 4:
        numbers = numbers.to(torch.int8)
        if source.offset == "none" and (target.bits == 8 or target.offset == "min"):
            numbers = numbers - _MIDDLE
    if target.bits == 4 and source.offset == "none" and target.offset == "min":
        # q - 8 has no place in 4 bits: 8 goes into the minimum, exactly, being a power of two.
        numbers = numbers + _MIDDLE
        tensors["min"] = _minima(tensors["scale"])
    tensors["weight"] = numbers if target.bits == 8 else pack_nibbles(numbers)
    if source.group != target.group:
        assert source.group is not None and target.group is not None
        times, groups = source.group // target.group, -(-weight.shape[1] // target.group)
        for key in ("scale", "min", "zero"):
            if key in tensors:
                tensors[key] = tensors[key].repeat_interleave(times, dim=1)[:, :groups].contiguous()
    if target.offset == "min" and "min" not in tensors:
        tensors["min"] = torch.zeros_like(tensors["scale"])
    return Weight(target, tensors, weight.shape)


def _minima(scale_NG: torch.Tensor) -> torch.Tensor:
    """Return -8 times scales in their dtype; in float32 where float16 has no number so large."""
    minima_NG = -_MIDDLE * scale_NG
    return minima_NG if minima_NG.isfinite().all() else -_MIDDLE * scale_NG.float()


def join(weights: Sequence[Weight]) -> Weight:
    """Lay weights end to end along their rows. Their formats have a `common` one, and their inputs are scaled alike."""
    formats = [weight.format for weight in weights]
    assert all(isinstance(f, IntegerFormat) for f in formats)
    target = common(formats)  # type: ignore[arg-type]
    assert target is not None
    parts = [widen(weight, target) for weight in weights]
    assert all(part.tensors.keys() == parts[0].tensors.keys() for part in parts)
    tensors = {
        key: parts[0].tensors[key] if key == "input_scale" else torch.cat([part.tensors[key] for part in parts])
        for key in parts[0].tensors
    }
    return Weight(target, tensors, (len(tensors["weight"]), weights[0].shape[1]))
