"""Mapped memory on a GPU: the driver's own, the storage over it, and engines whose memory follows their requests."""

import pytest
import torch

from gpu.parts import DEVICE
from gpu.test_engines import engine_of, greedy, prompts
from intarsia.errors import ExecutionError
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import CacheGroup, CacheLayout, CacheMove

pytestmark = pytest.mark.gpu

vmm = pytest.importorskip("intarsia_cuda.vmm")
PAGE = 16


def memory():
    from intarsia_cuda.driver import cuda_memory

    return cuda_memory(torch.cuda.current_device())


def books_of(device_memory, *, sequences=3, max_tokens=512, keep="0", order="PKSD"):
    """Books of a cache whose pages of 16 tokens take 2 MiB: a granule, where that is as large."""
    from intarsia_cuda.options import VmmOptions

    group = CacheGroup(kind="full", layers=(0, 1), num_kv_heads=8, head_dim=512)
    layout = CacheLayout(order=order, format="float32", entry_bytes=4, page_size=PAGE, groups=(group,))
    return vmm.VmmAllocator.of(
        VmmOptions(max_sequences=sequences, keep=keep),
        layout,
        max_tokens=max_tokens,
        num_pages=100,
        granule=device_memory.granule,
        open_memory=lambda: device_memory,
    )


def test_addresses_are_reserved_mapped_written_read_and_given_back():
    device_memory = memory()
    size = device_memory.granule
    assert size >= 1 << 16
    free = torch.cuda.mem_get_info()[0]
    address = device_memory.reserve(64 * size)
    assert torch.cuda.mem_get_info()[0] == free, "addresses take no memory"
    handle = device_memory.create(size)
    device_memory.map(address, size, handle)
    device_memory.set_access(address, size)
    tensor = device_memory.tensor(address, 64 * size)
    assert tensor.device.type == "cuda" and len(tensor) == 64 * size
    tensor[:size] = 7
    assert int(tensor[:size].sum(dtype=torch.int64)) == 7 * size
    device_memory.synchronize()
    device_memory.unmap(address, size)
    device_memory.map(address + 3 * size, size, handle)
    device_memory.set_access(address + 3 * size, size)
    assert bool((tensor[3 * size : 4 * size] == 7).all()), "memory keeps what it holds when it moves"
    device_memory.synchronize()
    device_memory.unmap(address + 3 * size, size)
    device_memory.release(handle)
    device_memory.free(address, 64 * size)


def test_a_refusal_of_the_driver_is_named():
    with pytest.raises(ExecutionError, match=r"cuda:\d+ refuses to give .*CUDA_ERROR_"):
        memory().create(1 << 60)


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
def test_tokens_are_read_back_from_memory_that_grew_moved_and_was_copied(order):
    books = books_of(memory(), order=order)
    storage = books.make_storage(books.num_page_ids, torch.device(DEVICE))
    idle = storage.num_bytes

    def run(name, count):
        assert books.reserve(name, (), count) is not None
        storage.move(books.take_moves())
        (table,) = books.pages(name)
        for layer in range(2):
            for page in table:
                storage.layer(layer).keys[page] = hash(name) % 1000 + 8 * page + layer
                storage.layer(layer).values[page] = -page - layer
        books.commit(name, [0] * count, count)
        return table

    first = run(("a", 0), 100)
    second = run(("b", 0), 200)
    assert books.fork(("a", 0), ("a", 1), 100)
    storage.move(books.take_moves())
    (forked,) = books.pages(("a", 1))
    for layer in range(2):
        view = storage.layer(layer)
        for page, copy in zip(first, forked, strict=True):
            assert torch.equal(view.keys[page], view.keys[copy]) and torch.equal(view.values[page], view.values[copy])
        for page in second:
            assert bool((view.values[page] == -page - layer).all())
    assert storage.num_bytes > idle
    for name in (("a", 0), ("b", 0), ("a", 1)):
        books.release(name)
    storage.move(books.take_moves())
    assert storage.num_bytes == idle
    storage.close()


def test_memory_comes_and_goes_on_the_device_itself():
    device_memory = memory()
    books = books_of(device_memory)
    storage = books.make_storage(books.num_page_ids, torch.device(DEVICE))
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    storage.move([CacheMove("map", granule) for granule in range(16)])
    taken = free - torch.cuda.mem_get_info()[0]
    assert taken >= 16 * device_memory.granule
    storage.move([CacheMove("unmap", granule) for granule in range(16)])
    assert torch.cuda.mem_get_info()[0] == free
    storage.close()


def test_an_engine_over_mapped_memory_chooses_the_same_ids_and_gives_memory_back(tmp_path):
    model = save_tiny_model(tmp_path / "model", layers=4)
    given = prompts((3, 70, 1, 16, 33, 64))
    plain = {"attention": "eager", "kernels": ["torch"], "runner": "eager"}
    with engine_of(model, poisoned=False, **plain) as engine:
        expected = [answer.token_ids for answer in engine.generate(given, greedy(24))]
    cache = {"use": "vmm", "memory": "512MiB", "keep": "0"}
    for sections in (plain, {}):
        with engine_of(model, poisoned=False, **{**sections, "cache": cache}) as engine:
            storage = engine.parts.executor._stage._cache
            idle = storage.num_bytes
            for _ in range(2):
                assert [answer.token_ids for answer in engine.generate(given, greedy(24))] == expected
                assert storage.num_bytes == idle
            engine.parts.cache.check_integrity()
