"""Weights of whole numbers as the Triton kernels read them: in tiles that lie in one piece, and back, bit for bit.

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `numbers` | int32 | (P, S, 64, 32) | of 4 bits, q: eight a word; of 8 bits, q + 128: four |
| `numbers` | int8 | (P, S, 64, 128) | of the format `int8`, q |
| `scales` | float32 | (N') | one a row |
| `scales` | float16 | (G, N') | one a group, where there are no minima and float16 has these very numbers |
| `scales`, `minima` | float32 | (G, N') | of all others: what 4 bits or a zero point stand for is in the minimum |
| `zeros` | uint8 | (G, N') | of `_zero` formats |
| `locks` | int32 | (4 N' / 64) | zeros: how many parts of a tile's sums have arrived |
| `input_scale` | float32 | (C,) | where the weight has one |

A panel is 64 outputs, a step 256 columns of 4 bits or 128 of 8. A panel's step is 8 KiB in one piece, which a program
streams in whole lines. Each half of a word, 16 bits, has from the lowest on numbers of columns that lie 64 apart; the
halves lie side by side. So a shift and a mask of the words give 64 columns that lie side by side, two a word: two times
32 with one scale an output, in every format with groups of 32, 64 or 128 columns. N' is N made a multiple of 128, and
behind C are zeros.

Shape legend: N out features, C in features, P panels, S steps, G groups.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CompositionError
from intarsia.quantizing.integers import IntegerFormat, unpack_nibbles
from intarsia.types import Weight

#: Outputs a panel; outputs are padded to a multiple of twice as many.
PANEL = 64
#: Columns that lie side by side in a row of words.
WIDTH = 64
#: Columns that are summed apart, from zero.
SPLIT = 1024
#: Row tiles whose sums can be split between programs.
LOCKED_TILES = 4
#: Name of the packed format.
PACKED = "cuda"
#: Groups that have one scale in a quarter of a step.
GROUPS = (32, 64, 128)
#: Products of so many int8 numbers, 127 times -128 each, have a sum that an int32 holds.
_COLUMNS = ((1 << 31) - 1) // (127 * 128)


@frozen
class Packed:
    """The format of one packed weight.

    Attributes:
        source: the format it was packed from.
        scale_dtype, min_dtype: what its scales and minima were.
        wide: whether scales a group are float32, with minima.
        name: the same for all, whatever they were packed from.
    """

    source: IntegerFormat
    scale_dtype: torch.dtype
    min_dtype: torch.dtype | None = None
    wide: bool = False
    name: str = PACKED

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight (N, C) that was packed, as its own format dequantizes it."""
        return unpack(weight).dequantize()

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        """Return rows in the format that they were packed from; no others are unpacked."""
        device = weight.tensors["numbers"].device
        chosen = torch.arange(weight.shape[0], device=device)[index]
        return _unpacked(weight, chosen)

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Refuse: tiles are not cut."""
        del weight, dim, start, stop
        raise CompositionError("a weight is sharded before it is packed for the CUDA kernels")


def reads(layout: IntegerFormat) -> bool:
    """Whether the kernels read a format: one scale a row, or one for 32, 64 or 128 columns."""
    return layout.group is None or layout.group in GROUPS


def pack(weight: Weight) -> Weight:
    """Lay a weight out in tiles, on the device where it is.

    Raises:
        CompositionError: a format that the kernels do not read, or rows so long that exact sums could overflow.
    """
    layout = weight.format
    if not isinstance(layout, IntegerFormat) or not reads(layout):
        raise CompositionError(f"the CUDA kernels do not read weights in the format {layout.name!r}")
    outs, ins = weight.shape
    if layout.group is None and ins > _COLUMNS:
        raise CompositionError(f"a weight of {ins} columns: int8 products of more than {_COLUMNS} overflow an int32")
    source = weight.tensors
    padded = round_up(outs, 2 * PANEL)
    tensors = {
        "numbers": _words(_tiles(_unsigned(source["weight"], layout), step_of(layout)), layout),
        "locks": torch.zeros(LOCKED_TILES * padded // PANEL, dtype=torch.int32, device=source["weight"].device),
    }
    wide = False
    if layout.group is None:
        tensors["scales"] = functional.pad(source["scale"].float(), (0, padded - outs))
    else:
        groups = -(-round_up(ins, step_of(layout)) // layout.group)
        by_group = {key: _by_group(source[key], groups, padded) for key in ("scale", "zero", "min") if key in source}
        wide = layout.offset == "min" or not torch.equal(source["scale"].half().float(), source["scale"].float())
        tensors["scales"] = by_group["scale"].float() if wide else by_group["scale"].half()
        if wide:
            middle = 8 if layout.bits == 4 else 0
            zero = by_group.get("zero", torch.full((), middle, device=source["scale"].device)).float()
            tensors["minima"] = by_group["min"].float() if "min" in by_group else -zero * tensors["scales"]
        if "zero" in by_group:
            tensors["zeros"] = by_group["zero"]
    if "input_scale" in source:
        tensors["input_scale"] = source["input_scale"].float().contiguous()
    packed = Packed(layout, source["scale"].dtype, source["min"].dtype if "min" in source else None, wide)
    return Weight(packed, tensors, weight.shape)


def unpack(weight: Weight) -> Weight:
    """Return the weight that was packed, bit for bit."""
    return _unpacked(weight, torch.arange(weight.shape[0], device=weight.tensors["numbers"].device))


def step_of(layout: IntegerFormat) -> int:
    """Return how many columns a step has."""
    return WIDTH * 16 // layout.bits


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than a number."""
    return -(-number // multiple) * multiple


def _unpacked(weight: Weight, rows: torch.Tensor) -> Weight:
    """Return rows of a packed weight in its own format."""
    packed, ins = weight.format, weight.shape[1]
    assert isinstance(packed, Packed)
    layout, tensors = packed.source, weight.tensors
    tiles = tensors["numbers"].transpose(1, 2)[rows // PANEL, rows % PANEL]  # rows, steps, words
    found = {"weight": _stored(_numbers(tiles, layout).flatten(1), ins, layout)}
    if layout.group is None:
        found["scale"] = tensors["scales"][rows].to(packed.scale_dtype)
    else:
        groups = -(-ins // layout.group)
        found["scale"] = tensors["scales"][:groups, rows].t().to(packed.scale_dtype).contiguous()
        if packed.min_dtype is not None:
            found["min"] = tensors["minima"][:groups, rows].t().to(packed.min_dtype).contiguous()
        if "zeros" in tensors:
            found["zero"] = tensors["zeros"][:groups, rows].t().contiguous()
    if "input_scale" in tensors:
        found["input_scale"] = tensors["input_scale"]
    return Weight(layout, found, (len(rows), ins))


def _is_exact(layout: IntegerFormat) -> bool:
    """Whether rows become int8 for it."""
    return layout.group is None and layout.activations == "int8"


def _unsigned(stored: torch.Tensor, layout: IntegerFormat) -> torch.Tensor:
    """Return the numbers of a stored weight as bytes, (N, C): q of 4 bits, q + 128 of 8."""
    if layout.bits == 4:
        return unpack_nibbles(stored)
    return stored if _is_exact(layout) else stored.view(torch.uint8) ^ 128


def _stored(numbers: torch.Tensor, ins: int, layout: IntegerFormat) -> torch.Tensor:
    """Return what `_unsigned` was given, of rows with padding behind them."""
    if layout.bits == 8:
        octets = numbers[:, :ins].contiguous()
        return octets if _is_exact(layout) else (octets ^ 128).view(torch.int8)
    numbers = numbers[:, : round_up(ins, 2)]
    return numbers[:, 0::2] | (numbers[:, 1::2] << 4)


def _tiles(numbers_NC: torch.Tensor, step: int) -> torch.Tensor:
    """Return (P, S, 64, step) of (N, C) numbers, padded with zeros."""
    outs, ins = numbers_NC.shape
    padded = functional.pad(numbers_NC, (0, -ins % step, 0, -outs % (2 * PANEL)))
    tiles = padded.view(-1, PANEL, padded.shape[1] // step, step).transpose(1, 2)
    return tiles.clone(memory_format=torch.contiguous_format)


def _words(tiles: torch.Tensor, layout: IntegerFormat) -> torch.Tensor:
    """Return tiles (..., a step's columns) of bytes as (..., 32) int32 words."""
    if _is_exact(layout):
        return tiles
    pieces = tiles.unflatten(-1, (16 // layout.bits, WIDTH))  # type: ignore[no-untyped-call]
    if layout.bits == 4:
        pieces = pieces[..., 0::2, :] | (pieces[..., 1::2, :] << 4)
    words: torch.Tensor = pieces.transpose(-1, -2).flatten(-2).view(torch.int32)
    return words


def _numbers(words: torch.Tensor, layout: IntegerFormat) -> torch.Tensor:
    """Return what `_words` was given."""
    if _is_exact(layout):
        return words
    octets = words.contiguous().view(torch.uint8)
    octets = octets.reshape(*words.shape[:-1], WIDTH, 2).transpose(-1, -2)
    if layout.bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), dim=-2).flatten(-3, -2)
    return octets.flatten(-2)


def _by_group(tensor_NG: torch.Tensor, groups: int, outs: int) -> torch.Tensor:
    """Return (groups, outs) of a number an output and group, padded with zeros."""
    padding = (0, groups - tensor_NG.shape[1], 0, outs - tensor_NG.shape[0])
    return functional.pad(tensor_NG, padding).t().contiguous()
