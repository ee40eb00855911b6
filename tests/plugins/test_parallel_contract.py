"""The parallel executor keeps the contract of executors, however the ranks share the model."""

import pytest

from intarsia_parallel.contract import ParallelContract

pytestmark = pytest.mark.slow


class TestStages(ParallelContract):
    options = {"pp": 2, "microbatches": 2, "check_every": 1, "timeout_s": 10.0}  # noqa: RUF012


class TestSlices(ParallelContract):
    pass


class TestSlicesOfTokens(ParallelContract):
    options = {"tp": 2, "sequence": True, "timeout_s": 10.0}  # noqa: RUF012


class TestOneRank(ParallelContract):
    options = {"timeout_s": 10.0}  # noqa: RUF012
