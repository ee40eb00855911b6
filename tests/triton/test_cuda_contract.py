"""The kernels `cuda` under the contract of all kernels, in Triton's interpreter."""

import numpy as np
import pytest
import triton.language as tl
from attrs import evolve
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from intarsia.testing.kernels import KernelsContract
from intarsia.types import Fit
from intarsia_cuda import provide_kernels
from interpreting import placeless_products, rounded, true_bf16, widened  # noqa: F401

pytestmark = pytest.mark.usefixtures("true_bf16", "placeless_products")


@pytest.fixture(autouse=True)
def _true_bf16_arithmetic(monkeypatch):
    """The interpreter adds and multiplies the bits of bf16 as whole numbers."""
    binary = InterpreterBuilder.binary_op

    def right_binary(self, a, b, op):
        if a.dtype.scalar == tl.bfloat16 and op in (np.add, np.subtract, np.multiply):
            return TensorHandle(rounded(op(widened(a.data), widened(b.data))), tl.bfloat16)
        return binary(self, a, b, op)

    monkeypatch.setattr(InterpreterBuilder, "binary_op", right_binary)


@pytest.mark.slow
class TestCuda(KernelsContract):
    sizes = ((1, 1, 1), (1, 33, 70), (2, 48, 64), (9, 130, 257))
    widths = (1, 3, 16, 33, 64, 100, 70, 577, 4100)
    many_rows = 40
    float_steps = 0
    examples = 4

    def provider(self):
        """It is for GPUs, and said to fit all the same."""
        return evolve(provide_kernels()[0], fit=lambda context: Fit(10, "interpreted"))


@pytest.mark.parametrize(
    "claim", ["what_is_offered_can_be_chosen", "what_lies_beside_is_not_read", "no_rows_give_no_rows"]
)
def test_some_claims_are_quick_to_hold(claim):
    getattr(TestCuda(), f"test_{claim}")()
