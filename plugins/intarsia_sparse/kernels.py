"""The set of kernels `cusparselt`: 2:4 sparse products on NVIDIA GPUs, by torch's semi-structured tensors.

torch compresses a weight for cuSPARSELt, which multiplies it on the sparse tensor cores. Weights are padded with zeros
to multiples of 64, so that any shape will do. Weights in `sparse24_int8` go the way of the reference.

Shape legend: T tokens, C in features, N out features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.errors import CompositionError
from intarsia.ops import linear as reference
from intarsia.protocols import Kernel, PartContext
from intarsia.types import Fit, Unfit, Weight, WeightFormat

#: Name of the packed format.
PACKED = "semi_structured"
_DTYPES = ("float16", "bfloat16")
#: The first GPUs with sparse tensor cores are of compute capability 8.0.
_LEAST = (8, 0)
#: Rows and columns of a weight are a multiple of it: more than any library behind torch asks for.
_MULTIPLE = 64


@frozen
class SemiStructured:
    """The format of one packed weight: `weight`, torch's semi-structured tensor of the padded matrix."""

    source: WeightFormat
    name: str = PACKED

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight (N, C)."""
        outs, ins = weight.shape
        return weight.tensors["weight"].to_dense()[:outs, :ins]

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        """Refuse: what torch has packed is not cut."""
        del weight, index
        raise CompositionError("rows are taken of a weight before it is packed for sparse tensor cores")

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Refuse: what torch has packed is not cut."""
        del weight, dim, start, stop
        raise CompositionError("a weight is sharded before it is packed for sparse tensor cores")


def padded(dense_NC: torch.Tensor) -> torch.Tensor:
    """Return the matrix behind which zeros make its sides multiples of 64."""
    outs, ins = dense_NC.shape
    return functional.pad(dense_NC, (0, -ins % _MULTIPLE, 0, -outs % _MULTIPLE)).contiguous()


def pack(weight: Weight) -> Weight:
    """Have torch compress a weight in `sparse24`."""
    compressed = torch.sparse.to_sparse_semi_structured(padded(weight.dequantize()))
    return Weight(SemiStructured(weight.format), {"weight": compressed}, weight.shape)


def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N)."""
    if not isinstance(weight.format, SemiStructured):
        return reference(x_TC, weight, bias_N)
    outs, ins = weight.shape
    rows = functional.pad(x_TC, (0, -ins % _MULTIPLE)).contiguous()
    product = functional.linear(rows, weight.tensors["weight"])[:, :outs]
    return product.contiguous() if bias_N is None else product + bias_N


@frozen
class SparseKernels:
    """The linear over `sparse24`. What is not here is the reference's."""

    def kernels(self) -> Sequence[Kernel]:
        """Return it."""
        return [
            Kernel(
                op="linear",
                call=linear,
                formats=frozenset({"sparse24"}),
                dtypes=frozenset(_DTYPES),
                pack=pack,
                packed=PACKED,
            )
        ]


def fit(context: PartContext) -> Fit | Unfit:
    """For float16 and bfloat16 on GPUs with sparse tensor cores, where torch has cuSPARSELt."""
    engine = context.engine
    if not engine.device.startswith("cuda") or engine.dtype not in _DTYPES:
        return Unfit(f"it is for float16 and bfloat16 on GPUs, and the engine runs {engine.dtype} on {engine.device}")
    capability = torch.cuda.get_device_capability(engine.device)
    if capability < _LEAST:
        found, least = (".".join(map(str, numbers)) for numbers in (capability, _LEAST))
        return Unfit(f"it needs a GPU of compute capability {least} or more, and {engine.device} has {found}")
    if not torch.backends.cusparselt.is_available():
        return Unfit("this build of torch comes without cuSPARSELt")
    return Fit(0, "cuSPARSELt")


def build(_: PartContext) -> SparseKernels:
    """Make the part."""
    return SparseKernels()
