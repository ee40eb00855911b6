"""What NVIDIA GPUs add: fused ops and sampling in Triton, mapped cache memory, CUDA graphs."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy


@hookimpl
def provide_kernels() -> list[Provider]:
    """Ops in Triton."""
    return [
        Provider(
            key="cuda",
            summary="ops fused in Triton for NVIDIA GPUs: norms, activations, attention's inputs, sampling; bitwise",
            fit=lazy("intarsia_cuda.kernels:fit"),
            build=lazy("intarsia_cuda.kernels:build"),
        )
    ]


@hookimpl
def provide_cache_allocators() -> list[Provider]:
    """Mapped memory. Its options are made here, since listing plugins looks for no driver."""
    from intarsia_cuda.options import VmmOptions

    return [
        Provider(
            key="vmm",
            summary="a range of addresses a sequence, memory mapped as it grows and given back; for NVIDIA GPUs",
            options=VmmOptions,
            fit=lazy("intarsia_cuda.vmm:fit"),
            build=lazy("intarsia_cuda.vmm:build"),
        )
    ]


@hookimpl
def provide_runners() -> list[Provider]:
    """Graphs around another runner."""
    from intarsia_cuda.options import GraphOptions

    return [
        Provider(
            key="cuda_graph",
            summary="decoding steps of another runner, each launched as one CUDA graph; for NVIDIA GPUs",
            options=GraphOptions,
            fit=lazy("intarsia_cuda.graphs:fit"),
            build=lazy("intarsia_cuda.graphs:build"),
        )
    ]
