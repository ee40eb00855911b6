"""The cache `ttl_prefix`: the contract of cache allocators, and what is its own: how long prefixes live."""

import pytest
from attrs import define

from intarsia.testing.allocators import AllocatorContract
from intarsia.testing.memory import simulated_layout
from intarsia.testing.written import WrittenCache
from intarsia_ttl_prefix import provide_cache_allocators
from intarsia_ttl_prefix.allocator import TtlPrefixAllocator
from intarsia_ttl_prefix.options import TtlPrefixOptions

IDS = [*range(1, 14)]


class TestContract(AllocatorContract):
    def provider(self):
        return provide_cache_allocators()[0]


@define
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def cache_of(clock, *, ttl_s=10.0, num_pages=8, windows=(None,)):
    layout = simulated_layout(4, windows)
    return WrittenCache(TtlPrefixAllocator(layout, num_pages, ttl_s, clock), layout)


def use(cache, name, ids=IDS, salt=""):
    """Let a sequence come, run and leave; return how many tokens it found."""
    found = cache.enter((name, 0), ids, salt)
    cache.grow((name, 0), ids)
    cache.release((name, 0))
    return found


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_until_its_time_is_over_and_then_no_more():
    clock = Clock()
    cache = cache_of(clock)
    use(cache, "first")
    clock.now += 9.99
    assert cache.allocator.lookup(IDS) == 12
    clock.now += 0.01
    assert cache.allocator.lookup(IDS) == 0
    assert use(cache, "second") == 0


def test_each_use_begins_its_time_anew_and_looking_it_up_does_not():
    clock = Clock()
    cache = cache_of(clock)
    use(cache, "first")
    for turn in range(4):
        clock.now += 8
        assert use(cache, f"again-{turn}") == 12
    clock.now += 8
    assert cache.allocator.lookup(IDS) == 12
    clock.now += 8
    assert cache.allocator.lookup(IDS) == 0


def test_time_does_not_pass_for_a_prefix_that_somebody_uses():
    clock = Clock()
    cache = cache_of(clock)
    cache.grow(("holds it", 0), IDS)
    clock.now += 1e6
    assert use(cache, "meets it") == 12
    cache.check_all()


def test_what_is_over_is_free_and_figures_say_so():
    clock = Clock()
    cache = cache_of(clock)
    use(cache, "first")
    stats = cache.allocator.stats()
    assert (stats.used, stats.free, stats.cached) == (0, 5, 3)
    clock.now += 10
    stats = cache.allocator.stats()
    assert (stats.used, stats.free, stats.cached) == (0, 8, 0)
    cache.allocator.check_integrity()


def test_a_prefix_that_is_over_is_computed_and_found_again():
    clock = Clock()
    cache = cache_of(clock)
    use(cache, "first")
    clock.now += 50
    assert use(cache, "second") == 0
    assert use(cache, "third") == 12
    cache.check_all()


@pytest.mark.parametrize("ttl_s, kept", [(0.0, 0), (float("inf"), 12)])
def test_no_time_keeps_nothing_and_endless_time_keeps_it_while_there_is_room(ttl_s, kept):
    clock = Clock()
    cache = cache_of(clock, ttl_s=ttl_s)
    use(cache, "first")
    clock.now += 1e9
    assert cache.allocator.lookup(IDS) == kept


# --- pressure ---------------------------------------------------------------------------------------------------------


def test_where_pages_are_needed_the_prefix_whose_use_is_longest_ago_goes_before_its_time():
    clock = Clock()
    cache = cache_of(clock, num_pages=8)
    older, newer = [20, *IDS[:8]], [30, *IDS[:8]]  # two full pages each
    use(cache, "older", older)
    clock.now += 1
    use(cache, "newer", newer)
    assert cache.grow(("needs room", 0), [40, *IDS, *IDS[:10]])  # six pages
    assert cache.allocator.lookup(newer) == 8
    assert cache.allocator.lookup(older) == 0
    cache.check_all()


def test_of_a_prefix_that_loses_pages_the_beginning_is_kept():
    cache = cache_of(Clock(), num_pages=6)
    use(cache, "first")
    assert cache.grow(("needs room", 0), [50, *IDS[:12]])  # four pages: one that rests must go
    assert cache.allocator.lookup(IDS) == 8


def test_pages_that_rest_count_as_room():
    cache = cache_of(Clock(), num_pages=8)
    for turn in range(4):
        use(cache, f"s{turn}", [60 + turn, *IDS])
    assert cache.grow(("needs all", 0), [*range(32)])
    assert cache.allocator.stats().cached == 0


# --- groups -----------------------------------------------------------------------------------------------------------


def test_groups_share_a_table_and_copies_are_made_in_each():
    cache = cache_of(Clock(), windows=(None, 6))
    cache.grow(("parent", 0), IDS[:6])
    assert cache.fork(("parent", 0), ("parent", 1), 6)
    cache.allocator.reserve(("parent", 1), IDS[:6], 7)
    first, second = cache.allocator.pages(("parent", 1))
    assert first == second
    assert [(move.kind, move.group) for move in cache.allocator.take_moves()] == [("copy", 0), ("copy", 1)]


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan")])
def test_a_time_that_is_none_is_refused(ttl_s):
    with pytest.raises(ValueError, match="ttl_s"):
        TtlPrefixOptions(ttl_s=ttl_s)
