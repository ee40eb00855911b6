"""What tests of plugins share."""

import os
from unittest import mock

import pytest

from intarsia_cpu import build


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory, worker_id):
    """Compiled kernels of this run, apart from the user's. Its processes share them."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder if worker_id == "master" else folder.parent) / "kernels"
    folder.mkdir(mode=0o700, exist_ok=True)
    with mock.patch.dict(os.environ, {build.CACHE_VARIABLE: str(folder)}):
        yield folder


@pytest.fixture(scope="module", params=build.supported())
def cpu_path(request):
    """Each way to compile kernels that this machine can run, in force for the test."""
    with mock.patch.dict(os.environ, {build.ISA_VARIABLE: request.param}):
        yield request.param
