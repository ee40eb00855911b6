"""A norm and the `int8` linear behind it: rows leave the norm as int8 numbers, and are read as such.

Of the three kernels of the chain (norm, quantization, product) the first two are one, and the normed rows are never
stored in the activations' dtype. What the product reads are the same numbers and scales.

Shape legend: T tokens, E embed, N out features.
"""

from __future__ import annotations

import torch

from intarsia.protocols import Kernel
from intarsia.types import Weight
from intarsia_cuda import norms, saved_bytes
from intarsia_cuda.quantized import matmuls
from intarsia_cuda.quantized.packing import Packed


def norm_linear(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight: Weight,
    bias_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + residual) @ weight.T + bias, (T, N), and the sum, (T, E)): x itself where there is no residual.

    All packed weights have one format; one whose rows do not become int8 is read by the chain.
    """
    if _takes_int8(weight):
        input_scale_E = weight.tensors.get("input_scale")
        numbers, scales_T, total_TE = norms.rms_norm_int8(x_TE, norm_weight_E, eps, input_scale_E, residual_TE)
        return matmuls.linear_int8(numbers, scales_T, weight, bias_N, x_TE.dtype), total_TE
    if residual_TE is None:
        normed_TE, total_TE = norms.rms_norm(x_TE, norm_weight_E, eps), x_TE
    else:
        normed_TE, total_TE = norms.add_rms_norm(x_TE, residual_TE, norm_weight_E, eps)
    return matmuls.linear(normed_TE, weight, bias_N), total_TE


def _takes_int8(weight: Weight) -> bool:
    packed = weight.format
    return isinstance(packed, Packed) and packed.source.name == "int8"


def norm_linear_kernel() -> Kernel:
    """Return the kernel of `norm_linear`, for the provider `cuda`: a norm's rows and an int8 product's are bitwise."""
    return Kernel(
        op="norm_linear",
        call=norm_linear,
        formats=frozenset({"int8"}),
        dtypes=frozenset({"bfloat16"}),
        invariance={"bfloat16": "bitwise"},
        saves=saved_bytes.norm_linear,
    )
