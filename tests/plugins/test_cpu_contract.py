"""The kernels `cpu` under the contract of all kernels, as this machine compiles them."""

import pytest

from intarsia.testing.kernels import KernelsContract
from intarsia_cpu import provide_kernels
from intarsia_cpu.build import unavailable

REASON = unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


class TestCpu(KernelsContract):
    float_steps = 0

    def provider(self):
        return provide_kernels()[0]
