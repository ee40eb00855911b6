"""The contract of cache allocators, as tests to inherit.

::

    from intarsia.testing.allocators import AllocatorContract

    class TestMine(AllocatorContract):
        options = {"keep": "1MiB"}

        def provider(self):
            return my_plugin.provide_cache_allocators()[0]

pytest runs the inherited tests. Behind the books lies memory that remembers what was written where (`WrittenCache`):
moves are done and rows are written as an executor would, and every token is read back from its slot.
"""

from __future__ import annotations

from collections.abc import Iterator

from intarsia.protocols import CacheAllocator
from intarsia.testing.allocator_case import distinct_tokens, number_id
from intarsia.testing.allocator_prefixes import PrefixClaims
from intarsia.testing.allocator_swapping import SwapClaims
from intarsia.testing.claims import hypothesis
from intarsia.testing.written import WrittenCache
from intarsia.types import SequenceId

__all__ = ["AllocatorContract"]


class AllocatorContract(PrefixClaims, SwapClaims):
    """What every cache allocator keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `max_len`, is in `AllocatorCase`.
    """

    # --- pages ------------------------------------------------------------------------------------------------------

    def test_tokens_are_in_their_slots_as_sequences_grow(self) -> None:
        """Sequences that grow side by side, in steps of any size, find every token that they can see."""
        for cache in self.each():
            for end in (1, 4, 5, 9, 16, 17, 31, 33):
                for number in range(3):
                    cache.grow(number_id(number), distinct_tokens(number, end))
            cache.check_all()

    def test_page_tables_hold_what_was_reserved(self) -> None:
        """`pages` has a table a group, with pages for all reserved tokens; -1 stands only behind a window."""
        for cache in self.each():
            for end in (1, 15, 16, 17, 40):
                assert cache.allocator.reserve(number_id(0), distinct_tokens(0, end), end) is not None
                cache.check_table(number_id(0), end)
                cache.grow(number_id(0), distinct_tokens(0, end))

    def test_no_page_is_given_to_two(self) -> None:
        """Pages of different sequences are different, but for what they share by prefix or fork."""
        for cache in self.each():
            for number in range(4):
                cache.grow(number_id(number), distinct_tokens(number, 9 + number))
            cache.grow(number_id(2), distinct_tokens(2, 18))
            tables = [set(map(tuple, _placed(cache, number_id(number)))) for number in range(4)]
            assert len(set.union(*tables)) == sum(map(len, tables)), "two sequences have a page, and no token in common"
            cache.check_all()

    def test_what_capacity_promises_fits(self) -> None:
        """`capacity(n)` sequences of n tokens fit an empty cache at once; where it says 0, not one does."""
        for num_tokens in (1, 7, 16, 33, 48):
            for cache in self.each():
                count = cache.allocator.capacity(num_tokens)
                assert count or num_tokens > self.max_len, f"not one sequence of {num_tokens} tokens fits"
                for number in range(min(count, 40)):
                    assert cache.grow(number_id(number), distinct_tokens(number, num_tokens)), (
                        f"{number} fit, and {count} were promised"
                    )
                cache.check_all()
        beyond = self.build().allocator
        much = beyond.num_pages * 4 + self.max_len + 1
        assert beyond.capacity(much) == 0, f"{much} tokens cannot fit"
        assert beyond.reserve(number_id(0), [1], much) is None, f"{much} tokens cannot fit"

    def test_a_full_cache_says_so_and_nothing_has_changed(self) -> None:
        """Where there is no room `reserve` returns None, and books, tables and moves are what they were."""
        for cache in self.each():
            held = cache.fill(17)
            cache.refuses(number_id(900), distinct_tokens(900, 17), 17)
            cache.refuses(held[0], cache.tokens[held[0]], 4000)
            first = cache.tokens[held[0]]
            cache.refuses(number_id(901), [*first[:16], *range(100, 4000)], 3916)
            cache.check_all()
            cache.release(held[0])
            assert cache.grow(number_id(902), distinct_tokens(902, 17)), (
                "a sequence left, and another of its size does not fit"
            )
            cache.check_all()

    def test_no_page_is_lost(self) -> None:
        """However sequences came and left, an empty cache holds as many as on the first day."""
        for cache in self.each():
            room = len(cache.fill(9))
            cache.empty()
            for turn in range(6):
                self._churn(cache, turn)
                cache.empty()
            used = cache.allocator.stats().used
            assert used == 0, f"{used} pages are in use when all have left"
            assert len(cache.fill(9)) == room, "fewer sequences fit than at first"
            cache.check_all()

    def _churn(self, cache: WrittenCache, turn: int) -> None:
        """Leave in every state: reserved, computed, with rejected drafts, rewound, forked, refused."""
        parent, child, other = number_id(10 * turn), (f"s{10 * turn}", 1), number_id(10 * turn + 2)
        assert cache.grow(parent, distinct_tokens(turn, 7 + turn)), "an empty cache has no room for one sequence"
        cache.allocator.reserve(other, distinct_tokens(turn + 50, 9), 9)
        if cache.fork(parent, child, 5):
            cache.grow(child, [*distinct_tokens(turn, 5), *distinct_tokens(80, 8)])
        cache.grow(parent, distinct_tokens(turn, 9 + turn), drafts=(70, 71, 72))
        cache.rewind(parent, 6)
        cache.fill(9, first=500)
        cache.release(parent if turn % 2 else child)
        cache.release(other)

    def test_release_ignores_what_is_gone(self) -> None:
        """Releasing twice, or what never was, changes nothing."""
        for cache in self.each():
            for number in range(2):
                cache.grow(number_id(number), distinct_tokens(number, 9))
            cache.release(number_id(0))
            before = cache.snapshot()
            for gone in (number_id(0), number_id(7)):
                cache.allocator.release(gone)
                assert cache.snapshot() == before, "releasing what is gone changes the books"
            cache.check_all()

    # --- rewinding and forks ----------------------------------------------------------------------------------------

    def test_rewinding_forgets_what_is_behind_and_nothing_else(self) -> None:
        """After `rewind` the tokens before are there, and those behind are run again."""
        for cache in self.each():
            for number, (end, back) in enumerate(((17, 16), (16, 15), (9, 8), (12, 12), (20, 30))):
                assert cache.grow(number_id(number), distinct_tokens(number, end))
                if not cache.rewind(number_id(number), back):
                    continue
                kept = min(end, back)
                found = cache.allocator.reserve(number_id(number), distinct_tokens(number, kept), kept + 1)
                assert found == kept, f"rewound to {back} of {end} tokens, {found} are said to be there"
                cache.grow(number_id(number), [*distinct_tokens(number, kept), *distinct_tokens(number + 40, 7)])
                cache.check_all()

    def test_drafts_can_be_rejected_without_a_rewind(self) -> None:
        """`commit` can name fewer tokens than were run: the next ones are written over the rest."""
        for cache in self.each():
            ids = distinct_tokens(0, 10)
            cache.grow(number_id(0), ids)
            for turn in range(5):
                cache.grow(number_id(0), ids, drafts=(80, 81, 82), rewinding=False)
                ids = [*ids, turn, turn + 1]
                cache.grow(number_id(0), ids)
                cache.check_all()

    def test_forks_start_with_their_parents_tokens_and_part(self) -> None:
        """A fork has the parent's first tokens; both go on apart, and either can leave first."""
        forked = 0
        for cache in self.each():
            for number, (end, count) in enumerate(((6, 6), (8, 8), (10, 7), (17, 16), (3, 1), (5, 0))):
                parent, child, grandchild = ((f"f{number}", choice) for choice in range(3))
                ids = distinct_tokens(number, end)
                assert cache.grow(parent, ids)
                if not cache.fork(parent, child, count):
                    cache.empty()
                    continue
                forked += 1
                cache.fork(child, grandchild, count)
                cache.grow(child, [*ids[:count], *distinct_tokens(number + 30, 6)])
                cache.check_all()
                cache.grow(parent, [*ids, *distinct_tokens(number + 60, 6)])
                cache.check_all()
                cache.release(child if number % 2 else parent)
                if grandchild in cache.tokens:
                    cache.grow(grandchild, [*ids[:count], *distinct_tokens(number + 90, 3)])
                cache.check_all()
                cache.empty()
            assert cache.allocator.stats().used == 0, "forks leave pages behind"
        assert forked, "no fork is ever made, with room for five sequences"

    def test_a_fork_without_room_changes_nothing(self) -> None:
        """Where `fork` returns False the books are what they were, and the child is nobody."""
        for cache in self.each():
            held = cache.fill(10)
            for number in range(40):
                if not self._fork_or_nothing(cache, held[0], ("child", number), 10):
                    break
        for cache in self.each():
            for end in (6, 16, 30):
                assert cache.grow(number_id(0), distinct_tokens(0, end))
            for count in (5, 11, 15, 29, 30):
                self._fork_or_nothing(cache, number_id(0), ("s0", count), count)

    def _fork_or_nothing(self, cache: WrittenCache, parent: SequenceId, child: SequenceId, count: int) -> bool:
        before = cache.snapshot()
        forked = cache.fork(parent, child, count)
        assert forked or cache.snapshot() == before, "a fork that was refused changed the books"
        cache.check_all()
        if not forked:
            cache.allocator.release(child)
            assert cache.snapshot() == before, "a child that was refused holds something"
        return forked

    def test_moves_are_told_once(self) -> None:
        """`take_moves` returns what is due and forgets it."""
        for cache in self.each():
            cache.grow(number_id(0), distinct_tokens(0, 10))
            cache.fork(number_id(0), ("s0", 1), 10)
            cache.allocator.reserve(("s0", 1), distinct_tokens(0, 10), 12)
            cache.do_moves()
            assert cache.allocator.take_moves() == (), "moves are told twice"
            cache.check_all()

    # --- figures ----------------------------------------------------------------------------------------------------

    def test_figures_add_up(self) -> None:
        """Used, free and cached pages are all pages, and nothing is below 0, whatever happens."""
        for cache in self.each():
            _add_up(cache.allocator)
            for turn in range(4):
                self._churn(cache, turn)
                _add_up(cache.allocator)
                cache.empty()
                _add_up(cache.allocator)

    # --- whatever happens -------------------------------------------------------------------------------------------

    def test_any_life(self) -> None:
        """Reservations, commits, forks, rewinds, swaps and releases in any order: all of the above holds."""
        hypothesis()
        from intarsia.testing.allocator_life import live

        live(self)


def _placed(cache: WrittenCache, sequence_id: SequenceId) -> Iterator[tuple[int, int]]:
    for group, table in enumerate(cache.allocator.pages(sequence_id)):
        yield from ((group, page) for page in table if page >= 0)


def _add_up(allocator: CacheAllocator) -> None:
    stats = allocator.stats()
    assert stats.used + stats.free + stats.cached == stats.num_pages, f"{stats} do not add up"
    least = min(stats.used, stats.free, stats.cached, stats.shared, stats.wasted_slots)
    assert least >= 0, f"{stats}: a figure is below 0"
