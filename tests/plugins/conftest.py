"""What tests of plugins share."""

import os
from unittest import mock

import pytest

from intarsia_cpu import build


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """Compiled kernels of this session, apart from the user's."""
    folder = tmp_path_factory.mktemp("kernels")
    folder.chmod(0o700)
    with mock.patch.dict(os.environ, {build.CACHE_VARIABLE: str(folder)}):
        yield folder


@pytest.fixture(scope="module", params=build.supported())
def cpu_path(request):
    """Each way to compile kernels that this machine can run, in force for the test."""
    with mock.patch.dict(os.environ, {build.ISA_VARIABLE: request.param}):
        yield request.param
