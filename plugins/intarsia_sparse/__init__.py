"""2:4 sparse weights, pruned while a model loads: half of the numbers, and near half of the bytes."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_sparse.options import SparseOptions


@hookimpl
def provide_quantizers() -> list[Provider]:
    """The formats `sparse24` and `sparse24_int8`."""
    return [
        Provider(
            key="sparse24",
            summary="2:4 sparse weights: two of every four columns are kept, by magnitude or by Wanda",
            options=SparseOptions,
            build=lazy("intarsia_sparse.quantizer:build"),
        )
    ]


@hookimpl
def provide_kernels() -> list[Provider]:
    """Sparse tensor cores."""
    return [
        Provider(
            key="cusparselt",
            summary="linears over 2:4 sparse weights on the sparse tensor cores of NVIDIA GPUs, through torch",
            fit=lazy("intarsia_sparse.kernels:fit"),
            build=lazy("intarsia_sparse.kernels:build"),
        )
    ]
