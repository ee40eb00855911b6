"""The cache `vmm`: memory follows the sequences, no token is lost, and the driver's rules hold, whatever the calls."""

from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from intarsia.errors import CompositionError, ConfigError, ExecutionError
from intarsia.testing.allocators import AllocatorContract
from intarsia.testing.memory import simulated_layout
from intarsia.types import CacheGroup, CacheLayout, CacheMove
from intarsia_cuda.options import VmmOptions
from intarsia_cuda.pages import GroupPages, Regions, Runs
from intarsia_cuda.vmm import GONE, VmmAllocator
from virtual_memory import FakeMemory, vmm_plugin

CPU = torch.device("cpu")


def layout(page_size=4, windows=(None,), *, order="PSKD", fmt="float32", layers=1, kv_heads=1, head_dim=4):
    entry = getattr(torch, fmt).itemsize
    groups = tuple(
        CacheGroup(
            kind="full" if window is None else "window",
            layers=tuple(range(i, layers * len(windows), len(windows))),
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
        )
        for i, window in enumerate(windows)
    )
    return CacheLayout(
        order=order, format=fmt, entry_bytes=entry, scale_bytes=4 * (fmt == "int8"), page_size=page_size, groups=groups
    )


def books_of(memory=None, *, lay=None, max_tokens=24, num_pages=40, sequences=3, keep="0"):
    """Books whose budget is given in granules of pages: pages here are padded far beyond what they hold."""
    memory, lay = memory or FakeMemory(), lay or layout()
    options = VmmOptions(page_size=lay.page_size, max_sequences=sequences, keep=keep, memory="1MiB")
    regions = Regions.of(lay, memory.granule, max_tokens, sequences)
    # The spare page takes one besides.
    pages = (num_pages + 1) * regions.page_bytes // lay.page_bytes - 1
    return VmmAllocator.of(
        options, lay, max_tokens=max_tokens, num_pages=pages, granule=memory.granule, open_memory=lambda: memory
    )


def run(books, name, num_tokens):
    found = books.reserve((name, 0), (), num_tokens)
    if found is not None:
        books.commit((name, 0), [0] * num_tokens, num_tokens)
    books.check_integrity()
    return found


def kinds(moves):
    return [(move.kind, move.target) for move in moves]


