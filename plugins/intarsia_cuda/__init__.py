"""What NVIDIA GPUs add: fused ops and sampling in Triton."""

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
