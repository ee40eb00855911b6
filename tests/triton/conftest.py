"""Kernels run in Triton's interpreter here, on CPU tensors: see the top of tests/conftest.py."""

import os

import pytest


@pytest.fixture(autouse=True)
def _interpreted():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("these tests run in Triton's interpreter: TRITON_INTERPRET=1")
