"""Pages swapped between device and host memory: bit for bit, every layer of a group, in the order of a plan's moves.

Shape legend: P pages, S slots a page, K kv heads, D head dim.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_queues import LateQueues
from intarsia.errors import ExecutionError
from intarsia.models import device_streams, swapping
from intarsia.models.cache import TensorCache
from intarsia.models.device_streams import HostQueue, Queue
from intarsia.models.swapping import HostPages, as_words, batches, runs, staging_bytes
from intarsia.types import CacheGroup, CacheLayout, CacheMove

CPU = torch.device("cpu")
FORMATS = ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"]


def layout(order="PSKD", fmt="float32", page_size=4, head_dim=8):
    """Two groups whose layers alternate and whose heads differ."""
    return CacheLayout(
        order=order,
        format=fmt,
        entry_bytes=getattr(torch, fmt).itemsize,
        scale_bytes=4 if fmt == "int8" else 0,
        page_size=page_size,
        groups=(
            CacheGroup(kind="full", layers=(0, 2), num_kv_heads=2, head_dim=head_dim),
            CacheGroup(kind="window", layers=(1,), num_kv_heads=3, head_dim=6, window=5),
        ),
    )


def bits(cache):
    """Every byte of each layer's tensors, a list a page."""
    return [[t.contiguous().view(torch.uint8).flatten(1).clone() for t in layer.tensors] for layer in cache.layers]


