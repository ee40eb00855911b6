"""Triton kernels as data: each form that an engine can launch, for tests that compile all of them without a GPU.

A plugin with Triton kernels lists its `Specialisation`s. The same lists say what is launched, so that nothing runs on a
device that was not compiled ahead of time, for each architecture, with its registers, spills and shared memory known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, frozen

#: Compute capabilities that kernels are compiled for: A100, H100 and H200, B200.
CAPABILITIES = (80, 90, 100)


@frozen(kw_only=True)
class Specialisation:
    """One form of a kernel.

    Attributes:
        name: `decode[bf16, d128]` and the like: unique in its plugin.
        kernel: the function that `triton.jit` decorates.
        signature: argument -> Triton's type, such as `*bf16`, `i32`, `fp32`; constants are left out.
        constants: argument -> value, for the kernel's `tl.constexpr`.
        aligned: arguments that are multiples of 16, pointers among them, as launches find them to be.
        num_warps, num_stages: how it is launched.
        capabilities: what it is for.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = Factory(dict)
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    capabilities: tuple[int, ...] = CAPABILITIES
