"""RMS norm and layer norm: a program a row, in one pass over memory; the residual's sum and int8 rows come from it too.

A row of up to `_BLOCK` numbers is held in registers. A longer one is read again for each thing that must be known of
all of it, from the cache. Which of the two, and every sum's order, depend on the width alone, so that a row's bits do
not depend on the rows beside it.

Widths and strides that are multiples of 16, as models' are, load 16 bytes at a time; others compile when they come.

Shape legend: T tokens, E embed, H heads, D head dim.
"""

# Triton has no type hints.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from intarsia.gpu_kernels import Specialisation, table
from intarsia.ops import layer_norm as reference
from intarsia_cuda.forms import DTYPES, dense_rows, form, name_of, pointer
from intarsia_cuda.rounding import int8_numbers, int8_scale, magnitudes, rounded

#: Numbers of a row in registers: 16 a thread, or 8 where they are scaled too.
_BLOCK = 4096
_WARPS, _INT8_WARPS = 8, 16


@triton.jit
def _read(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, columns: tl.tensor, width: tl.tensor, adds: tl.tensor
) -> tl.tensor:
    """Return part of a row in float32; with the residual added, rounded to the row's dtype."""
    x = tl.load(x_ptr + columns, mask=columns < width, other=0.0)
    total = x.to(tl.float32)
    if adds != 0:
        residual = tl.load(residual_ptr + columns, mask=columns < width, other=0.0)
        total = rounded(residual.to(tl.float32) + total, x.dtype)
    return total


@triton.jit
def _weighted(
    x: tl.tensor,
    weight_ptr: tl.tensor,
    input_scale_ptr: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    dtype: tl.constexpr,
    INT8: tl.constexpr,
) -> tl.tensor:
    """Return normed numbers times the weight, rounded where the reference rounds; for int8 times the input scale."""
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
    product = rounded(x, weight.dtype) * weight.to(tl.float32)
    product = rounded(rounded(product, weight.dtype), dtype)
    if INT8:
        product = product * tl.load(input_scale_ptr + columns, mask=columns < width, other=0.0)
    return product


@triton.jit(do_not_specialize=["inner", "adds"])
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    input_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    residual_stride: tl.tensor,
    inner: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    adds: tl.tensor,
    INT8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Norm one row, which is row % inner of an outer one; see `rms_norm`, `add_rms_norm` and `rms_norm_int8`."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptr += (row // inner) * outer_stride + (row % inner) * inner_stride
    residual_ptr += row * residual_stride
    out_ptr += row * width
    total_ptr += row * width
    columns = tl.arange(0, BLOCK)
    if width <= BLOCK:
        x = _read(x_ptr, residual_ptr, columns, width, adds)
        if adds != 0:
            tl.store(total_ptr + columns, x.to(dtype), mask=columns < width)
        factor = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        y = _weighted(x * factor, weight_ptr, input_scale_ptr, columns, width, dtype, INT8)
        if INT8:
            scale = int8_scale(tl.max(magnitudes(y), 0))
            tl.store(scale_ptr + row, scale)
            tl.store(out_ptr + columns, int8_numbers(y, scale), mask=columns < width)
        else:
            tl.store(out_ptr + columns, y.to(dtype), mask=columns < width)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            x = _read(x_ptr, residual_ptr, start + columns, width, adds)
            squares += x * x
        factor = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        scale = 0.0
        if INT8:
            largest = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, width, BLOCK):
                x = _read(x_ptr, residual_ptr, start + columns, width, adds)
                y = _weighted(x * factor, weight_ptr, input_scale_ptr, start + columns, width, dtype, INT8)
                largest = tl.maximum(largest, magnitudes(y))
            scale = int8_scale(tl.max(largest, 0))
            tl.store(scale_ptr + row, scale)
        for start in range(0, width, BLOCK):
            at = start + columns
            x = _read(x_ptr, residual_ptr, at, width, adds)
            if adds != 0:
                tl.store(total_ptr + at, x.to(dtype), mask=at < width)
            y = _weighted(x * factor, weight_ptr, input_scale_ptr, at, width, dtype, INT8)
            if INT8:
                tl.store(out_ptr + at, int8_numbers(y, scale), mask=at < width)
            else:
                tl.store(out_ptr + at, y.to(dtype), mask=at < width)


