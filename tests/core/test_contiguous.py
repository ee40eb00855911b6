"""The naive cache's books: nothing is lost, owned twice, or copied wrongly, whatever the calls."""

import pytest

from intarsia.defaults import provide_cache_allocators
from intarsia.defaults.contiguous import build
from intarsia.protocols import CacheContext
from intarsia.testing.allocators import AllocatorContract
from intarsia.types import AttentionSpec, CacheGroup, CacheLayout, DecoderSpec, EngineOptions, LayerSpec, MlpSpec

PAGE = 4


def layout(num_groups=1):
    groups = tuple(CacheGroup(kind="full", layers=(i,), num_kv_heads=1, head_dim=2) for i in range(num_groups))
    return CacheLayout(order="PSKD", format="float32", entry_bytes=4, page_size=PAGE, groups=groups)


def allocator(*, num_pages=12, max_model_len=10, num_groups=1):
    layer = LayerSpec(AttentionSpec(1, 1, 2, 1.0, None), MlpSpec(2, "silu"))
    spec = DecoderSpec("llama", 4, 2, 64, 1e-5, True, (layer,) * num_groups)
    engine = EngineOptions(max_model_len=max_model_len)
    return build(CacheContext(engine=engine, spec=spec, layout=layout(num_groups), num_pages=num_pages))


class TestContract(AllocatorContract):
    def provider(self):
        return next(each for each in provide_cache_allocators() if each.key == "contiguous")


def test_a_sequence_takes_a_whole_region_and_what_holds_no_token_of_it_is_wasted():
    books = allocator()
    for number, count in enumerate((0, 1, 9)):
        books.reserve((f"s{number}", 0), [7] * count, count)
        books.commit((f"s{number}", 0), [7] * count, count)
    stats = books.stats()
    assert (stats.used, stats.free, stats.wasted_slots) == (9, 3, 9 * PAGE - 10)


def test_a_region_holds_max_model_len_in_whole_pages():
    books = allocator(num_pages=11, max_model_len=10)  # 3 pages a region, 2 pages left over
    assert (books.region_pages, books.num_regions, books.num_pages) == (3, 3, 9)
    exact = allocator(num_pages=11, max_model_len=8)
    assert (exact.region_pages, exact.num_regions, exact.num_pages) == (2, 5, 10)


def test_capacity_is_a_region_each_and_nothing_beyond_a_region():
    books = allocator(num_pages=11, max_model_len=10)
    assert [books.capacity(n) for n in (0, 1, 10, 12, 13, 1000)] == [3, 3, 3, 3, 0, 0]
    assert allocator(num_pages=2, max_model_len=10).capacity(1) == 0


def test_nothing_is_shared_between_sequences():
    books = allocator()
    books.reserve(("a", 0), (1, 2, 3), 3)
    books.commit(("a", 0), (1, 2, 3), 3)
    assert books.lookup((1, 2, 3)) == 0
    assert books.reserve(("b", 0), (1, 2, 3), 3) == 0
    assert not set(books.pages(("a", 0))[0]) & set(books.pages(("b", 0))[0])


def test_a_fork_copies_the_pages_that_hold_tokens_in_every_group_once():
    books = allocator(num_groups=2)
    books.reserve(("a", 0), (), 10)
    books.commit(("a", 0), tuple(range(5)), 5)  # two pages of three
    books.fork(("a", 0), ("a", 1), books._computed["a", 0])
    moves = books.take_moves()
    for group in range(2):
        source, target = books.pages(("a", 0))[group], books.pages(("a", 1))[group]
        assert [(m.source, m.target) for m in moves if m.group == group] == list(zip(source, target, strict=True))[:2]
    assert len(moves) == 4 and {m.kind for m in moves} == {"copy"}
    assert books.take_moves() == ()
    assert books.reserve(("a", 1), (), 10) == 5


def test_a_fork_never_overwrites_a_sequence():
    books = allocator()
    for name in "ab":
        books.reserve((name, 0), (), 1)
    with pytest.raises(AssertionError, match="of its own"):
        books.fork(("a", 0), ("b", 0), 0)


def test_more_tokens_cannot_be_computed_than_there_are():
    books = allocator()
    books.reserve(("a", 0), (), 3)
    with pytest.raises(AssertionError):
        books.commit(("a", 0), (1, 2), 3)


def test_check_integrity_finds_a_lost_region_and_one_owned_twice():
    lost = allocator()
    lost.reserve(("a", 0), (), 3)
    del lost._regions["a", 0], lost._computed["a", 0]
    twice = allocator()
    twice.reserve(("a", 0), (), 3)
    twice._regions["b", 0], twice._computed["b", 0] = twice._regions["a", 0], 0
    for books in (lost, twice):
        with pytest.raises(AssertionError, match="lost or owned twice"):
            books.check_integrity()
