"""Memory on huge pages."""

import gc
import mmap

import pytest
import torch

from intarsia_cpu.memory import HUGE_PAGE, empty


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (HUGE_PAGE // 8,), (3, HUGE_PAGE // 4 + 5)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.uint8])
def test_tensors_have_their_shape_and_hold_what_is_written(shape, dtype):
    tensor = empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
    tensor.copy_(torch.arange(tensor.numel()).view(shape) % 101)
    assert torch.equal(tensor, (torch.arange(tensor.numel()).view(shape) % 101).to(dtype))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system gives no huge pages")
def test_what_fills_half_a_huge_page_begins_at_one_and_goes_with_its_last_view():
    tensor = empty((HUGE_PAGE // 2,), torch.uint8)
    assert tensor.data_ptr() % HUGE_PAGE == 0
    view = tensor.fill_(7)[1000:2000]
    del tensor
    gc.collect()
    assert bool((view == 7).all())


@pytest.mark.parametrize("advice", [None, -1])
def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch, advice):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    if advice is not None:  # a kernel that knows of no such advice
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", advice, raising=False)
    assert empty((3 * HUGE_PAGE,), torch.uint8).fill_(1).sum() == 3 * HUGE_PAGE