def scribble(cache, seed):
    """Write random bytes everywhere: NaN and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        for tensor in layer.tensors:
            noise = torch.randint(256, (*tensor.shape, tensor.element_size()), generator=generator, dtype=torch.uint8)
            tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("page_size", "head_dim"), [(4, 8), (1, 1), (3, 5), (16, 64)])
def test_a_page_comes_back_bit_for_bit_with_its_scales_and_no_other_page_or_group_changes(
    order, fmt, page_size, head_dim
):
    cache = TensorCache.allocate(layout(order, fmt, page_size, head_dim), 6, CPU, num_host_pages=5)
    scribble(cache, 1)
    before = bits(cache)
    cache.move([CacheMove("swap_out", 4, 1), CacheMove("swap_out", 0, 5), CacheMove("swap_out", 1, 2)])
    assert all(
        torch.equal(a, b) for one, two in zip(before, bits(cache), strict=True) for a, b in zip(one, two, strict=True)
    )
    scribble(cache, 2)
    poisoned = bits(cache)
    cache.move([CacheMove("swap_in", 3, 4), CacheMove("swap_in", 5, 0)])
    for index, (was, poison, now) in enumerate(zip(before, poisoned, bits(cache), strict=True)):
        moved = {3: 1, 5: 5} if index in (0, 2) else {}
        for a, b, c in zip(was, poison, now, strict=True):
            for page in range(7):
                assert torch.equal(c[page], a[moved[page]] if page in moved else b[page])


def test_groups_have_host_pages_of_their_own():
    cache = TensorCache.allocate(layout(), 4, CPU, num_host_pages=2)
    scribble(cache, 1)
    before = bits(cache)
    cache.move([CacheMove("swap_out", 0, 1, group=0), CacheMove("swap_out", 0, 2, group=1)])
    scribble(cache, 2)
    cache.move([CacheMove("swap_in", 3, 0, group=1), CacheMove("swap_in", 3, 0, group=0)])
    now = bits(cache)
    for index, source in ((0, 1), (1, 2), (2, 1)):
        assert all(torch.equal(c[3], a[source]) for a, c in zip(before[index], now[index], strict=True))


def test_swaps_copies_and_zeros_are_done_in_order():
    cache = TensorCache.allocate(layout(), 5, CPU, num_host_pages=3)
    for layer in cache.layers:
        for tensor in layer.tensors:
            for page in range(6):
                tensor[page] = page
    cache.move(
        [
            CacheMove("copy", 4, 1),
            CacheMove("swap_out", 0, 4),  # what was copied just now
            CacheMove("zero", 4),
            CacheMove("swap_out", 1, 4),
            CacheMove("swap_in", 3, 0),
            CacheMove("swap_out", 0, 2),  # the host page is used again
            CacheMove("swap_out", 0, 3),  # and again
            CacheMove("swap_in", 2, 1),
            CacheMove("swap_in", 2, 0),
            CacheMove("copy", 1, 2),
        ]
    )
    assert [int(page.max()) for page in cache.layer(0).keys] == [0, 1, 1, 1, 0, 5]


def test_many_pages_pass_through_small_buffers(monkeypatch):
    monkeypatch.setattr(swapping, "_STAGING", 1)  # a page of a layer, and no more
    facts = layout("PKSD", "int8")
    assert staging_bytes(facts) == 2 * 256  # 2 x 3 heads x (6 + 4 bytes) x 4 slots, in lines of 64
    cache = TensorCache.allocate(facts, 40, CPU, num_host_pages=40)
    scribble(cache, 1)
    before = bits(cache)
    order = random.Random(0).sample(range(40), 40)
    cache.move([CacheMove("swap_out", host, page) for host, page in enumerate(order)])
    scribble(cache, 2)
    cache.move([CacheMove("swap_in", page, host) for host, page in enumerate(order)])
    for index in (0, 2):
        assert all(torch.equal(a[:40], c[:40]) for a, c in zip(before[index], bits(cache)[index], strict=True))


def test_what_was_copied_and_how_long_it_took_is_told_once():
    facts = layout()
    cache = TensorCache.allocate(facts, 4, CPU, num_host_pages=2)
    assert cache.take_swapped() == (0, 0.0)
    cache.move([CacheMove("swap_out", 0, 1), CacheMove("swap_out", 1, 2), CacheMove("swap_in", 1, 0)])
    num_bytes, seconds = cache.take_swapped()
    # Two layers of the group, keys and values: 2 x 2 heads x 8 numbers x 4 bytes x 4 slots, three pages.
    assert num_bytes == 3 * 2 * 2 * 2 * 8 * 4 * 4 and 0 < seconds < 10
    assert cache.take_swapped() == (0, 0.0)
    cache.move([CacheMove("copy", 0, 1)])
    assert cache.take_swapped() == (0, 0.0)
    assert TensorCache.allocate(facts, 4, CPU).take_swapped() == (0, 0.0)


def test_host_memory_is_none_of_the_device_and_goes_with_the_cache():
    facts = layout()
    cache = TensorCache.allocate(facts, 4, CPU, num_host_pages=100)
    assert cache.num_bytes == 5 * facts.page_bytes
    cache.close()
    cache.close()


def test_host_memory_that_is_not_there_is_refused_by_the_option_that_asked_for_it():
    with pytest.raises(ExecutionError, match=r"cache\.swap: \d+ bytes of host memory cannot be had") as refused:
        HostQueue().host_memory(1 << 60)
    assert refused.value.field == "cache.swap"


# --- words, batches and runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "head_dim", "word"), [
    ("bfloat16", 64, torch.int64), ("int8", 12, torch.int32), ("float16", 3, torch.int16), ("int8", 5, torch.uint8),
])  # fmt: skip
def test_numbers_are_copied_as_the_widest_words_that_fit(fmt, head_dim, word):
    tensor = torch.arange(2 * 4 * head_dim).view(2, 4, head_dim).to(getattr(torch, fmt))
    assert as_words(tensor).dtype is word
    assert as_words(tensor[:, :, 1:]).dtype.itemsize <= word.itemsize
    assert torch.equal(as_words(tensor).view(tensor.dtype), tensor)


@given(st.lists(st.integers(0, 6)))
def test_runs_lay_pages_end_to_end_again(pages):
    found = [] if not pages else list(runs(pages))
    assert [page for _, run in found for page in range(run.start, run.stop)] == pages
    assert [i for part, _ in found for i in range(part.start, part.stop)] == list(range(len(pages)))


moves = st.builds(
    CacheMove, st.sampled_from(["swap_out", "swap_in"]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)
)


@given(st.lists(moves, max_size=12))
def test_batches_keep_the_order_and_write_no_page_twice(given_moves):
    found = list(batches(given_moves))
    assert [move for batch in found for move in batch] == given_moves
    for batch in found:
        assert len({(move.kind, move.group) for move in batch}) == 1
        assert len({move.target for move in batch}) == len(batch)


# --- beside the steps -------------------------------------------------------------------------------------------------


class Program:
    """Swaps among steps that write pages and read them, against a model that does each at once."""

    def __init__(self, queues, num_pages=5, num_host_pages=3):
        self.queues = queues
        self.tensors = [torch.zeros(num_pages, 4, dtype=torch.int64), torch.zeros(num_pages, 2, 2, dtype=torch.int32)]
        page_bytes = 32
        self.host = HostPages.allocate([self.tensors], num_host_pages, 2 * 2 * page_bytes, queues)
        self.device, self.hosted = [0] * num_pages, [None] * num_host_pages
        self.read, self.expected, self.count = [], [], 0

    def write(self, page):
        self.count += 1
        value = self.count

        def work():
            for tensor in self.tensors:
                tensor[page] = value

        self.queues.launch(Queue.COMPUTE, work)
        self.device[page] = value

    def look(self, page):
        self.queues.launch(
            Queue.COMPUTE, lambda: self.read.append([int(n) for t in self.tensors for n in t[page].unique()])
        )
        self.expected.append([self.device[page]] * 2)

    def swap(self, kind, pairs):
        pairs = [(t, s) for t, s in pairs if kind == "swap_out" or self.hosted[s] is not None]
        self.host.move([CacheMove(kind, target, source) for target, source in pairs])
        for target, source in pairs:
            if kind == "swap_out":
                self.hosted[target] = self.device[source]
            else:
                self.device[target] = self.hosted[source]

    def finish(self):
        for page in range(len(self.device)):
            self.look(page)
        self.host.close()
        return self.read == self.expected


def run_program(draw, *, ignored=None):
    """Draw a program and an order of its work; return whether every read saw what it should."""
    queues = LateQueues(lambda: draw(1), ignored=ignored)
    program = Program(queues)
    for _ in range(draw(14)):
        match draw(3):
            case 0:
                program.write(draw(4))
            case 1:
                program.look(draw(4))
            case 2:
                program.swap("swap_out", [(draw(2), draw(4)) for _ in range(1 + draw(4))])
            case 3:
                program.swap("swap_in", [(draw(4), draw(2)) for _ in range(1 + draw(4))])
        queues.run(draw(2))
    return program.finish() and queues.is_closed


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_copies_beside_the_steps_never_overtake_what_they_depend_on(data):
    assert run_program(lambda most: data.draw(st.integers(0, most)))


def run_seeded(seed, **options):
    chance = random.Random(seed)
    return run_program(lambda most: chance.randint(0, most), **options)


@pytest.mark.parametrize("queue", Queue)
def test_that_a_queue_does_not_wait_would_be_seen(queue):
    assert not all(run_seeded(seed, ignored=queue) for seed in range(200))
    assert all(run_seeded(seed) for seed in range(200))


def test_a_step_does_not_wait_for_what_is_swapped_out():
    """The copy is left for last: the step overwrites the page meanwhile."""
    queues = LateQueues(lambda: 0)
    program = Program(queues)
    program.write(1)
    program.swap("swap_out", [(0, 1)])
    program.write(1)
    program.look(1)
    queues.run()
    copies = [i for i, queue in enumerate(queues.order) if queue is Queue.COPY]
    assert (
        queues.order[0] is Queue.COMPUTE
        and len(copies) == 2
        and copies == [len(queues.order) - 2, len(queues.order) - 1]
    )
    program.swap("swap_in", [(2, 0)])
    program.device[2] = 1
    assert program.finish()


def test_copies_that_are_not_over_are_told_of_later():
    queues = LateQueues(lambda: 0)
    program = Program(queues)
    program.swap("swap_out", [(0, 1), (1, 2)])
    assert program.host.take_swapped() == (0, 0.0)
    queues.run()
    num_bytes, seconds = program.host.take_swapped()
    assert num_bytes == 2 * (32 + 16) and seconds > 0


# --- CUDA's streams, by a double --------------------------------------------------------------------------------------


class FakeRuntime:
    """CUDA's runtime as far as it is called: memory is locked once, and unlocked where it was."""

    def __init__(self, refuses=False):
        self.locked, self.refuses = {}, refuses

    def cudaHostRegister(self, address, size, flags):
        if self.refuses:
            return 2
        assert address not in self.locked and flags == 0
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