@triton.jit
def _layer_normed(
    x: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, columns: tl.tensor, width: tl.tensor, has_bias: tl.tensor
) -> tl.tensor:
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=columns < width * has_bias, other=0.0).to(tl.float32)
    return x * weight + bias


@triton.jit(do_not_specialize=["has_bias"])
def layer_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    has_bias: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Norm one row; see `layer_norm`."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptr += row * stride
    out_ptr += row * width
    columns = tl.arange(0, BLOCK)
    if width <= BLOCK:
        x = tl.load(x_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        centred = tl.where(columns < width, x - tl.sum(x, 0) / width, 0.0)
        factor = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        y = _layer_normed(centred * factor, weight_ptr, bias_ptr, columns, width, has_bias)
        tl.store(out_ptr + columns, y.to(dtype), mask=columns < width)
    else:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + columns
            sums += tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / width
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + columns
            x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
            centred = tl.where(at < width, x - mean, 0.0)
            squares += centred * centred
        factor = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        for start in range(0, width, BLOCK):
            at = start + columns
            x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
            y = _layer_normed((x - mean) * factor, weight_ptr, bias_ptr, at, width, has_bias)
            tl.store(out_ptr + at, y.to(dtype), mask=at < width)


# --- every form that is launched --------------------------------------------------------------------------------------


def _rms_form(dtype: str, weight: str, *, int8: bool) -> Specialisation:
    x = pointer(dtype)
    signature = {
        "x_ptr": x,
        "residual_ptr": x,
        "weight_ptr": pointer(weight),
        "input_scale_ptr": "*fp32",
        "out_ptr": "*i8" if int8 else x,
        "total_ptr": x,
        "scale_ptr": "*fp32",
        **dict.fromkeys(("outer_stride", "inner_stride", "residual_stride", "inner", "width"), "i32"),
        "eps": "fp32",
        "adds": "i32",
    }
    return form(
        _rms_name(dtype, weight, int8=int8),
        rms_norm_kernel,
        signature,
        {"INT8": int8, "BLOCK": _BLOCK},
        loose=("inner", "adds"),
        num_warps=_INT8_WARPS if int8 else _WARPS,
        everywhere=dtype == weight == "bfloat16",
    )


def _rms_name(dtype: str, weight: str, *, int8: bool) -> str:
    return f"rms_norm{'_int8' if int8 else ''}[{dtype}, weight {weight}]"


def _layer_form(dtype: str) -> Specialisation:
    signature = {
        "x_ptr": pointer(dtype),
        "weight_ptr": pointer(dtype),
        "bias_ptr": pointer(dtype),
        "out_ptr": pointer(dtype),
        **dict.fromkeys(("stride", "width", "has_bias"), "i32"),
        "eps": "fp32",
    }
    return form(
        f"layer_norm[{dtype}]", layer_norm_kernel, signature, {"BLOCK": _BLOCK}, loose=("has_bias",), num_warps=_WARPS
    )


#: (activations, weight). Some models' norms stay in float32.
_PAIRS = [*((d, d) for d in DTYPES), ("bfloat16", "float32"), ("float16", "float32")]


def specialisations() -> list[Specialisation]:
    """Return every form of the norms."""
    return [
        *(_rms_form(*pair, int8=False) for pair in _PAIRS),
        *(_rms_form("bfloat16", weight, int8=True) for weight in ("bfloat16", "float32")),
        *(_layer_form(dtype) for dtype in DTYPES),
    ]


_FORMS = table(specialisations())


# --- the ops ----------------------------------------------------------------------------------------------------------


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight; an axis of heads may stand before the last."""
    x = dense_rows(x_TE if x_TE.dim() == 3 else x_TE.reshape(-1, x_TE.shape[-1]).unsqueeze(1))
    out = torch.empty(x_TE.shape, dtype=x.dtype, device=x.device)
    _run_rms(x, x, weight_E, None, out, out, out, eps, add=False, int8=False)
    return out


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual and return (its norm, the sum)."""
    assert x_TE.shape == residual_TE.shape and x_TE.dtype == residual_TE.dtype
    x, residual = dense_rows(x_TE).unsqueeze(1), dense_rows(residual_TE)
    out, total = (torch.empty(x_TE.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _run_rms(x, residual, weight_E, None, out, total, out, eps, add=True, int8=False)
    return out, total


def rms_norm_int8(
    x_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    input_scale_E: torch.Tensor | None = None,
    residual_TE: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm rows and quantize what comes out, as an int8 product with int8 activations reads it.

    The norm is rounded to x's dtype as `rms_norm` rounds it, multiplied by the input scale in float32, and quantized a
    row at a time as `intarsia.ops.int8_entries` does: a row that is not finite has scale NaN and numbers 0.

    Args:
        x_TE: bf16.
        weight_E: of the norm.
        eps: added to the mean of squares.
        input_scale_E: float32, of the int8 weight that reads the rows; None is 1.
        residual_TE: what x is added to first.

    Returns:
        int8 numbers (T, E), float32 scales (T,), and the sum with the residual (T, E): x itself where there is none.
    """
    x = dense_rows(x_TE).unsqueeze(1)
    add = residual_TE is not None
    residual = dense_rows(residual_TE) if residual_TE is not None else x_TE
    numbers = torch.empty(x_TE.shape, dtype=torch.int8, device=x.device)
    scales_T = torch.empty(len(x_TE), dtype=torch.float32, device=x.device)
    total = torch.empty_like(numbers, dtype=x.dtype) if add else x_TE
    if input_scale_E is None:
        input_scale_E = _ones(x_TE.shape[1], x.device)
    _run_rms(x, residual, weight_E, input_scale_E, numbers, total, scales_T, eps, add=add, int8=True)
    return numbers, scales_T, total


@lru_cache
def _ones(width: int, device: torch.device) -> torch.Tensor:
    """Return float32 ones, made once: to make them takes a launch, as the norm itself does."""
    return torch.ones(width, dtype=torch.float32, device=device)


def _run_rms(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight_E: torch.Tensor,
    input_scale_E: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor,
    scales: torch.Tensor,
    eps: float,
    *,
    add: bool,
    int8: bool,
) -> None:
    """Launch over rows (outer, inner, width); what a form does not use is any tensor of its type."""
    num_rows = x.shape[0] * x.shape[1]
    assert weight_E.shape == x.shape[-1:], f"{weight_E.shape} norms rows of {x.shape[-1]}"
    if not num_rows:
        return
    unused = torch.empty(0, dtype=torch.float32, device=x.device)
    _FORMS[_rms_name(name_of(x), name_of(weight_E), int8=int8)].launch(
        (num_rows,),
        x,
        residual,
        weight_E.contiguous(),
        unused if input_scale_E is None else input_scale_E.float().contiguous(),
        out,
        total,
        scales if int8 else unused,
        x.stride(0),
        x.stride(1),
        residual.stride(0),
        x.shape[1],
        x.shape[2],
        eps,
        int(add),
    )


def layer_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return (x - mean) / deviation * weight + bias, in float32, rounded once."""
    if weight_E.dtype != x_TE.dtype or (bias_E is not None and bias_E.dtype != x_TE.dtype):
        return reference(x_TE, weight_E, bias_E, eps)  # of no family here
    x = dense_rows(x_TE.reshape(-1, x_TE.shape[-1]))
    weight_E = weight_E.contiguous()
    out = torch.empty(x_TE.shape, dtype=x.dtype, device=x.device)
    if len(x):
        bias = weight_E if bias_E is None else bias_E.contiguous()
        _FORMS[f"layer_norm[{name_of(x)}]"].launch(
            (len(x),), x, weight_E, bias, out, x.stride(0), x.shape[1], int(bias_E is not None), eps
        )
    return out
