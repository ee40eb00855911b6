"""Triton's interpreter, mended: it cuts float32 numbers off where a device rounds them to bfloat16, to nearest even.

Numbers below bfloat16's smallest normal one, which the interpreter gets wrong both ways, are right too.
"""

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def to_bfloat16(x):
    """Return the bits (uint16) of float32 numbers rounded to bfloat16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(bits.astype(np.uint32).view(np.float32)), 0x7FC0, rounded).astype(np.uint16)


def to_float32(bits):
    """Return bfloat16 numbers, given as their bits, in float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _rounds_to_bfloat16():
    """Convert as a device does, in the module that imports this."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def mended(self, source, target):
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(to_bfloat16(source.data).reshape(source.data.shape), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(to_float32(source.data).reshape(source.data.shape), tl.float32)
        return cast(self, source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "cast_impl", mended)
        yield
