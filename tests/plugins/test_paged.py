"""The paged allocator: pages are shared by equal content and salt alone, copied before they are written, never lost."""

from typing import ClassVar

import pytest

from intarsia.testing.allocators import AllocatorContract
from intarsia.types import CacheGroup, CacheLayout, CacheMove
from intarsia_paged import provide_cache_allocators
from intarsia_paged.allocator import GONE, PagedAllocator
from intarsia_paged.options import PagedOptions


def layout(page_size=4, windows=(None,)):
    return CacheLayout(
        order="PSKD",
        format="float32",
        entry_bytes=4,
        page_size=page_size,
        groups=tuple(
            CacheGroup(kind="full" if w is None else "window", layers=(i,), num_kv_heads=1, head_dim=4, window=w)
            for i, w in enumerate(windows)
        ),
    )


def allocator(num_pages=8, page_size=4, windows=(None,), prefix=True):
    return PagedAllocator(PagedOptions(page_size=page_size, prefix=prefix), layout(page_size, windows), num_pages)


def run(books, name, ids, salt=""):
    """Reserve and commit a whole sequence; return how many of its tokens were cached."""
    found = books.reserve((name, 0), ids, len(ids), salt)
    books.commit((name, 0), ids, len(ids))
    books.check_integrity()
    return found


class TestContract(AllocatorContract):
    def provider(self):
        return provide_cache_allocators()[0]


class TestContractWithoutPrefixes(TestContract):
    options: ClassVar = {"prefix": False}


# --- prefixes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_an_equal_prefix_is_found_and_the_last_token_is_always_run(page_size):
    books = allocator(64, page_size)
    for length in (page_size, 2 * page_size, 3 * page_size, 3 * page_size + 1):
        ids = [7 + length] * length
        assert run(books, "first", ids) == 0
        books.release(("first", 0))
        found = run(books, "second", ids)
        assert found == (length - 1) // page_size * page_size == books.lookup(ids)
        assert found <= length - 1
        books.release(("second", 0))


def test_without_prefix_sharing_nothing_is_found_or_kept():
    books = allocator(prefix=False)
    ids = list(range(9))
    run(books, "first", ids)
    books.release(("first", 0))
    assert run(books, "second", ids) == 0
    assert books.stats().cached == 0


def test_only_committed_tokens_are_named():
    books = allocator()
    ids = list(range(8))
    books.reserve(("a", 0), ids, 8)
    assert books.lookup([*ids, 9]) == 0
    books.commit(("a", 0), ids, 5)
    assert books.lookup([*ids, 9]) == 4
    books.commit(("a", 0), ids, 8)
    assert books.lookup([*ids, 9]) == 8


def test_cached_pages_go_in_least_recently_used_order_and_ends_before_beginnings():
    books = allocator(num_pages=6)
    old, new = list(range(9)), list(range(100, 109))
    run(books, "old", old)
    books.release(("old", 0))
    run(books, "new", new)
    books.release(("new", 0))
    assert books.stats().cached == 4
    run(books, "touch", old)  # used again: now `new` is the older one
    books.release(("touch", 0))
    assert books.reserve(("big", 0), [50] * 12, 12) == 0
    assert books.lookup(new) == 4  # its end went first
    assert books.lookup(old) == 8
    books.check_integrity()


def test_a_reservation_that_does_not_fit_changes_nothing():
    books = allocator(num_pages=4)
    ids = list(range(9))
    run(books, "a", ids)
    before = (books.stats(), books.pages(("a", 0)))
    assert books.reserve(("b", 0), [50] * 9, 9) is None
    assert books.reserve(("a", 0), ids, 17) is None
    # Two of the four pages would be found, and three more are needed.
    assert books.reserve(("c", 0), [*ids[:8], *[50] * 12], 20) is None
    assert (books.stats(), books.pages(("a", 0))) == before
    books.check_integrity()


def test_reviving_cached_pages_counts_them_as_taken():
    books = allocator(num_pages=4)
    ids = list(range(8))
    run(books, "a", [*ids, 1])
    books.release(("a", 0))
    assert books.stats().cached == 2
    # Two cached pages and two free ones: found and revived, five are one too many.
    assert books.reserve(("b", 0), [*ids, *[9] * 12], 20) is None
    assert books.reserve(("b", 0), [*ids, *[9] * 8], 16) == 8
    books.check_integrity()


# --- forks and rewinding ----------------------------------------------------------------------------------------------


