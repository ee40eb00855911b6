"""Linears over floats by the product that is bitwise, on a GPU: against float64, and the bits of few rows and many."""

import pytest
import torch

from gpu.parts import DEVICE
from intarsia.types import dense

pytestmark = pytest.mark.gpu

DTYPES = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
#: One split, ragged ones, and as many as a model has.
SHAPES = [(96, 256), (150, 1300), (512, 4096)]
ROWS = (1, 3, 16, 17, 40, 65, 130, 300)


def operands(outs, ins, dtype):
    generator = torch.Generator().manual_seed(outs)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in ((max(ROWS), ins), (outs, ins), (outs,)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_float64_within_what_rounding_allows(shape, dtype):
    from intarsia_cuda.dense import linear

    x, weight, bias = operands(*shape, dtype)
    right = x.double() @ weight.double().T + bias.double()
    bound = (x.double().abs() @ weight.double().abs().T) * 2**-18 + right.abs() * DTYPES[dtype] + 1e-6
    for rows in ROWS:
        found = linear(x[:rows].to(DEVICE), dense(weight.to(DEVICE)), bias.to(DEVICE)).cpu()
        assert found.shape == (rows, shape[0]) and found.dtype == dtype
        assert bool(((found.double() - right[:rows]).abs() <= bound[:rows]).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(shape, dtype):
    from intarsia_cuda.dense import linear

    x, weight, bias = (tensor.to(DEVICE) for tensor in operands(*shape, dtype))
    together = linear(x, dense(weight), bias)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], dense(weight), bias), together[:rows]), rows
        assert torch.equal(linear(x[-rows:], dense(weight), bias), together[-rows:]), rows
