"""What the driver tells of a GPU, beside what torch tells of it."""

import pytest
import torch

pytestmark = pytest.mark.gpu

device = pytest.importorskip("intarsia_cuda.device")


def test_the_drivers_facts_are_those_that_torch_has():
    found, known = device.device_facts("cuda"), torch.cuda.get_device_properties(0)
    assert (found.name, found.capability) == (known.name, (known.major, known.minor))
    assert found.num_sms == known.multi_processor_count
    assert found.shared_per_sm == known.shared_memory_per_multiprocessor
    assert found.shared_per_block == known.shared_memory_per_block_optin <= found.shared_per_sm
    assert found.l2_bytes == known.L2_cache_size
    assert 0 < found.free_bytes <= found.total_bytes == torch.cuda.mem_get_info()[1]
    assert found.bytes_per_s is None or 1e11 < found.bytes_per_s < 1e14
    print(found.line())


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(Exception, match=r"(?i)device|ordinal"):
        device.device_facts("cuda:99")
