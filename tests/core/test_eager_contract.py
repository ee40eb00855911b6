"""The eager runner keeps the contract of runners, over each plain attention backend."""

from intarsia.defaults import provide_runners
from intarsia.testing.runners import RunnerContract


class TestEager(RunnerContract):
    def provider(self):
        return provide_runners()[0]


class TestEagerOverSdpa(TestEager):
    sections = {"attention": "sdpa"}  # noqa: RUF012
