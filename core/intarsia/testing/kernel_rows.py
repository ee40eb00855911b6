"""Ops on rows alone: norms, activations, rotations and the collectives of one device, each in float64.

Shape legend: T tokens, E embed, F ffn, H heads, D head dim, h half of the rotated dims, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from intarsia.testing.kernel_calls import SUM, TINY, UNIT, Draw, Judge, near, normal

__all__ = ["ACTIVATIONS", "COLLECTIVES", "NORMS", "ROTATIONS", "RowOp", "norm_error", "rms_normed"]

#: What exp and tanh may be off by, as a share: kernels have their own.
_FUNCTION = 1e-5
_SIZES = (1.0, 1e-3, 30.0)
_EPS = (1e-6, 0.1, 1e-5)


@frozen
class RowOp:
    """An op whose every result comes from one row of its arguments.

    Attributes:
        draw: makes arguments.
        rows: places of those that have a row a token.
        judge: says whether results are right.
    """

    draw: Draw
    rows: tuple[int, ...]
    judge: Judge


# --- norms ------------------------------------------------------------------------------------------------------------


def rms_normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def norm_error(right: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far a norm may be off: rounded before the weight and behind it, and what a sum of squares loses."""
    share = 2.01 * UNIT[dtype] + (weight.shape[-1] / 4 + 8) * SUM
    return right.abs() * share + (weight.double().abs() + 1) * TINY[dtype]


