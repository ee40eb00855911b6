"""Swapping on a GPU: pages come back bit for bit while the device is at work, and engines say what they say alone."""

import pytest
import torch

from gpu.parts import DEVICE
from gpu.test_engines import engine_of, prompts
from intarsia import SamplingParams
from intarsia.models.cache import TensorCache
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import CacheGroup, CacheLayout, CacheMove

pytestmark = pytest.mark.gpu


def cache_of(order, fmt, num_pages=64, num_host_pages=64):
    group = CacheGroup(kind="full", layers=(0, 1, 2), num_kv_heads=4, head_dim=128)
    size = getattr(torch, fmt).itemsize
    layout = CacheLayout(
        order=order, format=fmt, entry_bytes=size, scale_bytes=4 * (fmt == "int8"), page_size=16, groups=(group,)
    )
    return TensorCache.allocate(layout, num_pages, torch.device(DEVICE), num_host_pages=num_host_pages)


def scribble(cache, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for layer in cache.layers:
        for tensor in layer.tensors:
            shape = (*tensor.shape, tensor.element_size())
            noise = torch.randint(256, shape, generator=generator, dtype=torch.uint8, device=DEVICE)
            tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))


def bits(cache):
    return [tensor.contiguous().view(torch.uint8).clone() for layer in cache.layers for tensor in layer.tensors]


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "int8"])
def test_pages_come_back_bit_for_bit_though_steps_overwrite_them_at_once(order, fmt):
    cache = cache_of(order, fmt)
    work = torch.randn(4096, 4096, device=DEVICE)
    order_out = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    for round_ in range(3):
        scribble(cache, round_)
        before = bits(cache)
        for _ in range(4):
            work = torch.nn.functional.normalize(work @ work)  # the device is busy when the copies are launched
        cache.move([CacheMove("swap_out", host, page) for host, page in enumerate(order_out)])
        cache.fill(0.0)  # what a step behind them writes
        for _ in range(4):
            work = torch.nn.functional.normalize(work @ work)
        cache.move([CacheMove("swap_in", page, host) for host, page in enumerate(order_out)])
        for was, now in zip(before, bits(cache), strict=True):
            assert torch.equal(was[:64], now[:64])
    torch.cuda.synchronize()
    num_bytes, seconds = cache.take_swapped()
    assert num_bytes == 3 * 2 * sum(b[:64].numel() for b in before) and seconds > 0
    assert cache.take_swapped() == (0, 0.0)
    cache.close()


def test_host_memory_is_locked_and_unlocked():
    for _ in range(2):
        cache = cache_of("PSKD", "bfloat16")
        assert all(tensor.is_pinned() for group in cache.host.host for tensor in group)
        locked = cache.host.host[0][0]
        cache.close()
        assert not locked.is_pinned()


def test_the_host_does_not_wait_for_what_it_swaps():
    cache = cache_of("PSKD", "bfloat16")
    swaps = [CacheMove(kind, page, page) for kind in ("swap_out", "swap_in") for page in range(64)]
    cache.move(swaps)  # whatever is made at first use
    torch.cuda.synchronize()
    begun = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)  # cycles: half a second or so
    begun.record()
    cache.move(swaps)
    assert not begun.query(), "the copies were launched while the device was at work before them"
    assert cache.take_swapped()[0] >= 0
    torch.cuda.synchronize()
    cache.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "sections", [{}, {"attention": "eager", "kernels": ["torch"], "runner": "eager"}], ids=["auto", "plain"]
)
def test_an_engine_that_swaps_chooses_the_ids_of_one_that_has_room(tmp_path, sections, depth):
    model = save_tiny_model(tmp_path / "model", layers=4)
    given = prompts((20, 20, 20, 20, 20, 20))
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=i) for i in range(6)]
    sections = sections | {"executor": {"use": "local", "depth": depth}}
    with engine_of(model, max_model_len=64, **sections) as engine:
        expected = [answer.token_ids for answer in engine.generate(given, params)]
        page = engine.explain()["memory"]["page"]
    cache = {"use": "paged", "memory": str(10 * page), "swap": "64MiB", "swap_when": "always"}
    with engine_of(model, max_model_len=64, **{**sections, "cache": cache}) as engine:
        assert [answer.token_ids for answer in engine.generate(given, params)] == expected
        figures = engine.stats()["preemption"]
        assert figures["swap"]["ins"] > 0 and figures["recomputed_tokens"] == 0
        assert figures["swap"]["bytes_per_s"] > 0
        engine.parts.cache.check_integrity()