class TestContract(AllocatorContract):
    options: ClassVar = {"max_sequences": 6, "keep": "2KiB", "memory": "1MiB"}

    def provider(self):
        return vmm_plugin()[1].provide_cache_allocators()[0]

    def build(self, *, page_size=4, windows=(None,), num_pages=0, num_host_pages=0):
        """Pages here are padded far beyond what they hold: give as many as the suite means."""
        lay = simulated_layout(page_size, windows)
        padded = Regions.of(lay, FakeMemory().granule, self.max_len, 6).page_bytes
        pages = num_pages or self.num_pages[page_size]
        return super().build(page_size=page_size, windows=windows, num_pages=(pages + 1) * padded // lay.page_bytes + 8)


# --- how pages lie ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granule", [512, 1024, 4096, 1 << 21])
@pytest.mark.parametrize("head_dim", [1, 7, 64])
def test_a_region_begins_at_a_granule_and_at_a_page(granule, head_dim):
    lay = layout(5, (None, 3), layers=3, kv_heads=3, head_dim=head_dim, fmt="bfloat16")
    regions = Regions.of(lay, granule, 33, 4)
    for group in regions.groups:
        assert regions.region_pages * group.page_bytes % granule == 0
        assert group.page_bytes >= 5 * 3 * 2 * 3 * head_dim * 2
    assert regions.region_pages * 5 >= 33


def test_a_page_of_all_layers_of_an_8b_model_is_one_granule_of_a_gpu():
    lay = layout(16, layers=32, kv_heads=8, head_dim=128, fmt="bfloat16")
    assert GroupPages.of(lay, lay.groups[0], 1 << 21).page_bytes == 1 << 21


def test_granules_of_pages_and_whole_pages_of_granules():
    group = GroupPages(Runs((), (), 0, 0), page_bytes=1536, granule=1024)
    assert [group.granules(range(n)) for n in (0, 1, 2, 4)] == [range(0), range(2), range(3), range(6)]
    assert group.granules(range(2, 3)) == range(3, 5)
    assert group.whole_pages(range(2)) == range(1) and group.whole_pages(range(1, 3)) == range(1, 2)
    assert len(group.whole_pages(range(1, 2))) == 0


# --- memory follows sequences -----------------------------------------------------------------------------------------


def test_memory_is_mapped_as_a_sequence_grows_and_no_sooner():
    books = books_of()
    seen = []
    for end in range(1, 13):
        run(books, "a", end)
        seen.append(kinds(books.take_moves()))
    assert seen == [[("map", end // 4)] if end % 4 == 1 else [] for end in range(1, 13)]
    assert books.pages(("a", 0)) == ((0, 1, 2),)


def test_sequences_lie_apart_each_in_one_piece():
    books = books_of()
    for name in "abc":
        run(books, name, 9)
    tables = [books.pages((name, 0))[0] for name in "abc"]
    assert [len(table) for table in tables] == [3, 3, 3]
    assert all(table == tuple(range(table[0], table[0] + 3)) for table in tables)
    assert len({page for table in tables for page in table}) == 9
    assert books.reserve(("d", 0), (), 1) is None, "all regions are taken"


def test_without_keep_memory_goes_back_at_once():
    books = books_of()
    run(books, "a", 9)
    books.take_moves()
    books.release(("a", 0))
    assert sorted(kinds(books.take_moves())) == [("unmap", 0), ("unmap", 1), ("unmap", 2)]
    assert books.stats().used == books.stats().cached == 0


def test_what_is_kept_is_used_again_without_a_call_to_the_device():
    books = books_of(keep="1KiB")  # two granules
    run(books, "a", 9)
    books.take_moves()
    books.release(("a", 0))
    assert kinds(books.take_moves()) == [("unmap", 2)]
    assert books.stats().cached == 2
    run(books, "b", 8)
    assert books.take_moves() == () and books.pages(("b", 0)) == ((0, 1),)


def test_idle_memory_goes_to_whoever_needs_it_its_end_first():
    books = books_of(num_pages=6, keep="1MiB")
    run(books, "a", 12)
    run(books, "b", 12)
    books.release(("a", 0))
    books.take_moves()
    assert books.stats().cached == 3
    assert run(books, "b", 20) == 12
    assert kinds(books.take_moves()) == [("unmap", 1), ("unmap", 2), ("map", 9), ("map", 10)]
    assert run(books, "c", 4) == 0
    assert books.take_moves() == (), "what is left of a's memory serves c"


def test_a_reservation_that_does_not_fit_changes_nothing():
    books = books_of(num_pages=6)
    run(books, "a", 16)
    books.take_moves()
    before = books.stats(), books.pages(("a", 0))
    assert books.reserve(("b", 0), (), 16) is None
    assert books.reserve(("a", 0), (), 25) is None, "beyond the region"
    assert (books.stats(), books.pages(("a", 0))) == before and books.take_moves() == ()
    books.check_integrity()
    assert run(books, "b", 8) == 0


def test_capacity_counts_whole_granules_and_regions():
    memory = FakeMemory(granule=2048)  # four pages
    books = books_of(memory, num_pages=19, sequences=3, max_tokens=32)
    assert books.num_granules == 4
    assert [books.capacity(n) for n in (1, 16, 17, 32, 33)] == [3, 3, 2, 2, 0]


def test_rewinding_keeps_a_granule_for_the_next_tokens():
    books = books_of()
    run(books, "a", 20)
    books.take_moves()
    books.rewind(("a", 0), 5)
    assert books.pages(("a", 0)) == ((0, 1),)
    assert kinds(books.take_moves()) == [("unmap", 3), ("unmap", 4)]
    assert books.reserve(("a", 0), (), 12) == 5
    assert books.take_moves() == ()
    books.check_integrity()


def test_a_window_unmaps_what_nothing_reads_again():
    books = books_of(lay=layout(windows=(None, 6)), max_tokens=60, num_pages=80)
    for end in range(1, 31):
        run(books, "a", end)
        full, window = books.pages(("a", 0))
        first_visible = max(0, end - 6 + 1)
        assert GONE not in full and len(full) == len(window)
        assert all((page == GONE) == ((i + 1) * 4 <= first_visible) for i, page in enumerate(window))
    mapped = [0, 0]
    for move in books.take_moves():
        mapped[move.group] += {"map": 1, "unmap": -1}[move.kind]
    assert mapped == [8, 2]


def test_a_fork_copies_into_memory_of_its_own_after_it_is_mapped():
    books = books_of()
    run(books, "a", 6)
    books.take_moves()
    assert books.fork(("a", 0), ("a", 1), 6)
    child = books.pages(("a", 1))[0]
    assert books.take_moves() == (
        CacheMove("map", child[0]),
        CacheMove("map", child[1]),
        CacheMove("copy", child[0], 0),
        CacheMove("copy", child[1], 1),
    )
    assert books.reserve(("a", 1), (), 7) == 6
    books.check_integrity()


def test_what_a_window_has_left_behind_cannot_be_forked():
    books = books_of(lay=layout(windows=(None, 4)), max_tokens=40, num_pages=80)
    for end in (6, 16):
        run(books, "a", end)
    books.take_moves()
    assert not books.fork(("a", 0), ("a", 1), 5)
    assert books.take_moves() == ()
    assert books.fork(("a", 0), ("a", 1), 15)
    books.check_integrity()


def test_check_integrity_finds_a_lost_granule_and_a_lost_region():
    lost = books_of()
    run(lost, "a", 9)
    lost._held["a", 0].region.mapped[0] = range(2)
    gone = books_of()
    gone._idle.pop()
    for books in (lost, gone):
        with pytest.raises(AssertionError, match="lost"):
            books.check_integrity()


def test_books_that_hold_not_one_sequence_say_what_would_do():
    with pytest.raises(CompositionError, match=r"cache.memory: '1MiB' is .* pieces of 512, .* takes 1024 bytes more"):
        books_of(num_pages=4)
    books_of(num_pages=6)


def test_more_addresses_than_there_are_are_refused_with_what_fits():
    memory = FakeMemory(granule=1 << 21)
    lay = layout(16, layers=80, kv_heads=8, head_dim=128, fmt="bfloat16")
    with pytest.raises(CompositionError, match=r"cache.max_sequences: 4096 .* what would do: cache.max_sequences = 20"):
        books_of(memory, lay=lay, max_tokens=1 << 20, num_pages=1 << 20, sequences=4096)


@pytest.mark.parametrize(("name", "value"), [("keep", "much"), ("keep", "-1"), ("max_sequences", 0)])
def test_a_wrong_option_is_named(name, value):
    with pytest.raises((ConfigError, ValueError), match=name):
        VmmOptions(**{name: value})


# --- the storage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "int8"])
def test_layers_have_the_axes_of_the_order_and_share_no_byte(order, fmt):
    memory = FakeMemory(granule=1024)
    lay = layout(3, (None, 5), order=order, fmt=fmt, layers=3, kv_heads=2, head_dim=5)
    books = books_of(memory, lay=lay, max_tokens=30, num_pages=100, sequences=2)
    storage = books.make_storage(books.num_page_ids + 2, CPU)
    spare = books.num_page_ids + 2
    taken = {}
    for index in range(6):
        layer = storage.layer(index)
        shape = (spare + 1, 3, 2, 5) if order == "PSKD" else (spare + 1, 2, 3, 5)
        assert layer.keys.shape == layer.values.shape == shape and layer.keys.dtype == getattr(torch, fmt)
        assert layer.keys.stride() == layer.values.stride() and layer.keys.stride(-1) == 1
        scales = [s for s in (layer.key_scales, layer.value_scales) if s is not None]
        assert [s.shape for s in scales] == ([shape[:3]] * 2 if fmt == "int8" else [])
        for tensor in (layer.keys, layer.values, *scales):
            # Number every entry of the spare page; what shares a byte with another would not read back.
            taken[id(tensor)] = tensor, torch.randint(1, 90, shape[1 : tensor.ndim]).to(tensor.dtype)
            tensor[spare] = taken[id(tensor)][1]
    assert all(torch.equal(tensor[spare], numbers) for tensor, numbers in taken.values())
    assert all((layer.keys.data_ptr() - storage.layer(0).keys.data_ptr()) % 16 == 0 for layer in storage.layers[::2])
    memory.check()
    storage.close()
    storage.close()
    memory.assert_clean()


def test_pages_behind_the_regions_and_the_spare_page_always_have_memory():
    memory = FakeMemory()
    books = books_of(memory)
    storage = books.make_storage(books.num_page_ids + 3, CPU)
    assert storage.num_bytes == 4 * 512
    for page in range(books.num_page_ids, books.num_page_ids + 4):
        storage.layer(0).keys[page] = 1.0
    memory.check()
    assert (storage.layer(0).values[-1] == 0).all(), "what padded tokens read is a number"


def test_moves_are_done_in_order_and_access_is_set_by_stretches():
    memory = FakeMemory()
    books = books_of(memory)
    storage = books.make_storage(books.num_page_ids, CPU)
    memory.calls.clear()
    storage.move([CacheMove("map", granule) for granule in (4, 2, 3, 8)])
    assert memory.calls.count("set_access") == 2 and memory.calls.count("map") == 4
    storage.layer(0).keys[2] = 5.0
    storage.move([CacheMove("copy", 8, 2), CacheMove("zero", 2), CacheMove("unmap", 8), CacheMove("map", 9)])
    assert (storage.layer(0).keys[2] == 0).all()
    assert memory.calls.count("create") == 4, "the memory of 8 went to 9"
    memory.check()


def test_what_a_copy_reads_is_not_unmapped_before_it_is_done():
    memory = FakeMemory()
    books = books_of(memory)
    storage = books.make_storage(books.num_page_ids, CPU)
    run(books, "a", 4)
    storage.move(books.take_moves())
    storage.layer(0).keys[0] = 5.0
    assert books.fork(("a", 0), ("a", 1), 4)
    books.release(("a", 0))
    memory.calls.clear()
    synchronize = memory.synchronize
    memory.synchronize = lambda: (memory.calls.append("synchronize"), synchronize())
    moves = books.take_moves()
    assert [move.kind for move in moves] == ["map", "copy", "unmap"]
    storage.move(moves)
    assert memory.calls == ["create", "map", "set_access", "synchronize", "unmap", "release"]


def test_a_page_moves_with_all_its_layers_and_scales():
    memory = FakeMemory()
    lay = layout(2, fmt="int8", order="PKSD", layers=3, kv_heads=2)
    books = books_of(memory, lay=lay, num_pages=100)
    storage = books.make_storage(books.num_page_ids, CPU)
    storage.move([CacheMove("map", granule) for granule in range(8)])
    for index, layer in enumerate(storage.layers):
        layer.keys[1], layer.values[1], layer.key_scales[1], layer.value_scales[1] = index, index + 10, 0.5, index
    storage.move([CacheMove("copy", 3, 1)])
    for index, layer in enumerate(storage.layers):
        assert (layer.keys[3] == index).all() and (layer.values[3] == index + 10).all()
        assert (layer.key_scales[3] == 0.5).all() and (layer.value_scales[3] == index).all()


@pytest.mark.parametrize("failing", ["create", "map", "set_access"])
def test_a_device_that_refuses_loses_nothing(failing):
    memory = FakeMemory()
    books = books_of(memory)
    storage = books.make_storage(books.num_page_ids, CPU)
    run(books, "a", 9)
    memory.failing = failing
    with pytest.raises(ExecutionError, match=f"refuses to {failing}"):
        storage.move(books.take_moves())
    memory.failing = None
    storage.close()
    memory.assert_clean()


@pytest.mark.parametrize("failing", ["reserve", "create", "map", "set_access"])
def test_a_storage_that_cannot_be_opened_leaves_nothing(failing):
    memory = FakeMemory()
    books = books_of(memory, lay=layout(windows=(None, 6)), num_pages=80)
    memory.failing = failing
    with pytest.raises(ExecutionError):
        books.make_storage(books.num_page_ids, CPU)
    memory.failing = None
    memory.assert_clean()


def test_fill_reaches_every_page_that_has_memory_and_no_other():
    memory = FakeMemory(granule=1024)
    books = books_of(memory)
    storage = books.make_storage(books.num_page_ids, CPU)
    storage.move([CacheMove("map", 0), CacheMove("map", 1), CacheMove("map", 5)])
    storage.fill(3.0)
    for page in (0, 1, 2, 3, 10, 11, -1):
        assert (storage.layer(0).keys[page] == 3).all() and (storage.layer(0).values[page] == 3).all()
    memory.check()


# --- whatever happens -------------------------------------------------------------------------------------------------


class Cache(RuleBasedStateMachine):
    """Any calls in any order: every token is read back from its slot, and no rule of the driver is broken."""

    @initialize(
        page_size=st.integers(1, 4),
        windows=st.sampled_from([(None,), (None, 3), (7, 2)]),
        granule=st.sampled_from([256, 512, 2048]),
        budget=st.integers(0, 20),
        keep=st.sampled_from(["0", "2KiB", "1MiB"]),
        sequences=st.integers(1, 4),
    )
    def begin(self, page_size, windows, granule, budget, keep, sequences):
        self.memory = FakeMemory(granule)
        lay = layout(page_size, windows, layers=2, head_dim=2)
        least = Regions.of(lay, granule, 12, 1).region_pages
        self.books = books_of(
            self.memory, lay=lay, max_tokens=12, num_pages=least + budget + 8, sequences=sequences, keep=keep
        )
        self.storage = self.books.make_storage(self.books.num_page_ids, CPU)
        self.always = len(self.memory.handles)
        self.layout, self.tokens, self.names, self.token = lay, {}, 0, 0

    def name(self):
        self.names += 1
        return (f"s{self.names}", 0)

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.tokens))) if self.tokens else None

    def write(self, name, count):
        """Run the next tokens: their keys and values go to their slots."""
        start, size = len(self.tokens[name]), self.layout.page_size
        self.storage.move(self.books.take_moves())
        for position in range(start, start + count):
            self.token += 1
            self.tokens[name].append(self.token)
            for table, group in zip(self.books.pages(name), self.layout.groups, strict=True):
                for layer in group.layers:
                    at = table[position // size], position % size
                    self.storage.layer(layer).keys[at] = self.token + layer / 8
                    self.storage.layer(layer).values[at] = -self.token - layer / 8
        self.books.commit(name, self.tokens[name], start + count)

    @rule(count=st.integers(1, 14))
    def enter(self, count):
        name = self.name()
        before = self.books.stats()
        if self.books.reserve(name, (), count) is None:
            assert self.books.stats() == before
            return
        self.tokens[name] = []
        self.write(name, count)

    @rule(data=st.data(), count=st.integers(1, 4), ahead=st.integers(0, 3))
    def go_on(self, data, count, ahead):
        name = self.pick(data)
        if name is None:
            return
        held = len(self.tokens[name])
        if self.books.reserve(name, (), held + count + ahead) is None:
            return
        self.write(name, count)
        self.books.rewind(name, held + count)

    @rule(data=st.data())
    def fork(self, data):
        name, child = self.pick(data), self.name()
        if name is None:
            return
        count = data.draw(st.integers(0, len(self.tokens[name])))
        if self.books.fork(name, child, count):
            self.tokens[child] = self.tokens[name][:count]

    @rule(data=st.data())
    def release(self, data):
        name = self.pick(data)
        if name is not None:
            del self.tokens[name]
            self.books.release(name)
            self.books.release(name)

    @rule()
    def step(self):
        self.storage.move(self.books.take_moves())
        self.memory.check()
        assert self.storage.num_bytes == (self.books._num_mapped + self.always) * self.memory.granule

    @rule(data=st.data())
    def every_token_that_can_be_seen_is_in_its_slot(self, data):
        self.storage.move(self.books.take_moves())
        name, size = self.pick(data), self.layout.page_size
        if name is None:
            return
        held = self.tokens[name]
        for table, group in zip(self.books.pages(name), self.layout.groups, strict=True):
            first = 0 if group.window is None else max(0, len(held) - group.window + 1)
            for position in range(first, len(held)):
                at = table[position // size], position % size
                for layer in group.layers:
                    expected = held[position] + layer / 8
                    assert (self.storage.layer(layer).keys[at] == expected).all()
                    assert (self.storage.layer(layer).values[at] == -expected).all()

    @invariant()
    def adds_up(self):
        if hasattr(self, "books"):
            self.books.check_integrity()
            stats = self.books.stats()
            assert stats.used + stats.free + stats.cached == stats.num_pages and min(stats.free, stats.cached) >= 0
            assert self.memory.peak <= self.books.num_granules + self.always + 1
            if not self.tokens:
                assert stats.used == 0

    def teardown(self):
        if hasattr(self, "storage"):
            self.storage.close()
            self.memory.assert_clean()


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
