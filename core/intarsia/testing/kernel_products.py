"""Ops over weights: products, a norm and the product behind it, and rows of an embedding, each in float64.

Shape legend: T tokens, C in features, N out features, E embed.
"""

from __future__ import annotations

from typing import Any

import torch

from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.rotated import RotatedFormat, rotate, spread
from intarsia.quantizing.sparse import SparseFormat
from intarsia.testing.kernel_calls import SUM, TINY, UNIT, Judge, near
from intarsia.testing.kernel_rows import norm_error, rms_normed
from intarsia.testing.kernel_weights import values_of
from intarsia.types import Weight

__all__ = ["judge_embedding", "judge_linear", "judge_norm_linear"]

#: Of a step that activations are rounded to, with what its scale is rounded by.
_HALF = 0.51


def _takes_int8(weight: Weight) -> bool:
    """Whether kernels may round activations to int8 as they come."""
    layout = weight.format
    if isinstance(layout, SparseFormat):
        return layout.values == "int8"
    return isinstance(layout, RotatedFormat) or (isinstance(layout, IntegerFormat) and layout.activations == "int8")


def _product(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    float_steps: int,
    error: torch.Tensor | float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x * input_scale) @ weight.T + bias in float64, and how far off it may be.

    Args:
        x: rows, in float64.
        weight: before it is packed.
        bias: or None.
        dtype: of the result.
        float_steps: see `KernelCase`.
        error: how far off the rows may be that are multiplied.
    """
    values, magnitudes = values_of(weight)
    scale = weight.tensors.get("input_scale")
    rows = x if scale is None else x * scale.double()
    sizes = rows.abs()
    if is_rotated := isinstance(weight.format, RotatedFormat):
        # The values are what rotated rows meet; sizes are bounds for whoever rotates the weight in their place.
        rows, sizes = rotate(rows), spread(sizes)
    product = rows @ values.T
    right = product if bias is None else product + bias.double()
    # A sum of C products, with offsets and scales apart; the product is rounded, and once more with the bias.
    limit = sizes @ magnitudes.T * (x.shape[1] + 8) * SUM
    limit = limit + 1.01 * UNIT[dtype] * (product.abs() + right.abs()) + TINY[dtype]
    off = torch.as_tensor(error, dtype=torch.float64).expand_as(rows).clone()
    off = off if scale is None else off * scale.double()
    off = spread(off) if is_rotated else off
    if scale is not None:
        off = off + sizes * 1.01 * UNIT[dtype]
    if dtype != torch.float32 and weight.format.name != "dense":
        # A weight that is dequantized is rounded to the dtype, and its scale may be before it.
        off = off + sizes * 2.02 * UNIT[dtype]
    steps = 127 if _takes_int8(weight) else float_steps if isinstance(weight.format, IntegerFormat) else 0
    if steps and rows.numel():
        off = off + rows.abs().amax(1, keepdim=True) * _HALF / steps
    return right, limit + off @ values.abs().T


def judge_linear(weight: Weight, float_steps: int = 0) -> Judge:
    """Return the judge of `linear` over a weight, which may be given packed."""

    def judge(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
        x, _, bias = arguments
        right, limit = _product(x.double(), weight, bias, x.dtype, float_steps=float_steps)
        near(results[0], right, limit, x.dtype, "the product")

    return judge


def judge_norm_linear(weight: Weight, float_steps: int = 0) -> Judge:
    """Return the judge of `norm_linear` over a weight, which may be given packed."""

    def judge(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
        x, residual, norm_weight, eps, _, bias = arguments
        assert len(results) == 2, "it returns the product and the sum"
        total = x if residual is None else residual + x
        near(results[1], total.double(), 0.0, x.dtype, "the sum with the residual")
        normed = rms_normed(total, norm_weight, eps)
        off = norm_error(normed, norm_weight, x.dtype)
        right, limit = _product(normed, weight, bias, x.dtype, float_steps=float_steps, error=off)
        near(results[0], right, limit, x.dtype, "the product")

    return judge


def judge_embedding(weight: Weight) -> Judge:
    """Return the judge of `embedding` over a table."""

    def judge(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
        ids, _, dtype = arguments
        values, magnitudes = values_of(weight)
        if isinstance(weight.format, RotatedFormat):
            values, magnitudes = rotate(values), spread(magnitudes)
        scale = weight.tensors.get("input_scale", torch.ones(())).double()
        right = (values * scale)[ids]
        limit = right.abs() * 1.01 * UNIT[dtype] + (magnitudes * scale)[ids] * 8 * SUM + TINY[dtype]
        exact = weight.format.name == "dense" and weight.tensors["weight"].dtype == dtype
        near(results[0], right, 0.0 if exact else limit, dtype, "a row")

    return judge
