"""Linear layers over int8 weights by torch's integer product, for CPUs without a compiler for `intarsia_cpu`'s kernels.

| weight formats | activations | product |
| --- | --- | --- |
| `int8`, `int8_a16`, `int8_rotated` | whole numbers of 15 bits, a scale a token | exact int32 sums |
| `int8_g*` and the like | as they come | pieces of the weight are dequantized, one after the other |

One scale a token at 8 bits costs too much where a few inputs are hundreds of times as large as the others, as they are
in most models (SmolLM2's perplexity rises by 5%). So a token becomes two rows of int8 digits, `256 * high + low`, which
one integer product takes together: at few tokens it is bound by reading the weight, and costs no more than one row.

Shape legend: T tokens, C in features, N out features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.ops import linear as reference
from intarsia.protocols import Kernel, PartContext
from intarsia.quantizing.integers import FORMATS
from intarsia.quantizing.rotated import ROTATED, RotatedFormat, rotate
from intarsia.types import Fit, Invariance, Unfit, Weight, dense

#: Numbers dequantized at once: temporary tensors stay this small, however large a weight is.
_CHUNK = 1 << 22
#: Tokens at once, so that sums stay small beside the weight.
_TOKENS = 512
_BASE = 256
#: Products of so many int8 numbers, -128 times -128 each, have a sum that an int32 holds.
_COLUMNS = ((1 << 31) - 1) // (128 * 128)
#: The largest whole number whose digits, from -128 to 127 each, are rounded to nearest: 127 * 256 + 127.
_LARGEST = 127 * _BASE + 127
#: Formats with one scale an output.
ROWS = frozenset({"int8", "int8_a16", "int8_rotated"})
#: Those with a scale a group.
GROUPS = frozenset({layout.name for layout in FORMATS if layout.bits == 8} | {layout.name for layout in ROTATED}) - ROWS


def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N), in x's dtype, for weights with one scale an output.

    Sums are exact and everything else is done number by number, so a row's bits do not depend on the rows beside it. A
    row that holds NaN or infinity gives NaN.
    """
    out_TN = torch.empty(x_TC.shape[0], weight.shape[0], dtype=x_TC.dtype, device=x_TC.device)
    for rows_TC, part_TN in zip(torch.split(x_TC, _TOKENS), torch.split(out_TN, _TOKENS), strict=True):
        part_TN.copy_(_product(rows_TC, weight, bias_N))
    return out_TN


def _product(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None) -> torch.Tensor:
    tensors, num_tokens = weight.tensors, x_TC.shape[0]
    x = x_TC.float()
    if "input_scale" in tensors:
        x = x * tensors["input_scale"]
    if isinstance(weight.format, RotatedFormat):
        x = rotate(x)
    digits, scale_T1 = _digits(x)
    sums = _sums(digits, tensors["weight"])
    # Sums of high digits can need more bits than float32 has, where there are over a thousand inputs: it rounds once.
    product = sums[:num_tokens].float().mul_(_BASE).add_(sums[num_tokens:].float())
    product.mul_(scale_T1).mul_(tensors["scale"].float())
    return product if bias_N is None else product.add_(bias_N.float())


def _sums(rows_RC: torch.Tensor, numbers_NC: torch.Tensor) -> torch.Tensor:
    """Return the exact products (R, N) of int8 numbers, in int32."""
    assert rows_RC.shape[1] <= _COLUMNS, "an int32 could overflow"
    if rows_RC.shape[1] == 1:
        # Of one column the strides do not tell rows from columns, and torch's product reads past them.
        rows_RC, numbers_NC = functional.pad(rows_RC, (0, 1)), functional.pad(numbers_NC, (0, 1))
    return torch._int_mm(rows_RC, numbers_NC.t())  # noqa: SLF001


def _digits(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high digits, then low ones, (2T, C) in int8, and the scales (T, 1) of the numbers that they make."""
    largest_T1 = x_TC.abs().amax(1, keepdim=True)
    scale_T1 = largest_T1 / _LARGEST
    # Rows too small for a scale come out as zeros; what is not finite shows in the scale.
    is_plain = (scale_T1 > 0) & largest_T1.isfinite()
    numbers = torch.where(is_plain, x_TC / scale_T1, 0.0).round_().clamp_(-_LARGEST, _LARGEST)
    high = ((numbers + _BASE // 2) / _BASE).floor_()
    low = numbers - high * _BASE
    scale_T1 = torch.where(largest_T1.isfinite(), scale_T1, torch.nan)
    return torch.cat((high, low)).to(torch.int8), scale_T1


def dequantizing_linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N), as the reference does, with a piece of the weight in floats at a time."""
    outs, ins = weight.shape
    num_rows = max(1, _CHUNK // max(1, ins))
    if isinstance(weight.format, RotatedFormat):  # rows are rotated once, in the place of each piece
        scale_C = weight.tensors.get("input_scale", 1.0)
        x_TC, weight = rotate(x_TC.float() * scale_C).to(x_TC.dtype), weight.format.plain(weight)
    if num_rows >= outs:
        return reference(x_TC, weight, bias_N)
    out_TN = torch.empty(x_TC.shape[0], outs, dtype=x_TC.dtype, device=x_TC.device)
    for start in range(0, outs, num_rows):
        rows = slice(start, min(outs, start + num_rows))
        bias = None if bias_N is None else bias_N[rows]
        out_TN[:, rows] = reference(x_TC, dense(weight.rows(rows).dequantize()), bias)
    return out_TN


@frozen
class Int8Kernels:
    """The products. Everything else is the reference's."""

    def kernels(self) -> Sequence[Kernel]:
        """Return the linear kernels."""
        bitwise: dict[str, Invariance] = dict.fromkeys(("float32", "bfloat16", "float16"), "bitwise")
        return (
            Kernel(op="linear", call=linear, formats=ROWS, invariance=bitwise),
            # As the reference: of floats' products only those in fp32 keep rows apart.
            Kernel(
                op="linear",
                call=dequantizing_linear,
                formats=GROUPS,
                invariance={"float32": "bitwise"},
                dequantizes=True,
            ),
        )


def fit(context: PartContext) -> Fit | Unfit:
    """For CPUs. Never the best: `cpu` is faster, and whoever has no compiler asks for this by its name."""
    if context.engine.device != "cpu":
        return Unfit(f"it multiplies whole numbers on CPUs, and the engine runs on {context.engine.device}")
    return Fit(-10, "int8 products by torch; name it before the kernels of other weights where there is no compiler")


def build(_: PartContext) -> Int8Kernels:
    """Make the part."""
    return Int8Kernels()
