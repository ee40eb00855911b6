"""The kernels of the part `cuda` on a GPU, against the references of the ops in float64 on a CPU."""

import pytest
import torch

from attending import attention_spec
from gpu.parts import DEVICE, build
from intarsia.models.cache import LayerTensors
from intarsia.ops import OPS

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "float16", "bfloat16")
#: A unit of each dtype, relative; results are within a few.
UNITS = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SHAPES = [(1, 4096), (7, 576), (64, 1000), (300, 14336)]


def numbers(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(op, shape):
    """Arguments in fp32; the tensors among them go through the dtype under test."""
    rows, width = shape
    x = numbers(shape)
    return {
        "rms_norm": (x, numbers((width,), 1), 1e-5),
        "add_rms_norm": (x, numbers(shape, 2), numbers((width,), 1), 1e-5),
        "layer_norm": (x, numbers((width,), 1), numbers((width,), 3), 1e-5),
        "silu_mul": (numbers((rows, 2 * width)),),
        "gelu_tanh_mul": (numbers((rows, 2 * width)),),
        "gelu_tanh": (x,),
        "soft_cap": (x, 3.0),
    }[op]


def kernels(dtype):
    part = build("kernels", "cuda", attention_spec(8, 2, 64), dtype)
    return {k.op: k for k in reversed(part.kernels()) if not k.dtypes or dtype in k.dtypes}


def to(arguments, *where):
    return tuple(a.to(*where) if isinstance(a, torch.Tensor) else a for a in arguments)


def close(found, right, dtype):
    found = found if isinstance(found, tuple) else (found,)
    right = right if isinstance(right, tuple) else (right,)
    for one, other in zip(found, right, strict=True):
        assert one.dtype == getattr(torch, dtype)
        error = (one.cpu().double() - other).abs()
        bound = 4 * UNITS[dtype] * other.abs().clamp(min=0.25 * float(other.abs().max()) + 1e-3)
        assert bool((error <= bound).all()), float(error.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "op", ["rms_norm", "add_rms_norm", "layer_norm", "silu_mul", "gelu_tanh_mul", "gelu_tanh", "soft_cap"]
)
def test_a_rowwise_op_equals_its_reference_in_float64(op, dtype):
    kernel = kernels(dtype).get(op)
    if kernel is None:
        pytest.skip(f"cuda has no kernel for {op}")
    for shape in SHAPES:
        rounded = to(arguments(op, shape), getattr(torch, dtype))
        close(kernel.call(*to(rounded, DEVICE)), OPS[op].call(*to(rounded, torch.float64)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_equals_its_reference_in_float64(dtype):
    kernel = kernels(dtype).get("rope")
    if kernel is None:
        pytest.skip("cuda has no kernel for rope")
    angles = torch.rand((33, 1, 32), generator=torch.Generator().manual_seed(1)) * 6
    for head_dim in (64, 80):
        rounded = to((numbers((33, 6, head_dim)), angles.cos(), angles.sin()), getattr(torch, dtype))
        close(kernel.call(*to(rounded, DEVICE)), OPS["rope"].call(*to(rounded, torch.float64)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
def test_the_cache_is_written_where_slots_say_and_nowhere_else(order, dtype):
    kernel = kernels(dtype).get("cache_write")
    if kernel is None or order not in kernel.orders:
        pytest.skip(f"cuda has no kernel that writes {order}")
    size, torch_dtype = {"P": 5, "S": 16, "K": 2, "D": 64}, getattr(torch, dtype)
    slots = torch.tensor([3, 16, 79, 40, -1])
    keys, values = (numbers((5, 2, 64), seed).to(torch_dtype) for seed in (1, 2))
    found, right = (LayerTensors.empty(order, size, torch_dtype, torch.device(d)) for d in (DEVICE, "cpu"))
    found.fill(torch.nan)
    right.fill(torch.nan)
    kernel.call(keys.to(DEVICE), values.to(DEVICE), found, slots.to(DEVICE), order)
    OPS["cache_write"].call(keys, values, right, slots, order)
    for one, other in zip(found.tensors, right.tensors, strict=True):
        # The last slot of the spare page is where padded tokens go: anything may lie there.
        one, other = one.cpu().clone(), other.clone()
        for tensor in (one, other):
            tensor[4].zero_()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
