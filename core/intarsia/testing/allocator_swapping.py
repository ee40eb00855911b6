"""What allocators keep that swap: claims of `AllocatorContract`."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.protocols import SwappingAllocator
from intarsia.testing.allocator_case import AllocatorCase, distinct_tokens, number_id
from intarsia.testing.claims import unclaimed
from intarsia.testing.written import WrittenCache

__all__ = ["SwapClaims"]


class SwapClaims(AllocatorCase):
    """Tokens come back from host memory, and leave nothing there."""

    def test_swapped_sequences_come_back_with_their_tokens(self) -> None:
        """What was swapped out is there again, wherever its pages were in between; its pages served others."""
        for windows in self.windows:
            for end in (1, 5, 16, 19):
                cache = self._swapping(windows)
                cache.grow(number_id(0), distinct_tokens(0, end))
                cache.grow(number_id(1), distinct_tokens(0, end))
                out = [number for number in (0, 1) if cache.swap_out(number_id(number))]
                assert out, "nothing can be swapped out of a cache with room in host memory"
                others = cache.fill(12, first=300)
                cache.check_all()
                for other in others:
                    cache.release(other)
                for number in out:
                    assert cache.swap_in(number_id(number)), "an empty cache has no room for what was swapped out"
                    cache.grow(number_id(number), [*distinct_tokens(0, end), 1, 2, 3])
                cache.check_all()
                cache.empty()
                self._check_no_host_page(cache)

    def test_a_swapped_sequence_waits_for_room(self) -> None:
        """While the cache is full a swapped sequence stays where it is, and nothing has changed."""
        cache = self._swapping((None,))
        cache.grow(number_id(0), distinct_tokens(0, 19))
        assert cache.swap_out(number_id(0))
        others = cache.fill(7, first=300)
        before = cache.snapshot()
        assert not cache.swap_in(number_id(0)), "it comes back to a full cache"
        assert cache.snapshot() == before, "a swapped sequence that has no room changed the books"
        cache.release(others[0])
        cache.empty()
        self._check_no_host_page(cache)

    def test_full_host_memory_refuses_and_changes_nothing(self) -> None:
        """Where host memory has no room `swap_out` returns False, and the sequence has its pages still."""
        cache, refused = self._swapping((None,)), 0
        for number in range(8):
            cache.grow(number_id(number), distinct_tokens(number, 15))
        for number in range(8):
            before = cache.snapshot()
            if not cache.swap_out(number_id(number)):
                assert cache.snapshot() == before, "swapping that was refused changed the books"
                refused += 1
        assert refused, "host memory of 10 pages took 32"
        cache.check_all()
        cache.empty()
        self._check_no_host_page(cache)

    def _swapping(self, windows: Sequence[int | None]) -> WrittenCache:
        cache = self.build(windows=windows, num_host_pages=10)
        if not isinstance(cache.allocator, SwappingAllocator):
            unclaimed("it does not swap")
        return cache

    def _check_no_host_page(self, cache: WrittenCache) -> None:
        assert isinstance(cache.allocator, SwappingAllocator)
        stats = cache.allocator.swap_stats()
        assert (stats.used, stats.swapped) == (0, 0), f"{stats.used} host pages are in use when all have left"