class FakeStream:
    def __init__(self, device):
        self.synchronized, self.waited = 0, []

    def synchronize(self):
        self.synchronized += 1

    def wait_event(self, event):
        self.waited.append(event)


@pytest.fixture
def cuda(monkeypatch):
    """Just enough of torch.cuda for the streams to be made on a machine without a GPU."""
    import contextlib
    import types

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.stream, self.is_over = None, False

        def record(self, stream):
            self.stream = stream

        def query(self):
            return self.is_over

        def elapsed_time(self, end):
            return 250.0

    class CudaError(RuntimeError):
        def __init__(self, code):
            super().__init__(f"out of memory ({code})")

    main, current = FakeStream(None), []

    @contextlib.contextmanager
    def stream(which):
        current.append(which)
        yield
        current.pop()

    runtime = FakeRuntime()
    fake = types.SimpleNamespace(
        Stream=FakeStream, Event=Event, CudaError=CudaError, stream=stream,
        current_stream=lambda device: main, cudart=lambda: runtime, device=lambda device: contextlib.nullcontext(),
    )  # fmt: skip
    monkeypatch.setattr(device_streams.torch, "cuda", fake)
    return types.SimpleNamespace(main=main, current=current, runtime=runtime)


def test_work_and_events_go_to_the_stream_of_their_queue_and_memory_is_unlocked_after_the_copies(cuda):
    streams = device_streams.CudaStreams(torch.device("cuda", 1))
    seen = []
    for queue in Queue:
        streams.launch(queue, lambda: seen.append(cuda.current[-1]))
    compute, copies = seen
    assert compute is cuda.main and copies is not cuda.main
    begin, end = streams.record(Queue.COPY), streams.record(Queue.COPY)
    assert begin.stream is end.stream is copies and streams.record(Queue.COMPUTE).stream is compute
    streams.wait(Queue.COMPUTE, end)
    assert compute.waited == [end] and copies.waited == []
    assert streams.seconds(begin, end) is None
    end.is_over = True
    assert streams.seconds(begin, end) == 0.25
    memory = streams.host_memory(1000)
    assert cuda.runtime.locked == {memory.data_ptr(): 1000}
    streams.close()
    assert cuda.runtime.locked == {} and copies.synchronized == 1
    streams.close()


def test_memory_that_cannot_be_locked_is_refused_by_the_option_that_asked_for_it(cuda):
    cuda.runtime.refuses = True
    with pytest.raises(
        ExecutionError, match=r"cache\.swap: 64 bytes of host memory cannot be had \(out of memory \(2\)\)"
    ):
        device_streams.CudaStreams(torch.device("cuda")).host_memory(64)
