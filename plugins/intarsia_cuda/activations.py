"""Activations: silu and gelu with and without their gate, and the soft cap; each in one pass, a block a program.

Between what are two ops of torch, numbers are rounded to their dtype, as torch rounds them. On a device the exponential
is `ex2.approx`, within two units of float32's last place.

Shape legend: T tokens, F ffn, L rows of logits, V vocab.
"""

# Triton has no type hints.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from intarsia.gpu_kernels import Specialisation, table
from intarsia_cuda.forms import DTYPES, form, name_of, pointer
from intarsia_cuda.rounding import rounded, tanh

_BLOCK = 1024
#: -2 sqrt(2 / pi), and the coefficient of the cube (Hendrycks and Gimpel 2016).
_GELU_SCALE = tl.constexpr(-1.5957691216057308)
_GELU_CUBE = tl.constexpr(0.044715)


#: Which one a launch computes: told at run time, so that one form serves all.
_SILU, _GELU_TANH, _SOFT_CAP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["kind", "is_gated"])
def activate_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    cap: tl.tensor,
    kind: tl.tensor,
    is_gated: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute a block of a row; of gated ones the gate is in the first `width` features and up behind it."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    mask = columns < width
    x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = x
    if kind == _SILU:
        y = x / (1 + tl.exp(-x))
    elif kind == _GELU_TANH:
        # x / 2 * (1 + tanh(u)) without the cancellation.
        y = x / (1 + tl.exp((x + x * x * x * _GELU_CUBE) * _GELU_SCALE))
    else:
        y = rounded(tanh(rounded(tl.div_rn(x, cap), dtype)), dtype) * cap
    if is_gated != 0:
        up = tl.load(x_ptr + row * stride + width + columns, mask=mask, other=0.0)
        y = rounded(y, dtype) * up.to(tl.float32)
    tl.store(out_ptr + row * width + columns, y.to(dtype), mask=mask)


def specialisations() -> list[Specialisation]:
    """Return every form of the activations."""
    numbers = dict.fromkeys(("stride", "width"), "i32"), {"cap": "fp32", "kind": "i32", "is_gated": "i32"}
    return [
        form(
            f"activate[{dtype}]",
            activate_kernel,
            {"x_ptr": pointer(dtype), "out_ptr": pointer(dtype), **numbers[0], **numbers[1]},
            {"BLOCK": _BLOCK},
            loose=("kind", "is_gated"),
            everywhere=dtype == "bfloat16",
        )
        for dtype in DTYPES
    ]


_FORMS = table(specialisations())


def _activate(x_TF: torch.Tensor, kind: int, *, gated: bool = False, cap: float = 1.0) -> torch.Tensor:
    if x_TF.stride(-1) != 1 and x_TF.shape[-1] != 1:
        x_TF = x_TF.contiguous()
    width = x_TF.shape[1] // 2 if gated else x_TF.shape[1]
    out = torch.empty((len(x_TF), width), dtype=x_TF.dtype, device=x_TF.device)
    if out.numel():
        grid = (len(x_TF), triton.cdiv(width, _BLOCK))
        stride, chosen = x_TF.stride(0), _FORMS[f"activate[{name_of(x_TF)}]"]
        chosen.launch(grid, x_TF, out, stride, width, float(cap), kind, int(gated))
    return out


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, where gate is the first half of the features and up the second."""
    return _activate(gate_up_T2F, _SILU.value, gated=True)


def gelu_tanh_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, as `silu_mul`, with the tanh form of gelu."""
    return _activate(gate_up_T2F, _GELU_TANH.value, gated=True)


def gelu_tanh(x_TF: torch.Tensor) -> torch.Tensor:
    """Return gelu(x) in its tanh form."""
    return _activate(x_TF, _GELU_TANH.value)


def soft_cap(x_LV: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap)."""
    return _activate(x_LV, _SOFT_CAP.value, cap=cap)
