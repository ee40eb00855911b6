"""What a config says of the executor `local`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_, optional

from intarsia.protocols import ExecutorContext
from intarsia.types import Fit, Unfit


@frozen(kw_only=True)
class LocalOptions:
    """Options of the executor `local`."""

    #: mark steps, and what they are made of, as NVTX ranges: Nsight Systems shows them beside a GPU's kernels
    nvtx: bool = False
    #: steps in flight at most, 1 or 2: with two, planning and accepting overlap the device; by itself 2 on NVIDIA GPUs,
    #: and 1 on CPUs, where the host is the device
    depth: int | None = field(default=None, validator=optional(in_((1, 2))))


def fit(context: ExecutorContext) -> Fit | Unfit:
    """Every device; ranges on NVIDIA GPUs."""
    device = context.engine.device
    if context.options.nvtx and not device.startswith("cuda"):
        return Unfit(f"executor.nvtx marks ranges beside the kernels of NVIDIA GPUs, and the engine runs on {device}")
    return Fit(10)
