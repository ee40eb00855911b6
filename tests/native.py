"""The C++ kernels on every path that this CPU runs, compiled once a session."""

import os

import pytest

from intarsia_cpu import build


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A function (area, path) -> library. INTARSIA_CACHE keeps what it builds from one session to the next."""
    folder = build.cache_folder("cpu") if build.CACHE_VARIABLE in os.environ else tmp_path_factory.getbasetemp() / "cpu"
    return lambda area, path: build._load(area, path, folder)
