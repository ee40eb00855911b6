"""The set of kernels `cpu`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen

from intarsia.protocols import Kernel, PartContext
from intarsia.types import Fit, Unfit
from intarsia_cpu import build as native
from intarsia_cpu.linears import linear_kernels
from intarsia_cpu.rows import RowOps, row_kernels

_DTYPES = ("float32", "bfloat16")
#: Behind torch's and oneDNN's own where these are as fast; before torch's where it has no fast products.
_RANK, _RANK_BEFORE_TORCH = 0, 40


@frozen(eq=False)
class CpuKernels:
    """Ops in C++. What is not here is the reference's."""

    row_ops: RowOps = field(factory=RowOps)

    def kernels(self) -> Sequence[Kernel]:
        """Return them."""
        return [*linear_kernels(), *row_kernels(self.row_ops)]


def fit(context: PartContext) -> Fit | Unfit:
    """For float32 and bfloat16 on CPUs, where the kernels can be compiled."""
    engine = context.engine
    if engine.device != "cpu" or engine.dtype not in _DTYPES:
        return Unfit(f"it is for float32 and bfloat16 on CPUs, and the engine runs {engine.dtype} on {engine.device}")
    if reason := native.unavailable():
        return Unfit(reason)
    if engine.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        return Fit(_RANK_BEFORE_TORCH, f"compiled for {native.isa()}; torch has no fast products of bfloat16 here")
    return Fit(_RANK, f"compiled for {native.isa()}")


def build(_: PartContext) -> CpuKernels:
    """Make the part."""
    return CpuKernels()
