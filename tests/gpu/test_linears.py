"""Linears over whole numbers on a GPU, against float64: every way that a kernel goes, few rows and many."""

import pytest
import torch
from attrs import evolve

from attending import attention_spec
from gpu.parts import DEVICE, build
from integer_weights import integer_weight, values_of

pytestmark = pytest.mark.gpu

NAMES = ("int8", "int8_a16", "int8_g32", "int8_g128_min_a16", "int4_g32", "int4_g64_zero", "int4_g128_min_a16")
ROWS = (1, 7, 40, 130)
SHAPES = [(96, 256), (150, 300), (512, 4096)]


def linear(name, dtype):
    """Return the kernel for a format, or skip."""
    kernels = build("kernels", "cuda", attention_spec(8, 2, 64), dtype).kernels()
    for kernel in kernels:
        if kernel.op == "linear" and name in kernel.formats and (not kernel.dtypes or dtype in kernel.dtypes):
            return kernel
    pytest.skip(f"cuda has no linear for {name} in {dtype}")


def on_device(weight, kernel):
    moved = evolve(weight, tensors={key: tensor.to(DEVICE) for key, tensor in weight.tensors.items()})
    return moved if kernel.pack is None else kernel.pack(moved)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_products_equal_float64_within_what_rounding_allows(name, dtype):
    kernel = linear(name, dtype)
    for outs, ins in SHAPES:
        weight = integer_weight(name, outs, ins)
        values, sizes = (torch.from_numpy(numbers) for numbers in values_of(weight))
        x = torch.randn((max(ROWS), ins), generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
        # A unit of bf16 a product; rows that are rounded to int8 are off by half a 127th of their largest besides.
        step = 0.0 if name.endswith("_a16") or name.startswith("int4") else 1 / 127
        off = 2.0**-7 * x.double().abs() + step * x.double().abs().amax(-1, keepdim=True)
        right, bound = x.double() @ values.T, off @ sizes.T + 1e-6
        packed = on_device(weight, kernel)
        for rows in ROWS:
            found = kernel.call(x[:rows].to(DEVICE), packed).cpu()
            assert found.dtype == x.dtype and found.shape == (rows, outs)
            assert bool(((found.double() - right[:rows]).abs() <= bound[:rows]).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_any_batch(name):
    kernel = linear(name, "bfloat16")
    if kernel.invariance.get("bfloat16") != "bitwise":
        pytest.skip("it promises less")
    weight = integer_weight(name, 512, 4096)
    packed = on_device(weight, kernel)
    x = torch.randn((130, 4096), generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    together = kernel.call(x, packed)
    for rows in (1, 3, 17, 65):
        assert torch.equal(kernel.call(x[:rows], packed), together[:rows])
    assert torch.equal(kernel.call(x[129:], packed), together[129:])
