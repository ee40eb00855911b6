"""Triton kernels of linear layers over weights of whole numbers. `packing` says how these lie.

The product is taken the other way round, `weight @ x.T`: tensor cores then have at least 64 outputs along their first
side however few rows there are, and a weight goes from its tile through registers, where it is made a float, straight
into the product (on Hopper the first operand can come from registers; the second cannot).

The same bits in any batch: a sum runs along the columns in one order, whatever the tiles. Columns fall into splits of
1024, each split is summed from zero piece by piece, and splits are added from the first on. Few tiles leave a device
idle, so then each split has a program of its own: they leave their sums in memory, and the one that arrives last adds
them in that same order (Osama et al. 2023, Stream-K, has such a fixup). How many rows a tile has changes none of it.

Shape legend: T tokens, C in features, N out features, G groups.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from intarsia_cuda.quantized import packing
from intarsia_cuda.rounding import int8_numbers, int8_scale, magnitudes

PANEL = tl.constexpr(packing.PANEL)
WIDTH = tl.constexpr(packing.WIDTH)
SPLIT = tl.constexpr(packing.SPLIT)
#: Row tiles that follow one another over the same outputs, so that the rows and weights at work fit the L2 cache.
BAND = tl.constexpr(8)


@triton.jit
def _place(num_rows: tl.tensor, outs: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr) -> tl.tensor:
    """Return which tile of outputs and which tile of rows this program makes."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BLOCK_T)
    in_band = BAND * tl.cdiv(outs, BLOCK_N)
    first = program // in_band * BAND
    height = tl.minimum(row_tiles - first, BAND)
    inside = program % in_band
    return inside // height, first + inside % height


