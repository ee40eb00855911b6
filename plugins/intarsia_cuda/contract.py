"""What the contracts are told of parts for NVIDIA GPUs: their suites' engines compute on CPUs.

`intarsia plugins check cuda` says so. The suites run over these parts in tests, on memory and graphs that are recorded.
"""

from __future__ import annotations

from intarsia.testing.allocators import AllocatorContract
from intarsia.testing.claims import unclaimed
from intarsia.testing.runners import RunnerContract
from intarsia.types import Provider
from intarsia_cuda import provide_cache_allocators, provide_runners

_WHY = "it is for NVIDIA GPUs, and the engines of this suite compute on CPUs"


class VmmContract(AllocatorContract):
    """Nothing is claimed."""

    def provider(self) -> Provider:
        return provide_cache_allocators()[0]

    def setup_method(self) -> None:
        """Say why before each claim."""
        unclaimed(_WHY)


class CudaGraphContract(RunnerContract):
    """Nothing is claimed."""

    def provider(self) -> Provider:
        return provide_runners()[0]

    def setup_method(self) -> None:
        """Say why before each claim."""
        unclaimed(_WHY)
