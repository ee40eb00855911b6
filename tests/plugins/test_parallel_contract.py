"""The parallel executor keeps the contract of executors, however the ranks share the model."""

import pytest

from intarsia.testing.executors import ExecutorContract
from intarsia_parallel import provide_executors

pytestmark = pytest.mark.slow


class Parallel(ExecutorContract):
    in_process = False
    reuse = True
    lives = 3

    def provider(self):
        return provide_executors()[0]


class TestStages(Parallel):
    options = {"pp": 2, "microbatches": 2, "check_every": 1, "timeout_s": 10.0}  # noqa: RUF012


class TestSlices(Parallel):
    options = {"tp": 2, "check_every": 1, "timeout_s": 10.0}  # noqa: RUF012


class TestSlicesOfTokens(Parallel):
    options = {"tp": 2, "sequence": True, "timeout_s": 10.0}  # noqa: RUF012


class TestOneRank(Parallel):
    options = {"timeout_s": 10.0}  # noqa: RUF012
