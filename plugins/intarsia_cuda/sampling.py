"""Drawing one token a row on the device, without sorting: temperature, top-k, top-p, min-p, then the inverse CDF.

The meaning is the sampler's own (`intarsia.sampling`): a row's weights are e ** ((logit - highest) / temperature);
top-k keeps the k highest logits and all that tie with the last; of these top-p keeps the likeliest, of equal ones the
lower ids first, until they sum to its share; min-p keeps weights that reach it; the token is where the running sum in
id order passes the request's own uniform number times the whole.

What the filters need of an order is one logit, the lowest that is kept, and how many of those equal to it are. A
logit's bits, read as a whole number, rise with it; so that logit is found two bits at a time: of three candidates the
highest is taken with k tokens, or the share's weight, at or above it. That is 16 passes over a row that is in the L2
cache, of which blocks are left out that hold nothing so high (radix selection, Alabi et al. 2012; FlashInfer's sampling
needs no sort either, but rejects and draws again).

All of it is in float64, as the sampler's is. Sums are taken in another order than the sampler's, so that the two can
differ where a number lies within some 1e-15 of an edge: of a share, or of a token's range. Everything else is the same,
ties too. Blocks, and with them every sum, depend on the vocabulary alone: a row's token does not depend on other rows.

Shape legend: L rows of logits, V vocab, B blocks of a row.
"""

# Triton has no type hints.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from intarsia.gpu_kernels import Specialisation, table
from intarsia_cuda.forms import form

_BLOCK = 1024
#: Blocks whose maxima one program reads at once: a vocabulary of a million.
_MOST_BLOCKS = 1024
#: Of the program that has a whole row to itself.
_WARPS = 16
#: Rows at once: their weights take 8 bytes a token.
_ROWS = 64
#: The lowest int32, which is no logit's key, nor is the next; and the bits of one but its sign.
_LOWEST = tl.constexpr(-(2**31))
_SIGNLESS = tl.constexpr(0x7FFFFFFF)
_NONE = tl.constexpr(-1)
#: A number times this is the next one towards 0.
_BELOW = tl.constexpr(1 - 2.0**-53)
_ENDLESS = tl.constexpr(float("inf"))


