"""bf16 matrix products through oneDNN, with weights laid out for it once, while they load.

torch's own bf16 product takes a weight as it lies and lays it out anew in every call, which at few rows costs more than
the product.

Shape legend: T tokens, C in features, N out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen

from intarsia.errors import CompositionError
from intarsia.ops import linear as reference
from intarsia.protocols import Kernel, PartContext
from intarsia.types import Fit, Unfit, Weight, dense

#: torch's own ops around oneDNN: what its compiler calls for packed weights.
_MKLDNN: Any = torch.ops.mkldnn
#: Rows that the layout is made for. It serves any number; a decode step of one sequence has one.
_ROWS = 1


@frozen
class _Packed:
    """One tensor `packed` in oneDNN's own layout, which only its product reads."""

    name: str = "onednn"

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return weight.tensors["packed"].to_dense()

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        return dense(self.dequantize(weight)[index])

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        del weight, dim, start, stop
        raise CompositionError("a weight is sharded before it is packed for oneDNN")


PACKED = _Packed()


def pack(weight: Weight) -> Weight:
    """Lay a dense bf16 (N, C) weight out for the product."""
    packed = _MKLDNN._reorder_linear_weight(weight.dequantize(), _ROWS)  # noqa: SLF001
    return Weight(PACKED, {"packed": packed}, weight.shape)


def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N)."""
    if weight.format is not PACKED:
        return reference(x_TC, weight, bias_N)
    packed = weight.tensors["packed"]
    product: torch.Tensor = _MKLDNN._linear_pointwise(x_TC, packed, bias_N, "none", [], "")  # noqa: SLF001
    return product


@frozen
class OneDnnKernels:
    """The packed product. Everything else is the reference's."""

    def kernels(self) -> Sequence[Kernel]:
        """Return the linear kernel."""
        kernel = Kernel(
            op="linear",
            call=linear,
            formats=frozenset({"dense"}),
            dtypes=frozenset({"bfloat16"}),
            pack=pack,
            packed=PACKED.name,
        )
        return (kernel,)


def fit(context: PartContext) -> Fit | Unfit:
    """For bf16 on CPUs whose oneDNN computes in it."""
    engine = context.engine
    if engine.device != "cpu" or engine.dtype != "bfloat16":
        return Unfit(f"it packs bfloat16 weights for CPUs, and the engine runs {engine.dtype} on {engine.device}")
    if not _MKLDNN._is_mkldnn_bf16_supported():  # noqa: SLF001
        return Unfit("oneDNN cannot compute in bfloat16 here")
    return Fit(50, "weights laid out for oneDNN once")


def build(_: PartContext) -> OneDnnKernels:
    """Make the part."""
    return OneDnnKernels()