def _weights(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a norm's weight: some models keep it in float32."""
    return normal(seed + 1, width, dtype=torch.float32 if seed % 4 == 3 else dtype)


def _draw_rms(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    shape = (rows, 3, width) if seed % 2 else (rows, width)
    return (normal(seed, *shape) * _SIZES[seed % 3]).to(dtype), _weights(width, dtype, seed), _EPS[seed % 3]


def _judge_rms(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    x, weight, eps = arguments
    right = rms_normed(x, weight, eps)
    near(results[0], right, norm_error(right, weight, x.dtype), x.dtype, "the norm")


def _draw_add(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    x, residual = (normal(seed + i, rows, width) * _SIZES[seed % 3] for i in (0, 5))
    return x.to(dtype), residual.to(dtype), _weights(width, dtype, seed), _EPS[seed % 3]


def _judge_add(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight, eps = arguments
    assert len(results) == 2, "it returns the norm and the sum"
    total = residual + x
    near(results[1], total.double(), 0.0, x.dtype, "the sum with the residual")
    right = rms_normed(total, weight, eps)
    near(results[0], right, norm_error(right, weight, x.dtype), x.dtype, "the norm of the sum")


def _draw_layer(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    x = normal(seed, rows, width) * _SIZES[seed % 3] + (0.0, 5.0, -20.0)[seed % 3]
    bias = normal(seed + 2, width, dtype=dtype) if seed % 2 else None
    return x.to(dtype), normal(seed + 1, width, dtype=dtype), bias, _EPS[seed % 3]


def _judge_layer(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, eps = arguments
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    right = centred / deviation * weight.double() + (0 if bias is None else bias.double())
    largest = wide.abs().amax(-1, keepdim=True) if wide.numel() else wide
    # The mean errs by roundings of numbers of its own size.
    off = (largest + 1) / deviation * ((centred / deviation).abs() + 1) * weight.double().abs()
    limit = off * (x.shape[-1] / 8 + 8) * SUM + right.abs() * (1.01 * UNIT[x.dtype] + 8 * SUM) + TINY[x.dtype]
    near(results[0], right, limit, x.dtype, "the norm")


NORMS: Mapping[str, RowOp] = {
    "rms_norm": RowOp(_draw_rms, (0,), _judge_rms),
    "rms_norm_over_ranks": RowOp(_draw_rms, (0,), _judge_rms),
    "add_rms_norm": RowOp(_draw_add, (0, 1), _judge_add),
    "layer_norm": RowOp(_draw_layer, (0,), _judge_layer),
}

# --- rotations --------------------------------------------------------------------------------------------------------


def _draw_rope(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    width = min(width, 256)
    half = width // (2, 4, 3)[seed % 3]
    angles = normal(seed + 1, rows, 1, half) * 3
    return normal(seed, rows, 1 + seed % 3, width, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def _judge_rope(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    x, cos, sin = arguments
    half, wide = cos.shape[-1], x.double()
    first, second = wide[..., :half], wide[..., half : 2 * half]
    turned = (first * cos.double() - second * sin.double(), second * cos.double() + first * sin.double())
    size = (first.abs() + second.abs()) * 3 * UNIT[x.dtype] + TINY[x.dtype]
    right = torch.cat((*turned, wide[..., 2 * half :]), -1)
    limit = torch.cat((size, size, torch.zeros_like(wide[..., 2 * half :])), -1)
    near(results[0], right, limit, x.dtype, "what is rotated")


ROTATIONS: Mapping[str, RowOp] = {"rope": RowOp(_draw_rope, (0, 1, 2), _judge_rope)}

# --- activations ------------------------------------------------------------------------------------------------------


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh form, without the cancellation of 1 + tanh."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> RowOp:
    def draw(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        return ((normal(seed, rows, 2 * width) * _SIZES[seed % 3]).to(dtype),)

    def judge(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
        [x] = arguments
        gate, up = x.double().chunk(2, dim=-1)
        right = function(gate) * up
        # Far below zero the exponent's own rounding shows.
        limit = right.abs() * (2.02 * UNIT[x.dtype] + _FUNCTION) + 8 * SUM * (gate * up).abs()
        near(results[0], right, limit + TINY[x.dtype] * (up.abs() + 1), x.dtype, "what is activated")

    return RowOp(draw, (0,), judge)


def _draw_plain(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return ((normal(seed, rows, width) * _SIZES[seed % 3]).to(dtype),)


def _judge_gelu(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    [x] = arguments
    right = _gelu(x.double())
    limit = right.abs() * (1.01 * UNIT[x.dtype] + _FUNCTION) + 8 * SUM * x.double().abs() + TINY[x.dtype]
    near(results[0], right, limit, x.dtype, "what is activated")


def _draw_cap(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return *_draw_plain(rows, width, dtype, seed), (30.0, 0.5, 50.0)[seed % 3]


def _judge_cap(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    x, cap = arguments
    right = cap * torch.tanh(x.double() / cap)
    # Rounded three times: the quotient, its tanh, the product.
    limit = right.abs() * (3.5 * UNIT[x.dtype] + _FUNCTION) + 2 * TINY[x.dtype] * cap
    near(results[0], right, limit, x.dtype, "what is capped")
    assert not results[0].numel() or float(results[0].abs().max()) <= cap, f"it is more than the cap, {cap}"


ACTIVATIONS: Mapping[str, RowOp] = {
    "silu_mul": _gated(_silu),
    "gelu_tanh_mul": _gated(_gelu),
    "gelu_tanh": RowOp(_draw_plain, (0,), _judge_gelu),
    "soft_cap": RowOp(_draw_cap, (0,), _judge_cap),
}

# --- collectives ------------------------------------------------------------------------------------------------------


def _same(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    near(results[0], arguments[0].double(), 0.0, arguments[0].dtype)


def _draw_gather(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return *_draw_plain(rows, width, dtype, seed), seed % 2


def _draw_tokens(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return *_draw_plain(rows, width, dtype, seed), rows


def _draw_rows(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    some = torch.randint(0, max(rows, 1), (rows,), generator=torch.Generator().manual_seed(seed))
    return *_draw_plain(rows, width, dtype, seed), some


def _judge_rows(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    x, rows = arguments
    near(results[0], x[rows].double(), 0.0, x.dtype)


def _draw_look_up(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    table = normal(seed, 11, width, dtype=dtype)
    ids = torch.randint(0, 11, (rows,), generator=torch.Generator().manual_seed(seed))
    return ids, lambda some: table[some.cpu()].to(some.device)


def _judge_look_up(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    ids, rows = arguments
    near(results[0], rows(ids).double(), 0.0, rows(ids).dtype)


#: What ranks do with one another, on one device: nothing is changed. Their rows are no rows of `Call.some`.
COLLECTIVES: Mapping[str, RowOp] = {
    "all_reduce": RowOp(_draw_plain, (0,), _same),
    "all_gather": RowOp(_draw_gather, (0,), _same),
    "gather_tokens": RowOp(_draw_tokens, (0,), _same),
    "gather_rows": RowOp(_draw_rows, (0,), _judge_rows),
    "own_tokens": RowOp(_draw_plain, (0,), _same),
    "look_up": RowOp(_draw_look_up, (0,), _judge_look_up),
}
