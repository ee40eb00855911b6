"""Linear layers over floats, in Triton: a row has the same bits in any batch, which cuBLAS does not give.

cuBLAS picks another kernel, with sums in another order, for another number of rows. It is faster with many rows, and is
what runs unless `engine.invariance` asks for more than it keeps.

A product is made as those of `intarsia_cuda.quantized.kernels`, for the same reasons: the other way round,
`weight @ x.T`, columns in splits of 1024 that are summed from zero and added from the first on, by one program or by
one a split. A form for up to 16 rows and one for more multiply with the same instructions, in the same order. Batch
invariance as a property of kernels: He et al. 2025, Defeating Nondeterminism in LLM Inference.

A weight in a format that no kernel here reads is made floats each time, and multiplied so.

Shape legend: T tokens, C in features, N out features.
"""

# Triton has no type hints.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from intarsia.gpu_kernels import CAPABILITIES, Specialisation, table
from intarsia.ops import ANY_FORMAT
from intarsia.protocols import Kernel
from intarsia.types import Invariance, Weight
from intarsia_cuda.forms import DTYPES, name_of, pointer
from intarsia_cuda.quantized.kernels import SPLIT, _finish, _gathered, _place
from intarsia_cuda.quantized.matmuls import Tile, _aligned, _bias, _parts, _tile
from intarsia_cuda.quantized.packing import round_up

#: Multiples of it are rows' widths and addresses, so that 16 bytes are read at a time.
_ALIGNED = 16


@triton.jit(do_not_specialize=["num_rows", "weight_outs", "bias_outs", "parts"])
def product(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    partials: tl.tensor,
    locks: tl.tensor,
    num_rows: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    weight_outs: tl.tensor,
    bias_outs: tl.tensor,
    parts: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Return x @ weight.T + bias, summed in fp32.

    `out`, `x` and `weight` are (num_rows, outs), (num_rows, ins) and (weight_outs, ins), of one dtype; `outs` is at
    least `weight_outs`, and of a weight that is not there zeros are read. `outs`, `ins` and the strides are multiples
    of 16. Of `bias` (outs), `bias_outs` are read, all or none. `parts` programs share a tile, one a split or one for
    all; where they are several, `partials` are BLOCK_N * BLOCK_T float32 each, and `locks` a zero a tile.
    """
    out_tile, row_tile = _place(num_rows, outs, BLOCK_N, BLOCK_T)
    out_index = out_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_index = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    is_out, is_row = out_index < weight_outs, row_index < num_rows
    column = tl.arange(0, BLOCK_C)
    weights = weight + out_index.to(tl.int64)[:, None] * weight_stride + column[None, :]
    rows = x + row_index.to(tl.int64)[None, :] * x_stride + column[:, None]

    split = tl.program_id(1)
    last = tl.where(parts > 1, split + 1, tl.cdiv(ins, SPLIT))
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for now in range(split, last):
        part = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for start in range(now * SPLIT, tl.minimum(now * SPLIT + SPLIT, ins), BLOCK_C):
            is_column = column + start < ins
            left = tl.load(weights + start, mask=is_out[:, None] & is_column[None, :], other=0)
            right = tl.load(rows + start, mask=is_row[None, :] & is_column[:, None], other=0)
            part = tl.dot(left, right, part, input_precision="ieee")
        total += part
    tile = row_tile * tl.cdiv(outs, BLOCK_N) + out_tile
    total, has_all = _gathered(total, partials, locks, tile, split, parts, is_row, BLOCK_N, BLOCK_T)
    _finish(total, out, bias, bias_outs, out_index, row_index, is_row, outs, has_all)


#: Columns that are multiplied at a time. Tensor cores multiply numbers of 16 bits; fp32 is multiplied in registers, by
#: the plain units, and never as TF32.
_HALF_COLUMNS, _WHOLE_COLUMNS = 64, 32
_HALVES = (Tile(64, 16, 4, 5, 4), Tile(128, 128, 8, 3, 1))
_WHOLES = (Tile(64, 16, 4, 2, 4), Tile(64, 64, 8, 2, 2))
#: Activation dtype -> its tiles, fewest rows first.
TILES: Mapping[str, tuple[Tile, ...]] = {"bfloat16": _HALVES, "float16": _HALVES, "float32": _WHOLES}


def _name(dtype: str, tile: Tile) -> str:
    return f"dense[{dtype}, {tile.rows} rows]"


def _form(dtype: str, tile: Tile) -> Specialisation:
    pointers = {
        **dict.fromkeys(("out", "x", "weight", "bias"), pointer(dtype)),
        "partials": "*fp32",
        "locks": "*i32",
    }
    aligned = ("outs", "ins", "x_stride", "weight_stride")
    loose = ("weight_outs", "bias_outs", "parts")
    columns = _WHOLE_COLUMNS if dtype == "float32" else _HALF_COLUMNS
    return Specialisation(
        name=_name(dtype, tile),
        kernel=product,
        signature={**pointers, **dict.fromkeys(("num_rows", *aligned, *loose), "i32")},
        constants={"BLOCK_N": tile.outs, "BLOCK_T": tile.rows, "BLOCK_C": columns},
        aligned=(*pointers, *aligned),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # fp16 is multiplied by bf16's instructions at bf16's size.
        capabilities=(90,) if dtype == "float16" else CAPABILITIES,
    )


def specialisations() -> list[Specialisation]:
    """Return every form of the product."""
    return [_form(dtype, tile) for dtype, tiles in TILES.items() for tile in tiles]


_FORMS = table(specialisations())


def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N), in x's dtype, summed in fp32. Weights of every format are read."""
    weight_NC = _aligned(weight.dequantize().to(x_TC.dtype))
    x, num_rows, num_outs = _aligned(x_TC), x_TC.shape[0], weight_NC.shape[0]
    outs = round_up(num_outs, _ALIGNED)
    out = torch.empty((num_rows, outs), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out[:, :num_outs]
    tile = _tile(TILES[name_of(x)], num_rows)
    tiles = -(-outs // tile.outs) * -(-num_rows // tile.rows)
    parts = _parts(tile, tiles, num_rows, x.shape[1], x.device)
    shared = tiles if parts > 1 else 0
    arguments = (
        *(out, x, weight_NC, out if bias_N is None else _bias(bias_N, x.dtype, outs)),
        torch.empty(shared * parts * tile.outs * tile.rows, dtype=torch.float32, device=x.device),
        torch.zeros(shared, dtype=torch.int32, device=x.device),
        *(num_rows, outs, x.shape[1], x.stride(0), weight_NC.stride(0), num_outs),
        *(0 if bias_N is None else outs, parts),
    )
    _FORMS[_name(name_of(x), tile)].launch((tiles, parts), *arguments)
    return out if outs == num_outs else out[:, :num_outs].contiguous()


def linear_kernel() -> Kernel:
    """Return the kernel of `linear` for all formats that no other kernel reads, for the provider `cuda`."""
    promised: dict[str, Invariance] = dict.fromkeys(DTYPES, "bitwise")
    return Kernel(
        op="linear",
        call=linear,
        formats=frozenset({ANY_FORMAT}),
        dtypes=frozenset(DTYPES),
        invariance=promised,
    )
