"""bf16 in Triton's interpreter, as devices have it.

The interpreter keeps bf16 numbers as uint16. It multiplies matrices of them as whole numbers, turns whole numbers into
bf16 by keeping their bits, and cuts fp32 off where devices round to nearest even.
"""

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype


def widened(data):
    """Return bf16 as fp32, exactly."""
    return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32).reshape(data.shape)


def rounded(data):
    """Return fp32 as bf16, to nearest even; NaN stays NaN."""
    wide = np.ascontiguousarray(data, dtype=np.float32)
    bits = wide.view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), nearest).reshape(data.shape)


def _wide(operand):
    return widened(operand.data) if operand.dtype.scalar == tl.bfloat16 else operand.data


@pytest.fixture(scope="module")
def true_bf16():
    """Make the interpreter's bf16 right for a module's tests."""
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def right_cast(self, source, target):
        kinds = source.dtype.scalar, target.scalar
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
            return cast(self, source, target)
        data = rounded(_wide(source)) if kinds[1] == tl.bfloat16 else _wide(source).astype(_get_np_dtype(target))
        return TensorHandle(data, target.scalar)

    def right_dot(self, a, b, d, *how):
        if a.dtype.scalar != tl.bfloat16:
            return dot(self, a, b, d, *how)
        return TensorHandle(np.matmul(_wide(a), _wide(b)) + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", right_cast)
        patch.setattr(InterpreterBuilder, "create_dot", right_dot)
        yield


@pytest.fixture
def placeless_products(monkeypatch):
    """Give a row of a matrix product the same bits wherever in the matrix it stands, as BLAS does not.

    Products are taken in float64 and rounded once. What is left to depend on a row's place, or on what is beside it, is
    the kernel's own doing. That a device's units treat rows alike is for tests on the device.
    """

    def product(self, a, b, d, *how):
        exact = np.matmul(_wide(a).astype(np.float64), _wide(b).astype(np.float64)) + d.data
        return TensorHandle(exact.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
