"""Matrices that stay in their file's bits: GGUF's quantized types as formats of `intarsia.quantizing.integers`.

| type | bits a weight | format | bits a weight in memory | |
| --- | --- | --- | --- | --- |
| `Q8_0` | 8.5 | `int8_g32` | 8.5 | exact |
| `Q4_0`, `Q4_1` | 4.5, 5 | `int4_g32`, `int4_g32_min` | 4.5, 5 | exact |
| `Q5_0`, `Q5_1` | 5.5, 6 | `int8_g32`, `int8_g32_min` | 8.5, 9 | exact |
| `Q4_K`, `Q5_K` | 4.5, 5.5 | `int4_g32_min`, `int8_g32_min` | 5, 9 | scales rounded |
| `Q6_K` | 6.56 | `int8_g16` | 9 | scales rounded |
| `Q3_K`, `Q2_K` | 3.44, 2.63 | `int4_g16`, `int4_g16_min` | 5, 6 | scales rounded |

The scale of a K type's group is a float16 times a whole number of 4 to 8 bits, and so is its minimum. Here each becomes
one float16, off by at most 2^-11 of itself. Of `Q4_K` weights of SmolLM2 that moves a weight by 4% of what quantization
moved it by (root of mean squares), at random, so that the whole error grows by 0.1%; bfloat16 would add 3%. float32
would be exact, and take another bit a weight for scales of 32 columns, two for those of 16. Types with tables of values
(`IQ4_NL` and the like) are dequantized.

Shape legend: B blocks of the file, G columns that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import numpy as np
import torch
from attrs import fields, frozen

from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import IntegerFormat
from intarsia.types import Weight
from intarsia_gguf.tensors import GgufTensor, place_rows

#: Whole numbers, one a byte; and scales and minima, one a group of columns; of so many blocks each.
Parts: TypeAlias = tuple[np.ndarray, dict[str, np.ndarray]]
_QUADS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)
_OCTETS = np.arange(8, dtype=np.uint8).reshape(8, 1)


def _float(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 at this byte of each block, (B, 1), as it is."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _halves(pairs: np.ndarray, run: int) -> np.ndarray:
    """Return nibbles, one a byte: of each run of bytes first the low ones, then the high ones."""
    runs = pairs.reshape(-1, run)
    numbers = np.empty((len(runs), 2, run), dtype=np.uint8)
    np.bitwise_and(runs, 15, out=numbers[:, 0])
    np.right_shift(runs, 4, out=numbers[:, 1])
    return numbers.reshape(len(pairs), -1)


def _signed(numbers: np.ndarray, middle: int) -> np.ndarray:
    """Return numbers less their middle, as int8."""
    numbers -= np.uint8(middle)  # wraps round, as int8's bits do
    return numbers.view(np.int8)


def _q8_0(blocks: np.ndarray) -> Parts:
    return blocks[:, 2:].view(np.int8), {"scale": _float(blocks, 0)}


def _q4_0(blocks: np.ndarray) -> Parts:
    return _halves(blocks[:, 2:], 16), {"scale": _float(blocks, 0)}


def _q4_1(blocks: np.ndarray) -> Parts:
    return _halves(blocks[:, 4:], 16), {"scale": _float(blocks, 0), "min": _float(blocks, 2)}


def _five(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return numbers of 5 bits: 32 fifth bits from this byte on, then their nibbles."""
    numbers = _halves(blocks[:, start + 4 :], 16)
    numbers |= np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << 4
    return numbers


def _q5_0(blocks: np.ndarray) -> Parts:
    return _signed(_five(blocks, 2), 16), {"scale": _float(blocks, 0)}


def _q5_1(blocks: np.ndarray) -> Parts:
    return _five(blocks, 4).view(np.int8), {"scale": _float(blocks, 0), "min": _float(blocks, 2)}


