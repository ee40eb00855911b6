"""Triton kernels as data: each form that an engine can launch, for tests that compile all of them without a GPU.

A plugin with Triton kernels lists its `Specialisation`s and launches them. The same list is compiled ahead of time, for
each architecture, with its registers, spills and shared memory known, so that nothing runs on a device that was not::

    FORMS = table(specialisations())
    FORMS["scale[bf16]"].launch((num_rows,), x, out, width)
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

#: Compute capabilities that kernels are compiled for: A100, H100 and H200, B200.
CAPABILITIES = (80, 90, 100)

#: Bytes of shared memory that a block can have (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMITS: Mapping[int, int] = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}

#: Columns of tensor memory of a multiprocessor, 128 x 4 bytes each (PTX ISA, tcgen05).
TENSOR_MEMORY_LIMITS: Mapping[int, int] = {80: 0, 90: 0, 100: 512}

#: Triton's names of torch's dtypes.
TYPES: Mapping[str, str] = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}


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

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run this form on the device of its tensors.

        In Triton's interpreter, arguments of other types than the signature's are an AssertionError: on a device they
        would compile a form that nobody has seen.

        Args:
            grid: programs along up to three axes.
            arguments: one for each entry of the signature, in its order.
        """
        if _is_interpreted(self.kernel):
            for name, argument in zip(self.signature, arguments, strict=True):
                wanted = self.signature[name].replace("*k", "*")
                assert wanted in _types_of(argument), f"{self.name}: {name} is {_types_of(argument)}, not {wanted}"
        named = dict(zip(self.signature, arguments, strict=True))
        with _device_of(arguments):
            self.kernel[grid](**named, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """How Triton compiles it; a * b + c is rounded once, as by default up to Triton 3.9."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def table(forms: Iterable[Specialisation]) -> dict[str, Specialisation]:
    """Return forms by name, for launches."""
    found: dict[str, Specialisation] = {}
    for form in forms:
        assert form.name not in found, f"two forms are named {form.name}"
        found[form.name] = form
    return found


def _is_interpreted(kernel: Any) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


def _types_of(argument: Any) -> tuple[str, ...]:
    """Return the types that a launch can give an argument; None, which is a constant, has none."""
    if isinstance(argument, bool):
        return ("i1", "u1")
    if isinstance(argument, int):
        return ("i32", "i64") if -(2**31) <= argument < 2**31 else ("i64",)
    if isinstance(argument, float):
        return ("fp32", "fp64")
    dtype = str(getattr(argument, "dtype", None)).removeprefix("torch.")
    return (f"*{TYPES[dtype]}",) if dtype in TYPES else ()


def _device_of(arguments: Iterable[Any]) -> AbstractContextManager[object]:
    """Make the tensors' device the current one, which is where Triton launches."""
    device = next((a.device for a in arguments if hasattr(a, "device")), None)
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    import torch

    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


# --- ahead of time ----------------------------------------------------------------------------------------------------


@frozen
class Resources:
    """What a compiled form takes.

    Attributes:
        registers: of a thread.
        spills: bytes of local memory of a thread: registers that did not fit, and arrays.
        shared: bytes of shared memory of a block.
        tensor_memory: columns of tensor memory of a block.
    """

    registers: int
    spills: int
    shared: int
    tensor_memory: int = 0


def compile_for(form: Specialisation, capability: int) -> Resources:
    """Compile a form for a compute capability; needs no GPU, and a process without Triton's interpreter.

    Raises whatever Triton or ptxas raises where the form does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert not _is_interpreted(form.kernel), f"{form.name}: made for the interpreter; unset TRITON_INTERPRET"
    constants = _constants(form)
    names: list[str] = form.kernel.arg_names
    source = ASTSource(
        form.kernel,
        {name: form.signature.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in form.aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=form.options)
    registers, spills = _usage(compiled.asm["cubin"])
    return Resources(registers, spills, compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0)


def _constants(form: Specialisation) -> dict[str, Any]:
    """Return a form's constants, the kernel's defaults included, having checked that every argument is one or typed."""
    defaults = {p.name: p.default for p in form.kernel.params if p.has_default and p.name not in form.signature}
    constants = {**defaults, **form.constants}
    names = set(form.kernel.arg_names)
    given = set(form.signature) | set(constants)
    assert given == names, f"{form.name}: {sorted(given ^ names)} are in the kernel or in its form, not in both"
    assert set(form.aligned) <= set(form.signature), f"{form.name}: {form.aligned} are not all in its signature"
    return constants


_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory of a thread, as cuobjdump of Triton's wheel reads them."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    found = _USAGE.search(text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def faults(capability: int, taken: Resources) -> tuple[str, ...]:
    """Return what makes a compiled form unfit for a capability: spills, and more memory than a block can have."""
    found = []
    if taken.spills:
        found.append(f"spills {taken.spills} bytes a thread")
    for what, size, limit in (
        ("bytes of shared memory", taken.shared, SHARED_LIMITS[capability]),
        ("columns of tensor memory", taken.tensor_memory, TENSOR_MEMORY_LIMITS[capability]),
    ):
        if size > limit:
            found.append(f"takes {size} {what} a block; sm_{capability} has {limit}")
    return tuple(found)
