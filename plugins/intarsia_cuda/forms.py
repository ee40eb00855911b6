"""What the tables of this plugin's Triton kernels have in common: dtypes, and which architectures they compile for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from intarsia.gpu_kernels import CAPABILITIES, TYPES, Specialisation

#: Activation dtypes of every kernel here.
DTYPES = ("bfloat16", "float16", "float32")
#: bf16 is what GPUs run. The code of the other dtypes differs in conversions alone: one architecture compiles them.
_ONE = (90,)


def name_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def pointer(dtype: str) -> str:
    """Return Triton's type of a pointer to numbers of a torch dtype."""
    return f"*{TYPES[dtype]}"


def form(
    name: str,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    loose: tuple[str, ...] = (),
    num_warps: int = 4,
    everywhere: bool = False,
) -> Specialisation:
    """Return one form of a kernel.

    Args:
        name: unique in this plugin.
        kernel: what `triton.jit` made.
        signature: argument -> Triton's type.
        constants: argument -> value.
        loose: whole numbers that need not be multiples of 16: those that the kernel does not specialise on.
        num_warps: how it is launched.
        everywhere: whether it is compiled for every architecture.
    """
    aligned = tuple(n for n, kind in signature.items() if n not in loose and (kind[0] == "*" or kind[0] == "i"))
    return Specialisation(
        name=name,
        kernel=kernel,
        signature=signature,
        constants=constants,
        aligned=aligned,
        num_warps=num_warps,
        capabilities=CAPABILITIES if everywhere else _ONE,
    )


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its last axis in one piece."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