def _scaled(whole: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return whole numbers times their block's factor, rounded to float16; what is too large becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (factor.astype(np.float32) * whole.astype(np.float32)).astype(np.float16)


def _scales_and_minima(blocks: np.ndarray) -> dict[str, np.ndarray]:
    """Return those of Q4_K and Q5_K, of 8 groups: d, dmin, then 6 bits each in 12 bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=1)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=1)
    return {"scale": _scaled(scales, _float(blocks, 0)), "min": _scaled(minima, -_float(blocks, 2))}


def _q4_k(blocks: np.ndarray) -> Parts:
    return _halves(blocks[:, 16:], 32), _scales_and_minima(blocks)


def _q5_k(blocks: np.ndarray) -> Parts:
    numbers = _halves(blocks[:, 48:], 32)
    fifth = (blocks[:, None, 16:48] >> _OCTETS) & 1
    numbers |= (fifth << 4).reshape(numbers.shape)
    return numbers.view(np.int8), _scales_and_minima(blocks)


def _q6_k(blocks: np.ndarray) -> Parts:
    numbers = _halves(blocks[:, :128], 64)
    top = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _QUADS) & 3
    numbers |= (top << 4).reshape(numbers.shape)
    return _signed(numbers, 32), {"scale": _scaled(blocks[:, 192:208].view(np.int8), _float(blocks, 208))}


def _two(quads: np.ndarray) -> np.ndarray:
    """Return numbers of 2 bits, four a byte: of each run of 32 bytes first the lowest two bits, and so on."""
    return ((quads.reshape(-1, 2, 1, 32) >> _QUADS) & 3).reshape(len(quads), 256)


def _q3_k(blocks: np.ndarray) -> Parts:
    # The third bit is 1 where nothing is taken off; else 4 is. Numbers are from -4 to 3, and 8 stands for 0.
    numbers = _two(blocks[:, 32:96])
    numbers += (((blocks[:, None, :32] >> _OCTETS) & 1) << 2).reshape(numbers.shape)
    numbers += 4
    low = np.concatenate((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), axis=1)
    high = ((blocks[:, None, 104:108] >> _QUADS) & 3).reshape(-1, 16)
    return numbers, {"scale": _scaled(_signed(low | (high << 4), 32), _float(blocks, 108))}


def _q2_k(blocks: np.ndarray) -> Parts:
    scales = blocks[:, :16]
    return _two(blocks[:, 16:80]), {
        "scale": _scaled(scales & 15, _float(blocks, 80)),
        "min": _scaled(scales >> 4, -_float(blocks, 82)),
    }


@frozen
class _Kept:
    """What a type becomes, and how a block of it is taken apart."""

    format: IntegerFormat
    split: Callable[[np.ndarray], Parts]


def _kept(
    bits: Literal[4, 8], group: int, split: Callable[[np.ndarray], Parts], offset: Literal["none", "min"] = "none"
) -> _Kept:
    return _Kept(IntegerFormat(bits, group, offset), split)


_TYPES: Mapping[str, _Kept] = {
    "Q8_0": _kept(8, 32, _q8_0),
    "Q4_0": _kept(4, 32, _q4_0),
    "Q4_1": _kept(4, 32, _q4_1, "min"),
    "Q5_0": _kept(8, 32, _q5_0),
    "Q5_1": _kept(8, 32, _q5_1, "min"),
    "Q2_K": _kept(4, 16, _q2_k, "min"),
    "Q3_K": _kept(4, 16, _q3_k),
    "Q4_K": _kept(4, 32, _q4_k, "min"),
    "Q5_K": _kept(8, 32, _q5_k, "min"),
    "Q6_K": _kept(8, 16, _q6_k),
}


@frozen(eq=False)
class GgufWeight(GgufTensor):
    """A matrix of one of these types, as `intarsia.types.StoredWeight` has it."""

    @property
    def weight_format(self) -> IntegerFormat:
        """The format that its type becomes."""
        return _TYPES[self.format].format

    def read_weight(self) -> Weight:
        """Return the matrix in its format, its rows in Hugging Face's order. Beside it, a few megabytes are in use.

        Raises:
            CheckpointError: the file has become shorter since it was opened, or a scale is not finite in float16.
        """
        self.check_there()
        num_rows, columns = self.rows
        fmt = self.weight_format
        shapes = {"scale": columns // fmt.group, "min": columns // fmt.group} if fmt.group else {}
        tensors = {
            "weight": torch.empty(num_rows, columns, dtype=torch.int8)
            if fmt.bits == 8
            else torch.empty(num_rows, columns // 2, dtype=torch.uint8)
        } | {
            key: torch.empty(num_rows, count, dtype=torch.float16)
            for key, count in shapes.items()
            if key == "scale" or fmt.offset == "min"
        }
        split = _TYPES[self.format].split
        for start, stop in self.blocks():
            numbers, scales = split(self.raw(start, stop))
            parts = {"weight": numbers if fmt.bits == 8 else _pairs(numbers), **scales}
            for key, values in parts.items():
                rows = torch.from_numpy(values.reshape(stop - start, -1))
                place_rows(tensors[key][start:stop], rows, self.head_dim)
        self._check_scales(tensors)
        return Weight(fmt, tensors, self.rows)

    def _check_scales(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for key in tensors.keys() & {"scale", "min"}:
            if not tensors[key].isfinite().all():
                raise CheckpointError(
                    f"{self.path}: tensor {self.info.name!r} is {self.format} and has a {key} that is not finite, or "
                    "too large for float16; model.weights = 'dense' reads it as plain numbers"
                )


def _pairs(numbers: np.ndarray) -> np.ndarray:
    """Return numbers from 0 to 15 two a byte, the even ones in the low half, as `pack_nibbles` does, in two passes."""
    words = np.ascontiguousarray(numbers).view("<u2")
    pairs: np.ndarray = (words | (words >> 4)).astype(np.uint8)
    return pairs


def stored(tensor: GgufTensor) -> GgufTensor:
    """Return a tensor as a weight, if it can stay in the file's bits; else itself."""
    if tensor.format not in _TYPES or len(tensor.rows) != 2 or tensor.transposed or tensor.shift:
        return tensor
    return GgufWeight(**{each.name: getattr(tensor, each.name) for each in fields(GgufTensor)})