@triton.jit
def _key(logits: tl.tensor) -> tl.tensor:
    """Return int32 numbers that rise with the logits; -0 is 0."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _SIGNLESS, bits)


@triton.jit
def _block(logits_ptr: tl.tensor, block: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return a block of a row, -inf behind its end; only the last needs a mask, which would part wide loads."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= vocab:
        logits = tl.load(logits_ptr + columns)
    else:
        logits = tl.load(logits_ptr + columns, mask=columns < vocab, other=float("-inf"))
    return logits


@triton.jit(do_not_specialize=["vocab", "num_blocks"])
def maxima_kernel(
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the highest logit of a block; NaN where it holds one."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits = _block(logits_ptr + row * stride, block, vocab, BLOCK)
    is_bad = tl.max((logits != logits).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(logits == logits, logits, float("-inf")), 0)
    tl.store(maxima_ptr + row * num_blocks + block, tl.where(is_bad, float("nan"), highest))


@triton.jit(do_not_specialize=["vocab", "num_blocks"])
def weights_kernel(
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """Write the weights of a block, 0 behind the row's end; the likeliest token's is 1."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks = tl.arange(0, MOST)
    maxima = tl.load(maxima_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    logits = _block(logits_ptr + row * stride, block, vocab, BLOCK).to(tl.float64)
    weights = tl.exp((logits - tl.max(maxima, 0).to(tl.float64)) / tl.load(temperatures_ptr + row))
    tl.store(weights_ptr + (row * num_blocks + block) * BLOCK + tl.arange(0, BLOCK), weights)


@triton.jit
def _measures(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    floor: tl.tensor,
    low: tl.tensor,
    step: tl.tensor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the weight, or number, of tokens whose key reaches low + step, low + 2 step and low + 3 step.

    Tokens below `floor` do not count.
    """
    first = tl.zeros((BLOCK,), tl.float64)
    second = tl.zeros((BLOCK,), tl.float64)
    third = tl.zeros((BLOCK,), tl.float64)
    for block in range(num_blocks):
        highest = _key(tl.load(maxima_ptr + block))
        if (highest >= floor) & (highest >= low + step):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            keys = _key(_block(logits_ptr, block, vocab, BLOCK))
            if COUNTS:  # noqa: SIM108
                weights = (columns < vocab).to(tl.float64)
            else:
                weights = tl.load(weights_ptr + columns)
            weights = tl.where(keys >= floor, weights, 0.0)
            first += tl.where(keys >= low + step, weights, 0.0)
            second += tl.where(keys >= low + step + step, weights, 0.0)
            third += tl.where(keys >= low + step + step + step, weights, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _last_kept(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    floor: tl.tensor,
    target: tl.tensor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the highest key at or above which the tokens from `floor` on have this weight, or are so many."""
    low = tl.full((), _LOWEST, tl.int32)
    step = tl.full((), 1 << 30, tl.int32)
    for _ in range(16):
        first, second, third = _measures(
            logits_ptr, weights_ptr, maxima_ptr, vocab, num_blocks, floor, low, step, COUNTS, BLOCK
        )
        # Added one at a time: three times the first step is no int32.
        once = tl.where(first >= target, low + step, low)
        twice = tl.where(second >= target, low + step + step, once)
        low = tl.where(third >= target, low + step + step + step, twice)
        step = step >> 2
    return low


@triton.jit
def _above(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    key: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the weight of tokens whose keys are above one, and the weight of one token that has it."""
    above = tl.zeros((BLOCK,), tl.float64)
    equal = tl.zeros((BLOCK,), tl.float64)
    for block in range(num_blocks):
        if _key(tl.load(maxima_ptr + block)) >= key:
            keys = _key(_block(logits_ptr, block, vocab, BLOCK))
            weights = tl.load(weights_ptr + block * BLOCK + tl.arange(0, BLOCK))
            above += tl.where(keys > key, weights, 0.0)
            equal = tl.maximum(equal, tl.where(keys == key, weights, 0.0))
    return tl.sum(above, 0), tl.max(equal, 0)


@triton.jit
def _kept(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    vocab: tl.tensor,
    block: tl.tensor,
    floor: tl.tensor,
    ties: tl.tensor,
    seen: tl.tensor,
    min_p: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the weights of a block, 0 for what is not kept, and how many tokens of the floor's key it has."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    keys = _key(_block(logits_ptr, block, vocab, BLOCK))
    weights = tl.load(weights_ptr + columns)
    is_tied = ((columns < vocab) & (keys == floor)).to(tl.int32)
    # Of the tied ones, those with the lowest ids.
    is_kept = (keys > floor) | ((is_tied != 0) & (seen + tl.cumsum(is_tied, 0) <= ties))
    return tl.where(is_kept & (weights >= min_p), weights, 0.0), tl.sum(is_tied, 0)


@triton.jit(do_not_specialize=["vocab", "num_blocks"])
def draw_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    min_ps_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """Draw one row's token; -1 where its logits are not finite."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    weights_ptr += row * num_blocks * BLOCK
    maxima_ptr += row * num_blocks
    blocks = tl.arange(0, MOST)
    maxima = tl.load(maxima_ptr + blocks, mask=blocks < num_blocks, other=float("-inf"))
    is_finite = (tl.max((maxima != maxima).to(tl.int32), 0) == 0) & (tl.abs(tl.max(maxima, 0)) < _ENDLESS)
    chosen = tl.full((), _NONE, tl.int32)
    if is_finite:
        floor = tl.full((), _LOWEST + 1, tl.int32)
        ties = tl.full((), _SIGNLESS, tl.int32)
        top_k = tl.load(top_ks_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            target = top_k.to(tl.float64)
            floor = _last_kept(logits_ptr, weights_ptr, maxima_ptr, vocab, num_blocks, floor, target, True, BLOCK)
        top_p = tl.load(top_ps_ptr + row)
        if top_p < 1:
            above, equal = _above(logits_ptr, weights_ptr, maxima_ptr, vocab, num_blocks, floor - 1, BLOCK)
            edge = top_p * above
            floor = _last_kept(logits_ptr, weights_ptr, maxima_ptr, vocab, num_blocks, floor, edge, False, BLOCK)
            above, equal = _above(logits_ptr, weights_ptr, maxima_ptr, vocab, num_blocks, floor, BLOCK)
            # The first of the tied ones is kept, and each after that while what is before it is below the edge.
            many = tl.maximum((edge - above) / tl.where(equal > 0, equal, 1.0), 1.0)
            ties = tl.where(many < vocab, tl.ceil(many).to(tl.int32), ties)
        min_p = tl.load(min_ps_ptr + row)

        total = tl.full((), 0.0, tl.float64)
        seen = tl.full((), 0, tl.int32)
        for block in range(num_blocks):
            if _key(tl.load(maxima_ptr + block)) >= floor:
                kept, num_tied = _kept(logits_ptr, weights_ptr, vocab, block, floor, ties, seen, min_p, BLOCK)
                total += tl.sum(kept, 0)
                seen += num_tied

        # Rounding can carry a point onto the total, where no token is left.
        point = tl.minimum(tl.load(uniforms_ptr + row) * total, total * _BELOW)
        before = tl.full((), 0.0, tl.float64)
        seen = tl.full((), 0, tl.int32)
        for block in range(num_blocks):
            if (chosen == _NONE) & (_key(tl.load(maxima_ptr + block)) >= floor):
                kept, num_tied = _kept(logits_ptr, weights_ptr, vocab, block, floor, ties, seen, min_p, BLOCK)
                after = before + tl.sum(kept, 0)
                if after > point:
                    columns = block * BLOCK + tl.arange(0, BLOCK)
                    passes = (before + tl.cumsum(kept, 0) > point) & (kept > 0)
                    found = tl.min(tl.where(passes, columns, _SIGNLESS), 0)
                    # The running sum rounds otherwise than the sum: then it is the last.
                    last = tl.max(tl.where(kept > 0, columns, _NONE), 0)
                    chosen = tl.where(found < _SIGNLESS, found, last)
                before = after
                seen += num_tied
    tl.store(ids_ptr + row, chosen.to(tl.int64))


# --- every form that is launched --------------------------------------------------------------------------------------

_SHAPE = {"stride": "i32", "vocab": "i32", "num_blocks": "i32"}
_LOOSE = ("vocab", "num_blocks")


def specialisations() -> list[Specialisation]:
    """Return every form of the three kernels."""
    rows = {"logits_ptr": "*fp32", "maxima_ptr": "*fp32"}
    draws = {
        "logits_ptr": "*fp32",
        "weights_ptr": "*fp64",
        "maxima_ptr": "*fp32",
        "top_ks_ptr": "*i32",
        **dict.fromkeys(("top_ps_ptr", "min_ps_ptr", "uniforms_ptr"), "*fp64"),
        "ids_ptr": "*i64",
    }
    weights = {**rows, "temperatures_ptr": "*fp64", "weights_ptr": "*fp64"}
    blocks = {"BLOCK": _BLOCK, "MOST": _MOST_BLOCKS}
    return [
        form("maxima", maxima_kernel, {**rows, **_SHAPE}, {"BLOCK": _BLOCK}, loose=_LOOSE),
        form("weights", weights_kernel, {**weights, **_SHAPE}, blocks, loose=_LOOSE),
        form("draw", draw_kernel, {**draws, **_SHAPE}, blocks, loose=_LOOSE, num_warps=_WARPS, everywhere=True),
    ]


_FORMS = table(specialisations())


# --- the op -----------------------------------------------------------------------------------------------------------


def sample_rows(
    logits_LV: torch.Tensor,
    temperatures_L: torch.Tensor,
    top_ks_L: torch.Tensor,
    top_ps_L: torch.Tensor,
    min_ps_L: torch.Tensor,
    uniforms_L: torch.Tensor,
) -> torch.Tensor:
    """Return one token id a row, (L,) int64; -1 where the highest logit is not finite, or any is NaN.

    Args:
        logits_LV: fp32; not changed.
        temperatures_L: float64, above 0.
        top_ks_L: int32; 0, or the vocabulary and more, keeps all.
        top_ps_L: float64 above 0; 1 keeps all.
        min_ps_L: float64; 0 keeps all.
        uniforms_L: float64 in [0, 1).
    """
    if logits_LV.stride(-1) != 1 and logits_LV.shape[-1] != 1:
        logits_LV = logits_LV.contiguous()
    vocab = logits_LV.shape[1]
    num_blocks = triton.cdiv(vocab, _BLOCK)
    assert num_blocks <= _MOST_BLOCKS, f"a vocabulary of {vocab} has more than {_MOST_BLOCKS} blocks of {_BLOCK}"
    ids_L = torch.empty(len(logits_LV), dtype=torch.int64, device=logits_LV.device)
    for first in range(0, len(logits_LV), _ROWS):
        some = slice(first, first + _ROWS)
        settings = [x[some] for x in (top_ks_L, top_ps_L, min_ps_L, uniforms_L)]
        _draw(logits_LV[some], temperatures_L[some], settings, ids_L[some], num_blocks)
    return ids_L


def _draw(
    logits_LV: torch.Tensor,
    temperatures_L: torch.Tensor,
    settings: list[torch.Tensor],
    ids_L: torch.Tensor,
    num_blocks: int,
) -> None:
    num_rows, vocab = logits_LV.shape
    maxima_LB = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits_LV.device)
    weights_LV = torch.empty((num_rows, num_blocks * _BLOCK), dtype=torch.float64, device=logits_LV.device)
    shape, grid = (logits_LV.stride(0), vocab, num_blocks), (num_rows, num_blocks)
    _FORMS["maxima"].launch(grid, logits_LV, maxima_LB, *shape)
    _FORMS["weights"].launch(grid, logits_LV, maxima_LB, temperatures_L, weights_LV, *shape)
    _FORMS["draw"].launch((num_rows,), logits_LV, weights_LV, maxima_LB, *settings, ids_L, *shape)
