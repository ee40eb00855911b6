"""What needs an NVIDIA GPU. `make gpu-check` runs it; elsewhere every test says what is missing."""

import gc
import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if os.environ.get("TRITON_INTERPRET") != "0":
        pytest.skip("kernels run in Triton's interpreter here: TRITON_INTERPRET=0, as make gpu-check has it")
    yield
    gc.collect()
    torch.cuda.empty_cache()
