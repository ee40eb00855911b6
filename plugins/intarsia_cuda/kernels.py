"""The set of kernels `cuda`, and every form of a Triton kernel that this plugin launches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import frozen

from intarsia.gpu_kernels import Specialisation
from intarsia.protocols import Kernel, PartContext
from intarsia.types import DecoderSpec, EngineOptions, Fit, Invariance, Unfit
from intarsia_cuda import saved_bytes
from intarsia_cuda.driver import elsewhere

#: The lowest compute capability that there are forms for: A100's.
_CAPABILITY = (8, 0)


@frozen
class CudaKernels:
    """Ops in Triton. What is not here is the reference's.

    Attributes:
        spec: the model.
        invariant: whether floats are multiplied in Triton too, in place of cuBLAS: slower, and bitwise.
    """

    spec: DecoderSpec
    invariant: bool = False

    def kernels(self) -> Sequence[Kernel]:
        """Return them. Without heads as wide as some of this model's, what treats heads is the reference's too."""
        from intarsia_cuda import activations, attention_inputs, norms, sampling
        from intarsia_cuda.quantized.matmuls import linear_kernels
        from intarsia_cuda.quantized.norm_linear import norm_linear_kernel

        products = [*linear_kernels(), norm_linear_kernel()]
        if self.invariant:
            from intarsia_cuda.dense import linear_kernel

            products.append(linear_kernel())  # the last: it reads every format

        found = [
            _kernel("rms_norm", norms.rms_norm),
            _kernel("add_rms_norm", norms.add_rms_norm, saves=saved_bytes.add_rms_norm),
            _kernel("layer_norm", norms.layer_norm),
            _kernel("silu_mul", activations.silu_mul, saves=partial(saved_bytes.gated, "silu")),
            _kernel("gelu_tanh_mul", activations.gelu_tanh_mul, saves=partial(saved_bytes.gated, "gelu_tanh")),
            _kernel("gelu_tanh", activations.gelu_tanh),
            _kernel("soft_cap", activations.soft_cap),
            _kernel("sample_rows", sampling.sample_rows),
        ]
        if max(layer.attention.head_dim for layer in self.spec.layers) <= attention_inputs.MAX_HEAD_DIM:
            cache: dict[str, Any] = {"orders": frozenset({"PSKD", "PKSD"}), "formats": frozenset({"int8"})}
            found += [
                _kernel("rope", attention_inputs.rope),
                _kernel("cache_write", attention_inputs.cache_write, **cache),
                _kernel(
                    "attention_inputs",
                    attention_inputs.attention_inputs,
                    saves=saved_bytes.attention_inputs,
                    **cache,
                ),
            ]
        return [*found, *products]


def _kernel(op: str, call: Callable[..., Any], **facts: Any) -> Kernel:
    # A row is computed by one program, or in blocks that its width alone cuts.
    alone: dict[str, Invariance] = dict.fromkeys(("bfloat16", "float16", "float32"), "bitwise")
    return Kernel(op=op, call=call, dtypes=frozenset(alone), invariance=alone, **facts)


def specialisations() -> list[Specialisation]:
    """Return every form of every Triton kernel that this plugin launches."""
    from intarsia_cuda import activations, attention_inputs, dense, norms, sampling
    from intarsia_cuda.quantized import matmuls

    return [
        form
        for module in (norms, activations, attention_inputs, sampling, matmuls, dense)
        for form in module.specialisations()
    ]


def fit(context: PartContext) -> Fit | Unfit:
    """For NVIDIA GPUs from compute capability 8.0 on."""
    import torch

    device = context.engine.device
    if not device.startswith("cuda"):
        return Unfit(f"its kernels run on NVIDIA GPUs, and {elsewhere(device)}")
    if importlib.util.find_spec("triton") is None:
        return Unfit("its kernels are Triton's, and triton is not installed; there are wheels for Linux")
    if torch.version.hip is not None:
        return Unfit("its kernels are for NVIDIA GPUs, and this torch is built for AMD's")
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        has, needs = (f"{major}.{minor}" for major, minor in (capability, _CAPABILITY))
        return Unfit(f"its kernels need compute capability {needs}, and {device} has {has}")
    engine = context.engine
    also = f"; floats by its own products, as engine.invariance = {engine.invariance!r} asks" if _asks(engine) else ""
    return Fit(90, f"fused ops for this GPU{also}")


def build(context: PartContext) -> CudaKernels:
    """Make the part."""
    return CudaKernels(context.spec, invariant=_asks(context.engine))


def _asks(engine: EngineOptions) -> bool:
    """Whether more is asked for than cuBLAS keeps: it picks its kernels by the number of rows."""
    return engine.invariance != "numeric"
