"""The references as a part of their own, so that a config can ask for them and `explain` can name them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from intarsia.ops import references
from intarsia.protocols import Kernel, PartContext


@frozen
class TorchKernels:
    """Every op through torch."""

    device: str

    def kernels(self) -> Sequence[Kernel]:
        """Return the reference of each op."""
        return references(self.device)


def build(context: PartContext) -> TorchKernels:
    """Make the references for the engine's device."""
    return TorchKernels(context.engine.device)