def test_a_fork_shares_pages_until_one_side_writes():
    books = allocator()
    ids = list(range(6))
    run(books, "a", ids)
    assert books.fork(("a", 0), ("a", 1), 6)
    assert books.pages(("a", 0)) == books.pages(("a", 1))
    assert books.stats().shared == 2 and books.stats().used == 2
    shared = books.pages(("a", 0))[0][1]
    books.reserve(("a", 1), ids, 7)
    own = books.pages(("a", 1))[0][1]
    assert own != shared and books.pages(("a", 0))[0][1] == shared
    assert books.take_moves() == (CacheMove("copy", own, shared, 0),)
    books.reserve(("a", 0), ids, 7)  # alone with its page by now
    assert books.pages(("a", 0))[0][1] == shared and books.take_moves() == ()
    books.release(("a", 0))
    books.release(("a", 1))
    books.release(("a", 1))
    books.check_integrity()
    assert books.stats().used == 0


def test_a_fork_at_a_page_edge_copies_nothing():
    books = allocator()
    ids = list(range(8))
    run(books, "a", ids)
    books.fork(("a", 0), ("a", 1), 8)
    for choice in (0, 1):
        books.reserve(("a", choice), ids, 9)
    assert books.take_moves() == ()
    assert books.pages(("a", 0))[0][2] != books.pages(("a", 1))[0][2]


def test_reserved_pages_without_tokens_are_not_forked():
    books = allocator()
    books.reserve(("a", 0), [1] * 5, 12)
    books.commit(("a", 0), [1] * 5, 5)
    books.fork(("a", 0), ("a", 1), 5)
    assert len(books.pages(("a", 1))[0]) == 2
    books.check_integrity()


def test_a_fork_can_take_less_than_the_parent_has():
    books = allocator()
    ids = list(range(10))
    run(books, "a", ids)
    books.fork(("a", 0), ("a", 1), 7)
    assert books.pages(("a", 1))[0] == books.pages(("a", 0))[0][:2]
    books.reserve(("a", 1), ids, 8)
    own = books.pages(("a", 1))[0][1]
    assert books.take_moves() == (CacheMove("copy", own, books.pages(("a", 0))[0][1], 0),)
    books.check_integrity()


def test_what_a_window_has_left_behind_cannot_be_forked():
    books = allocator(num_pages=16, page_size=4, windows=(None, 4))
    ids = list(range(16))
    for end in (6, 16):
        books.reserve(("a", 0), ids, end)
        books.commit(("a", 0), ids, end)
    before = books.stats()
    assert not books.fork(("a", 0), ("a", 1), 5)
    assert books.stats() == before
    assert books.fork(("a", 0), ("a", 1), 15)
    books.check_integrity()


def test_rewinding_gives_pages_back_and_never_rewrites_a_named_page():
    books = allocator()
    ids = list(range(8))
    run(books, "a", ids)
    named = books.pages(("a", 0))[0][1]
    books.rewind(("a", 0), 6)
    other = [*ids[:6], 50, 51, 52]
    books.reserve(("a", 0), other, 9)
    assert books.pages(("a", 0))[0][1] != named
    assert books.take_moves() == (CacheMove("copy", books.pages(("a", 0))[0][1], named, 0),)
    books.commit(("a", 0), other, 9)
    assert books.lookup([*ids, 1]) == 8 and books.lookup([*other, 1]) == 8
    books.rewind(("a", 0), 0)
    books.check_integrity()
    assert books.stats().used == 0


# --- windows ----------------------------------------------------------------------------------------------------------


def test_a_window_frees_the_pages_that_nothing_reads_again():
    books = allocator(num_pages=16, page_size=4, windows=(None, 6))
    ids = list(range(30))
    for end in range(1, 31):
        books.reserve(("a", 0), ids, end)
        books.commit(("a", 0), ids, end)
        books.check_integrity()
        full, window = books.pages(("a", 0))
        assert GONE not in full
        first_visible = max(0, end - 6 + 1)  # of the next query, at position `end`
        assert all((page == GONE) == ((i + 1) * 4 <= first_visible) for i, page in enumerate(window))


def test_a_prefix_is_found_if_the_window_before_its_end_is_still_there():
    books = allocator(num_pages=8, page_size=4, windows=(None, 6))
    ids = list(range(17))
    run(books, "a", ids)
    books.release(("a", 0))
    assert books.lookup(ids) == 16
    assert books.reserve(("b", 0), ids, 17) == 16
    assert books.pages(("b", 0))[1][:2] == (GONE, GONE)
    books.check_integrity()
