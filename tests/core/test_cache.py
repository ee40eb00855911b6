"""The cache's tensors: shapes by order and group, and the moves of a plan in their order.

Shape legend: P pages, S slots a page, K kv heads, D head dim.
"""

import pytest
import torch

from intarsia.models.cache import TensorCache
from intarsia.types import CacheGroup, CacheLayout, CacheMove

CPU = torch.device("cpu")


def layout(order="PSKD", fmt="float32"):
    """Two groups whose layers alternate and whose heads differ."""
    return CacheLayout(
        order=order,
        format=fmt,
        entry_bytes=getattr(torch, fmt).itemsize,
        page_size=4,
        groups=(
            CacheGroup(kind="full", layers=(0, 2), num_kv_heads=2, head_dim=8),
            CacheGroup(kind="window", layers=(1,), num_kv_heads=3, head_dim=6, window=5),
        ),
    )


def numbered(cache):
    """Give each page of each tensor a number of its own; return the tensors' contents, a page a number."""
    for i, layer in enumerate(cache.layers):
        for j, tensor in enumerate((layer.keys, layer.values)):
            for page in range(len(tensor)):
                tensor[page] = 100 * (2 * i + j) + page


def pages(tensor):
    flat = tensor.flatten(1)
    assert (flat == flat[:, :1]).all()
    return [int(number) % 100 for number in flat[:, 0]]


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
def test_each_layer_has_the_shape_of_its_group_and_one_spare_page(order, fmt):
    cache = TensorCache.allocate(layout(order, fmt), 5, CPU)
    for index, (heads, dim) in enumerate([(2, 8), (3, 6), (2, 8)]):
        shape = (6, 4, heads, dim) if order == "PSKD" else (6, heads, 4, dim)
        layer = cache.layer(index)
        assert layer.keys.shape == layer.values.shape == shape
        assert layer.keys.dtype == layer.values.dtype == getattr(torch, fmt)
        assert layer.keys.data_ptr() != layer.values.data_ptr()
    # The spare page is beside the pages that the layout counts.
    assert cache.num_bytes == 6 * layout(order, fmt).page_bytes


def test_in_pksd_the_keys_and_values_of_a_page_and_head_lie_side_by_side_and_in_pskd_apart():
    cache = TensorCache.allocate(layout("PKSD"), 5, CPU)
    for index, (heads, dim) in enumerate([(2, 8), (3, 6), (2, 8)]):
        layer, head = cache.layer(index), 4 * dim
        assert layer.keys.stride() == layer.values.stride() == (2 * heads * head, 2 * head, dim, 1)
        assert layer.values.data_ptr() - layer.keys.data_ptr() == head * layer.keys.element_size()
    layer = TensorCache.allocate(layout("PSKD"), 5, CPU).layer(0)
    assert layer.keys.is_contiguous() and layer.values.is_contiguous()


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
def test_keys_and_values_share_no_number(order):
    layer = TensorCache.allocate(layout(order), 5, CPU).layer(1)
    layer.keys.fill_(1)
    layer.values.fill_(2)
    assert (layer.keys == 1).all() and (layer.values == 2).all()


def test_a_copy_moves_a_page_of_every_layer_of_its_group_and_of_no_other():
    cache = TensorCache.allocate(layout(), 5, CPU)
    numbered(cache)
    cache.move([CacheMove("copy", 3, 1, group=0)])
    for index in (0, 2):
        assert pages(cache.layer(index).keys) == pages(cache.layer(index).values) == [0, 1, 2, 1, 4, 5]
    assert pages(cache.layer(1).keys) == pages(cache.layer(1).values) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
def test_keys_are_copied_to_keys_and_values_to_values(order):
    cache = TensorCache.allocate(layout(order), 5, CPU)
    numbered(cache)
    cache.move([CacheMove("copy", 3, 1)])
    for index in (0, 2):
        assert int(cache.layer(index).keys[3].max()) == 200 * index + 1
        assert int(cache.layer(index).values[3].min()) == 200 * index + 101


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
def test_moves_are_done_in_order(order):
    cache = TensorCache.allocate(layout(order), 5, CPU)
    numbered(cache)
    cache.move([CacheMove("copy", 3, 1), CacheMove("copy", 1, 2), CacheMove("copy", 4, 1), CacheMove("zero", 2)])
    assert pages(cache.layer(0).keys) == [0, 2, 0, 1, 2, 5]


def test_a_zeroed_page_is_zero_whatever_it_held():
    cache = TensorCache.allocate(layout(), 5, CPU)
    cache.fill(float("nan"))
    cache.move([CacheMove("zero", 1, group=1)])
    for tensor in (cache.layer(1).keys, cache.layer(1).values):
        assert (tensor[1] == 0).all() and tensor[[0, 2, 3, 4, 5]].isnan().all()
    assert cache.layer(0).keys.isnan().all()


def test_a_move_that_the_storage_cannot_do_is_not_passed_over():
    cache = TensorCache.allocate(layout(), 5, CPU)
    with pytest.raises(AssertionError, match="swap_out"):
        cache.move([CacheMove("swap_out", 0, 1)])


def test_fill_reaches_every_number_the_spare_page_included():
    cache = TensorCache.allocate(layout(), 5, CPU)
    cache.fill(float("nan"))
    assert all(tensor.isnan().all() for layer in cache.layers for tensor in (layer.keys, layer.values))
