"""The local executor keeps the contract of executors, one step at a time and with two in flight."""

from intarsia.defaults import provide_executors
from intarsia.testing.executors import ExecutorContract


class TestLocal(ExecutorContract):
    def provider(self):
        return provide_executors()[0]


class TestLocalWithTwoStepsInFlight(TestLocal):
    options = {"depth": 2}  # noqa: RUF012