@triton.jit
def _halves(pairs: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return (N, 2K) numbers of 16 bits that lie two a word, (N, K), the low half first. It costs nothing."""
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return both.reshape(pairs.shape[0], 2 * pairs.shape[1]).to(dtype, bitcast=True)


@triton.jit
def _by_column(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Return (N, WIDTH) of two groups' (N,): one for each half of the columns."""
    both = tl.join(first, second)[:, :, None]
    return tl.broadcast_to(both, (first.shape[0], 2, WIDTH // 2)).reshape(first.shape[0], WIDTH)


@triton.jit
def _nibbles(words: tl.tensor, place: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return M + n of the nibbles n at a place in each half of int32 words, in a dtype of 16 bits; M is 128 or 1024.

    The bits of n are the last of the mantissa of a number whose unit is 1 (as in Frantar et al. 2024, Marlin).
    """
    bits: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    return _halves(((words >> (4 * place)) & 0x000F000F) | bits, dtype)


@triton.jit
def _zeros(zero: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return -M - n of zero points n, which takes M and the zero point off what `_nibbles` gives."""
    bits: tl.constexpr = 0x4300 - 0x8000 if dtype == tl.bfloat16 else 0x6400 - 0x8000
    return (zero.to(tl.int16) | bits).to(dtype, bitcast=True)


@triton.jit
def _octets(words: tl.tensor, place: tl.constexpr) -> tl.tensor:
    """Return the numbers from -128 to 127 that bytes at a place in each half of int32 words are 128 above, in bfloat16.

    A bfloat16 with unit 1 has room for 7 bits: 128 + those, and of the eighth -256 or -128, which differ in one bit.
    """
    octets = words >> (8 * place)
    low = _halves((octets & 0x007F007F) | 0x43004300, tl.bfloat16)
    return low + _halves((octets & 0x00800080) ^ -0x3C7F3C80, tl.bfloat16)


@triton.jit
def _wide(words: tl.tensor, place: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return float32: 128 above nibbles at a place in each half of words, or 384 above the numbers of bytes there."""
    if BITS == 4:
        low = ((words << (16 - 4 * place)) & 0xF0000) | 0x43000000
        high = ((words >> (4 * place)) & 0xF0000) | 0x43000000
    else:
        low = ((words << (15 - 8 * place)) & 0x7F8000) | 0x43800000
        high = ((words >> (1 + 8 * place)) & 0x7F8000) | 0x43800000
    both = tl.join(low, high).reshape(words.shape[0], 2 * words.shape[1])
    return both.to(tl.float32, bitcast=True)


@triton.jit
def _gathered(
    total: tl.tensor,
    partials: tl.tensor,
    locks: tl.tensor,
    tile: tl.tensor,
    split: tl.tensor,
    num_parallel: tl.tensor,
    is_row: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """Return the sum of all splits, and 1 in the program that has it, 0 in the others."""
    has_all = (num_parallel <= 1).to(tl.int32)
    if num_parallel > 1:
        at = tl.arange(0, BLOCK_T)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        first = partials + tile.to(tl.int64) * num_parallel * (BLOCK_T * BLOCK_N)
        tl.store(first + split * (BLOCK_T * BLOCK_N) + at, total, mask=is_row[None, :])
        # All threads have stored before one of them says so, and it sees what others stored who said so before.
        tl.debug_barrier()
        arrived = tl.atomic_add(locks + tile, 1, sem="acq_rel")
        if arrived == num_parallel - 1:
            has_all += 1
            total = tl.zeros_like(total)
            for other in range(num_parallel):
                at_other = first + other * (BLOCK_T * BLOCK_N) + at
                total += tl.load(at_other, mask=is_row[None, :], other=0, cache_modifier=".cg")
            tl.store(locks + tile, 0)  # as the next launch expects it
    return total, has_all


@triton.jit
def _finish(
    value: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    bias_outs: tl.tensor,
    out_index: tl.tensor,
    row_index: tl.tensor,
    is_row: tl.tensor,
    outs: tl.tensor,
    has_all: tl.tensor,
) -> None:
    """Add the bias and store a tile, from the one program that has the whole of it."""
    value += tl.load(bias + out_index, mask=out_index < bias_outs * has_all, other=0).to(tl.float32)[:, None]
    to = out + row_index.to(tl.int64)[None, :] * outs + out_index[:, None]
    mask = (out_index < outs * has_all)[:, None] & is_row[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "shift", "zero_outs", "bias_outs", "parts"])
def grouped(
    out: tl.tensor,
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    partials: tl.tensor,
    locks: tl.tensor,
    num_rows: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    padded: tl.tensor,
    shift: tl.tensor,
    zero_outs: tl.tensor,
    bias_outs: tl.tensor,
    parts: tl.tensor,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Return x @ weight.T + bias, for weights with a scale a group, which are made numbers of x's dtype.

    `out` and `x` are (num_rows, outs) and (num_rows, ins); `outs`, `ins` and `x_stride` are multiples of 16. `numbers`,
    `scales` and `locks` are the packed weight's; `padded` is its N'. `offsets` are of WIDE weights the minima, and a
    weight is q * scale + min in float32, rounded once; of others the zero points, of which `zero_outs` an output are
    read, all or none, and a weight is (q - zero) * scale, where the difference is exact and the scale is rounded to x's
    dtype first. `bias` is (outs), of x's dtype, of which `bias_outs` are read, all or none. A group is 32 << shift
    columns. `parts` programs share a tile, one a split or one for all; `partials` are BLOCK_N * BLOCK_T float32 a part.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    pieces: tl.constexpr = 16 // BITS
    words: tl.constexpr = WIDTH // 2
    steps: tl.constexpr = SPLIT // (pieces * WIDTH)
    above: tl.constexpr = 128.0 if BITS == 4 else 384.0
    out_tile, row_tile = _place(num_rows, outs, BLOCK_N, BLOCK_T)
    out_index = out_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_index = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = row_index < num_rows
    has_zero = out_index < zero_outs
    column = tl.arange(0, WIDTH)
    num_steps = tl.cdiv(ins, pieces * WIDTH)
    panel = numbers + (out_index // PANEL).to(tl.int64) * (num_steps * PANEL * words) + out_index % PANEL * words
    weights = panel[:, None] + tl.arange(0, words)[None, :]
    rows = x + row_index.to(tl.int64)[None, :] * x_stride + column[:, None]
    scales += out_index
    offsets += out_index

    split = tl.program_id(1)
    last = tl.where(parts > 1, split + 1, tl.cdiv(num_steps, steps))
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for now in range(split, last):
        part = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for step in range(now * steps, tl.minimum(now * steps + steps, num_steps)):
            word = tl.load(weights + step * (PANEL * words))
            # What is chosen by a number that is the same for all would be no load and no constant, and keep Triton from
            # loading weights straight into the registers of the product.
            for piece in tl.static_range(pieces):
                half = (step * pieces + piece) * 2
                at, at_next = (half >> shift) * padded, ((half + 1) >> shift) * padded
                scale, scale_next = tl.load(scales + at).to(tl.float32), tl.load(scales + at_next).to(tl.float32)
                if WIDE:
                    offset = tl.load(offsets + at) - above * scale
                    offset_next = tl.load(offsets + at_next) - above * scale_next
                    factor, summand = _by_column(scale, scale_next), _by_column(offset, offset_next)
                    value = tl.fma(_wide(word, piece, BITS), factor, summand).to(dtype)
                else:
                    factor = _by_column(scale.to(dtype), scale_next.to(dtype))
                    if BITS == 4:
                        zero = _zeros(tl.load(offsets + at, mask=has_zero, other=8), dtype)
                        zero_next = _zeros(tl.load(offsets + at_next, mask=has_zero, other=8), dtype)
                        value = (_nibbles(word, piece, dtype) + _by_column(zero, zero_next)) * factor
                    else:
                        value = _octets(word, piece) * factor
                start = (step * pieces + piece) * WIDTH
                mask = is_row[None, :] & (column + start < ins)[:, None]
                part = tl.dot(value, tl.load(rows + start, mask=mask, other=0), part)
        total += part
    tile = row_tile * tl.cdiv(outs, BLOCK_N) + out_tile
    total, has_all = _gathered(total, partials, locks, tile, split, parts, is_row, BLOCK_N, BLOCK_T)
    _finish(total, out, bias, bias_outs, out_index, row_index, is_row, outs, has_all)


@triton.jit(do_not_specialize=["num_rows", "bias_outs", "parts"])
def per_row(
    out: tl.tensor,
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    row_scales: tl.tensor,
    bias: tl.tensor,
    partials: tl.tensor,
    locks: tl.tensor,
    num_rows: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    bias_outs: tl.tensor,
    parts: tl.tensor,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Return x @ weight.T + bias, for int8 weights with one scale an output, which multiplies the sum.

    Rows are bfloat16, whose products with whole numbers are exact before they are added in fp32, or EXACT: int8 with
    one of `row_scales` each, whose sums are exact too, in int32. The other arguments are those of `grouped`; `partials`
    has the dtype of the sums.
    """
    step_columns: tl.constexpr = 2 * WIDTH
    columns: tl.constexpr = step_columns if EXACT else WIDTH
    entries: tl.constexpr = step_columns if EXACT else WIDTH // 2
    steps: tl.constexpr = SPLIT // step_columns
    sums: tl.constexpr = tl.int32 if EXACT else tl.float32
    out_tile, row_tile = _place(num_rows, outs, BLOCK_N, BLOCK_T)
    out_index = out_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_index = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = row_index < num_rows
    column = tl.arange(0, columns)
    num_steps = tl.cdiv(ins, step_columns)
    panel = numbers + (out_index // PANEL).to(tl.int64) * (num_steps * PANEL * entries) + out_index % PANEL * entries
    weights = panel[:, None] + tl.arange(0, entries)[None, :]
    rows = x + row_index.to(tl.int64)[None, :] * x_stride + column[:, None]

    split = tl.program_id(1)
    last = tl.where(parts > 1, split + 1, tl.cdiv(num_steps, steps))
    total = tl.zeros((BLOCK_N, BLOCK_T), sums)
    for now in range(split, last):
        part = total if EXACT else tl.zeros((BLOCK_N, BLOCK_T), sums)  # the order of exact sums is nothing
        for step in range(now * steps, tl.minimum(now * steps + steps, num_steps)):
            weight = tl.load(weights + step * (PANEL * entries))
            for half in tl.static_range(step_columns // columns):
                value = weight if EXACT else _octets(weight, half)
                start = step * step_columns + half * columns
                mask = is_row[None, :] & (column + start < ins)[:, None]
                part = tl.dot(value, tl.load(rows + start, mask=mask, other=0), part, out_dtype=sums)
        total = part if EXACT else total + part
    tile = row_tile * tl.cdiv(outs, BLOCK_N) + out_tile
    total, has_all = _gathered(total, partials, locks, tile, split, parts, is_row, BLOCK_N, BLOCK_T)
    value = total.to(tl.float32) * tl.load(scales + out_index)[:, None]
    if EXACT:
        value *= tl.load(row_scales + row_index, mask=is_row, other=0)[None, :]
    _finish(value, out, bias, bias_outs, out_index, row_index, is_row, outs, has_all)


@triton.jit(do_not_specialize=["ins", "scaled"])
def quantize(
    numbers: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    input_scale: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    padded: tl.tensor,
    scaled: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Round a row of x times `input_scale` to int8, its largest to 127, and store its scale; behind `ins` are zeros.

    `scaled` columns have an input scale, all or none. All is in fp32, ties go to even. A row of zeros, or so small that
    it has no scale, becomes zeros; one that is not finite does too, and its scale NaN.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    source = x + row.to(tl.int64) * x_stride
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, ins, BLOCK):
        value = _scaled(source, input_scale, start + column, ins, scaled)
        largest = tl.maximum(largest, magnitudes(value))
    scale = int8_scale(tl.max(largest, 0))
    for start in range(0, padded, BLOCK):
        at = start + column
        value = _scaled(source, input_scale, at, ins, scaled)
        tl.store(numbers + row.to(tl.int64) * padded + at, int8_numbers(value, scale), mask=at < padded)
    tl.store(scales + row, scale)


@triton.jit
def _scaled(source: tl.tensor, input_scale: tl.tensor, at: tl.tensor, ins: tl.tensor, scaled: tl.tensor) -> tl.tensor:
    value = tl.load(source + at, mask=at < ins, other=0).to(tl.float32)
    return value * tl.load(input_scale + at, mask=at < scaled, other=1.0)
