"""Linear layers over weights of whole numbers on GPUs: which form of which kernel runs, and how it is launched.

| weight formats | activations become | result |
| --- | --- | --- |
| `int8` | int8, a scale a token | exact int32 sums, then both scales |
| `int8_a16` | as they come | fp32 sums of exact products, then the scale |
| `int8_g*`, `int4_g*` | as they come | weights in the activations' dtype, fp32 sums |

Groups are of 32, 64 or 128 columns; `_a16` at the end of such a name changes nothing. Every row count goes through the
same sums in the same order, so a row has the same bits in any batch: see `kernels`. Up to 16 rows a program has 64
outputs and 16 rows: decoding is bound by reading weights. More rows share what is read.

Shape legend: T tokens, C in features, N out features.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.gpu_kernels import CAPABILITIES, TYPES, Specialisation, table
from intarsia.ops import linear as reference
from intarsia.protocols import Kernel
from intarsia.quantizing.integers import FORMATS as INTEGER_FORMATS
from intarsia.types import Invariance, Weight
from intarsia_cuda.quantized import kernels
from intarsia_cuda.quantized.packing import LOCKED_TILES, PACKED, SPLIT, WIDTH, Packed, pack, reads, round_up

#: Multiples of it are rows' widths and addresses, so that 16 bytes are read at a time.
_ALIGNED = 16
#: Numbers of a row that a program quantizes at a time.
_BLOCK = 8192
_QUANTIZE = "quantize"


@frozen
class Tile:
    """How a product is cut between programs.

    Attributes:
        outs, rows: of a tile.
        num_warps, num_stages: how it is launched.
        resident: programs that a multiprocessor is to have at least, before one program sums whole rows.
    """

    outs: int
    rows: int
    num_warps: int
    num_stages: int
    resident: int


_FEW, _MANY = Tile(64, 16, 4, 5, 4), Tile(128, 64, 8, 3, 2)
#: Steps of 4 bits have twice the columns, and stages twice the rows' numbers.
_FEW4, _MANY4 = Tile(64, 16, 4, 3, 4), Tile(128, 64, 8, 2, 2)
#: Sums in int32 alone, of numbers that need not be made floats.
_MANY_EXACT = Tile(128, 128, 8, 3, 1)
_INT4, _INT8, _INT4_WIDE, _INT8_WIDE, _ROWS, _EXACT = "int4", "int8", "int4_wide", "int8_wide", "rows", "exact"
#: (kernel, activation dtype) -> its tiles, fewest rows first. bfloat16 is what engines run on GPUs unless they are told
#: otherwise; checkpoints of 4 bits are made for float16.
TILES: Mapping[tuple[str, str], tuple[Tile, ...]] = {
    (_INT4, "bfloat16"): (_FEW4, _MANY4),
    (_INT8, "bfloat16"): (_FEW, _MANY),
    (_ROWS, "bfloat16"): (_FEW, _MANY),
    (_EXACT, "bfloat16"): (_FEW, _MANY_EXACT),
    (_INT4_WIDE, "bfloat16"): (_FEW4, _MANY4),
    (_INT8_WIDE, "bfloat16"): (_FEW, _MANY),
    (_INT4, "float16"): (_FEW4, _MANY4),
    (_INT4_WIDE, "float16"): (_FEW4, _MANY4),
}
#: Compiled ahead of time for every architecture: what models run in most. The others for one, which their code tells
#: apart least.
_EVERYWHERE = frozenset({(kind, "bfloat16") for kind in (_INT4, _INT8, _ROWS, _EXACT)})
_ONE = (90,)


def _name(kind: str, dtype: str, tile: Tile) -> str:
    return f"linear[{kind}, {dtype}, {tile.rows} rows]"


def _form(kind: str, dtype: str, tile: Tile) -> Specialisation:
    is_grouped = kind not in {_ROWS, _EXACT}
    is_wide = kind in {_INT4_WIDE, _INT8_WIDE}
    floats, bits = f"*{TYPES[dtype]}", 4 if kind in {_INT4, _INT4_WIDE} else 8
    pointers = {
        "out": floats,
        "x": "*i8" if kind == _EXACT else floats,
        "numbers": "*i8" if kind == _EXACT else "*i32",
        "scales": "*fp16" if is_grouped and not is_wide else "*fp32",
        "offsets" if is_grouped else "row_scales": "*u8" if is_grouped and not is_wide else "*fp32",
        "bias": floats,
        "partials": "*i32" if kind == _EXACT else "*fp32",
        "locks": "*i32",
    }
    counts = ("num_rows", "outs", "ins", "x_stride", *(("padded", "shift", "zero_outs") if is_grouped else ()))
    aligned = (*pointers, "outs", "ins", "x_stride", *(("padded",) if is_grouped else ()))
    constants: dict[str, Any] = {"BLOCK_N": tile.outs, "BLOCK_T": tile.rows}
    if is_grouped:
        constants |= {"BITS": bits, "WIDE": is_wide}
    else:
        constants["EXACT"] = kind == _EXACT
    return Specialisation(
        name=_name(kind, dtype, tile),
        kernel=kernels.grouped if is_grouped else kernels.per_row,
        signature={**pointers, **dict.fromkeys((*counts, "bias_outs", "parts"), "i32")},
        constants=constants,
        aligned=aligned,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        capabilities=CAPABILITIES if (kind, dtype) in _EVERYWHERE else _ONE,
    )


def _quantize_form() -> Specialisation:
    pointers = {"numbers": "*i8", "scales": "*fp32", "x": "*bf16", "input_scale": "*fp32"}
    counts = ("ins", "x_stride", "padded", "scaled")
    return Specialisation(
        name=_QUANTIZE,
        kernel=kernels.quantize,
        signature={**pointers, **dict.fromkeys(counts, "i32")},
        constants={"BLOCK": _BLOCK},
        aligned=(*pointers, "x_stride", "padded"),
        num_warps=16,
    )


def specialisations() -> list[Specialisation]:
    """Return every form that is launched."""
    forms = [_form(kind, dtype, tile) for (kind, dtype), tiles in TILES.items() for tile in tiles]
    return [*forms, _quantize_form()]


_FORMS = table(specialisations())


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """Return how many run at once; 2 where kernels run in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def quantize_rows(x_TC: torch.Tensor, input_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round bfloat16 rows, times a float32 scale a column, to int8 with a scale a row, as `intarsia.ops.int8_entries`.

    Returns:
        int8 numbers (T, C'), where C' is C made a multiple of 16 by zeros, and float32 scales (T,): NaN where a row is
        not finite.
    """
    num_rows, ins = x_TC.shape
    x = _aligned(x_TC)
    padded = round_up(ins, _ALIGNED)
    numbers = torch.empty((num_rows, padded), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        other = scales if input_scale is None else input_scale
        _FORMS[_QUANTIZE].launch(
            (num_rows,), numbers, scales, x, other, ins, x.stride(0), padded, 0 if input_scale is None else ins
        )
    return numbers, scales


def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N), in x's dtype. A weight that is not packed is dequantized."""
    packed = weight.format
    if not isinstance(packed, Packed):
        return reference(x_TC, weight, bias_N)
    layout, input_scale = packed.source, weight.tensors.get("input_scale")
    if layout.group is None and layout.activations == "int8":
        return linear_int8(*quantize_rows(x_TC, input_scale), weight, bias_N, x_TC.dtype)
    if input_scale is not None:
        x_TC = torch.mul(x_TC, input_scale, out=torch.empty_like(x_TC))  # in fp32, rounded to x's dtype
    return _run(_kind(packed), x_TC, None, weight, bias_N, x_TC.dtype)


def linear_int8(
    numbers_TC: torch.Tensor,
    scales_T: torch.Tensor,
    weight: Weight,
    bias_N: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return (T, N) of rows that are int8 numbers with a scale each, by a packed `int8` weight.

    Args:
        numbers_TC: of C columns, or of more that are zeros. The weight's `input_scale` is in them.
        scales_T: float32.
        weight: packed.
        bias_N: added in fp32.
        dtype: of the result.
    """
    return _run(_EXACT, numbers_TC, scales_T, weight, bias_N, dtype)


def _kind(packed: Packed) -> str:
    if packed.source.group is None:
        return _ROWS
    if packed.source.bits == 4:
        return _INT4_WIDE if packed.wide else _INT4
    return _INT8_WIDE if packed.wide else _INT8


def _aligned(x_TC: torch.Tensor) -> torch.Tensor:
    """Return rows that start at multiples of 16 bytes and numbers, with zeros behind a width that is none."""
    padding = -x_TC.shape[1] % _ALIGNED
    if padding:
        return functional.pad(x_TC, (0, padding))
    plain = x_TC.stride(1) == 1 and x_TC.stride(0) % _ALIGNED == 0 and x_TC.data_ptr() % _ALIGNED == 0
    return x_TC if plain else x_TC.clone(memory_format=torch.contiguous_format)


def _bias(bias_N: torch.Tensor, dtype: torch.dtype, outs: int) -> torch.Tensor:
    bias = functional.pad(bias_N, (0, outs - len(bias_N))) if len(bias_N) < outs else bias_N
    bias = bias.to(dtype).contiguous()
    return bias if bias.data_ptr() % _ALIGNED == 0 else bias.clone()


def _run(
    kind: str,
    x_TC: torch.Tensor,
    row_scales: torch.Tensor | None,
    weight: Weight,
    bias_N: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the form for so many rows."""
    num_rows, outs = x_TC.shape[0], round_up(weight.shape[0], _ALIGNED)
    assert weight.shape[1] <= x_TC.shape[1] <= round_up(weight.shape[1], _ALIGNED), f"{x_TC.shape} times {weight.shape}"
    x, tensors = _aligned(x_TC), weight.tensors
    out = torch.empty((num_rows, outs), dtype=dtype, device=x.device)
    if not num_rows:
        return out[:, : weight.shape[0]]
    name = str(dtype).removeprefix("torch.")
    tile = _tile(TILES[kind, name], num_rows)
    tiles = -(-outs // tile.outs) * -(-num_rows // tile.rows)
    parts = _parts(tile, tiles, num_rows, x.shape[1], x.device)
    sums = torch.int32 if kind == _EXACT else torch.float32
    partials = torch.empty(parts * tiles * tile.outs * tile.rows if parts > 1 else 0, dtype=sums, device=x.device)
    arguments = (
        *(out, x, tensors["numbers"], tensors["scales"]),
        _offsets(weight) if row_scales is None else row_scales,
        *(out if bias_N is None else _bias(bias_N, dtype, outs), partials, tensors["locks"]),
        *(num_rows, outs, x.shape[1], x.stride(0), *_groups(weight)),
    )
    _FORMS[_name(kind, name, tile)].launch((tiles, parts), *arguments, 0 if bias_N is None else outs, parts)
    return out if outs == weight.shape[0] else out[:, : weight.shape[0]].contiguous()


def _tile(tiles: tuple[Tile, ...], num_rows: int) -> Tile:
    """Return the first that has all the rows, or the last."""
    return next((tile for tile in tiles if num_rows <= tile.rows), tiles[-1])


def _parts(tile: Tile, tiles: int, num_rows: int, ins: int, device: torch.device) -> int:
    """Return how many programs share a tile: one for each split where tiles are few, else one. No bit depends on it."""
    is_split = num_rows <= LOCKED_TILES * tile.rows and tiles < tile.resident * _multiprocessors(device)
    return -(-ins // SPLIT) if is_split else 1


def _offsets(weight: Weight) -> torch.Tensor:
    """Return minima or zero points; for kernels that read none, any tensor of the type of theirs."""
    tensors = weight.tensors
    assert isinstance(weight.format, Packed)
    if weight.format.source.group is None:
        return tensors["scales"]
    return tensors["minima"] if weight.format.wide else tensors.get("zeros", tensors["locks"].view(torch.uint8))


def _groups(weight: Weight) -> tuple[int, ...]:
    """Return `padded`, `shift` and `zero_outs` of `kernels.grouped`; nothing for a scale a row."""
    packed, scales = weight.format, weight.tensors["scales"]
    assert isinstance(packed, Packed)
    if packed.source.group is None:
        return ()
    padded = scales.shape[1]
    return padded, (2 * packed.source.group // WIDTH).bit_length() - 1, padded if "zeros" in weight.tensors else 0


#: Names of the weight formats that are read.
FORMATS = frozenset(layout.name for layout in INTEGER_FORMATS if reads(layout))
_HALVES = frozenset(layout.name for layout in INTEGER_FORMATS if reads(layout) and layout.bits == 4)


def linear_kernels() -> list[Kernel]:
    """Return the kernels of `linear` over whole numbers, for the provider `cuda`."""

    def kernel(formats: frozenset[str], dtype: str) -> Kernel:
        # A sum's order is the row's alone. How tensor cores add within one step of 16 is theirs; it is the same for
        # tiles of all widths that there are, since the rows lie along the side of a product that only repeats it.
        promised: dict[str, Invariance] = {dtype: "bitwise"}
        return Kernel(
            op="linear",
            call=linear,
            formats=formats,
            dtypes=frozenset({dtype}),
            invariance=promised,
            pack=pack,
            packed=PACKED,
        )

    return [kernel(FORMATS, "bfloat16"), kernel(_HALVES, "float16")]
