"""The C++ kernels on every path that this CPU runs, compiled once a run."""

import pytest

from intarsia_cpu import build


@pytest.fixture(scope="session")
def compiled(kernel_cache):
    """A function path -> library."""
    return lambda path: build._load(path, kernel_cache / "cpu")
