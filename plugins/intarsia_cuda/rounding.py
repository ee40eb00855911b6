"""Functions of Triton kernels that round, and tanh. None of them needs libdevice, which the interpreter does not have.

The dtypes are the references' own: what torch rounds between two of its ops, a fused kernel rounds in registers.
"""

# Triton has no type hints.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

#: Added to a float32 below 2**22 in size and taken off again, it leaves the nearest whole number, of two the even one.
_WHOLE = tl.constexpr(12582912.0)
#: As `intarsia.ops.int8_entries` has it: a product, which is the same on every device.
_STEP = tl.constexpr(1 / 127)
_ENDLESS = tl.constexpr(float("inf"))


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return float32 numbers rounded to a dtype, in float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def magnitudes(x: tl.tensor) -> tl.tensor:
    """Return absolute values, and infinity for NaN, which a maximum would pass over."""
    size = tl.abs(x)
    return tl.where(size < _ENDLESS, size, _ENDLESS)


@triton.jit
def int8_scale(largest: tl.tensor) -> tl.tensor:
    """Return the scale of int8 numbers whose largest magnitude this is: NaN where that is not finite."""
    return tl.where(largest < _ENDLESS, largest * _STEP, float("nan"))


@triton.jit
def int8_numbers(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return x / scale as int8, to nearest, ties to even; zeros where the scale is 0 or NaN."""
    is_plain = scale > 0
    quotient = tl.where(is_plain, tl.div_rn(tl.where(is_plain, x, 0.0), tl.where(is_plain, scale, 1.0)), 0.0)
    # Scales of the smallest floats are rounded themselves, so that a quotient can pass 127.
    quotient = tl.minimum(tl.maximum(quotient, -127.0), 127.0)
    return ((quotient + _WHOLE) - _WHOLE).to(tl.int8)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return the hyperbolic tangent of float32: near 0 by Cephes' polynomial (`tanhf`), else by the exponential."""
    size = tl.abs(x)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    z = x * x
    slope = -5.70498872745e-3 * z + 2.06390887954e-2
    slope = (slope * z - 5.37397155531e-2) * z + 1.33314422036e-1
    near = (slope * z - 3.33332819422e-1) * z * x + x
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))
