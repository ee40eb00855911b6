"""The paged allocator: pages are shared by equal content and salt alone, copied before they are written, never lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from intarsia.types import CacheGroup, CacheLayout, CacheMove
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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([10, 20, 30, 40, 9], [41, 19, 30, 40, 9]),  # sums and differences that a weak hash confuses
        ([10, 20, 30, 40, 9], [20, 10, 30, 40, 9]),
        ([1, 23, 5, 6, 9], [12, 3, 5, 6, 9]),
        ([1, 1, 1, 1, 5, 6, 7, 8, 9], [2, 2, 2, 2, 5, 6, 7, 8, 9]),  # equal pages after different parents
        ([1, 2, 3, 2**31, 9], [1, 2, 3, 0, 9]),
    ],
)
def test_different_prefixes_never_meet(first, second):
    books = allocator(32)
    run(books, "first", first)
    assert run(books, "second", second) == 0
    assert run(books, "control", first) == (len(first) - 1) // 4 * 4


def test_salts_keep_equal_prefixes_apart():
    books = allocator(32)
    ids = [1, 2, 3, 4, 5]
    for salt in ("", "a", "b", "a\0", "\udcff"):
        assert run(books, f"first-{salt!r}", ids, salt) == 0
        assert run(books, f"second-{salt!r}", ids, salt) == 4


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


# --- whatever happens -------------------------------------------------------------------------------------------------


class Books(RuleBasedStateMachine):
    """Random reservations, commits, forks, rewinds and releases: the books always add up."""

    @initialize(
        page_size=st.integers(1, 5), num_pages=st.integers(1, 12), windows=st.sampled_from([(None,), (None, 3), (7, 2)])
    )
    def begin(self, page_size, num_pages, windows):
        self.books = allocator(num_pages, page_size, windows)
        self.ids = {}
        self.names = 0

    def computed(self, name):
        return self.books._held[name].num_computed

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.ids))) if self.ids else None

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=14), salt=st.sampled_from(["", "a"]))
    def enter(self, ids, salt):
        name = (f"s{self.names}", 0)
        self.names += 1
        expected = self.books.lookup(ids, salt)
        found = self.books.reserve(name, ids, len(ids), salt)
        if found is None:
            return
        assert found == expected < len(ids)
        self.ids[name] = ids
        self.books.commit(name, ids, found)

    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=5))
    def go_on(self, data, more):
        name = self.pick(data)
        if name is None:
            return
        ids = [*self.ids[name], *more]
        if self.books.reserve(name, ids, len(ids)) is not None:
            self.ids[name] = ids
            self.books.commit(name, ids, len(ids))

    @rule(data=st.data())
    def fork(self, data):
        name = self.pick(data)
        child = (f"s{self.names}", 1)
        self.names += 1
        if name is None:
            return
        count = data.draw(st.integers(0, self.computed(name)))
        if self.books.fork(name, child, count):
            self.ids[child] = self.ids[name][:count]

    @rule(data=st.data())
    def release(self, data):
        name = self.pick(data)
        if name is not None:
            del self.ids[name]
            self.books.release(name)
            self.books.release(name)

    @invariant()
    def adds_up(self):
        if hasattr(self, "books"):
            self.books.check_integrity()
            self.books.take_moves()
            stats = self.books.stats()
            assert stats.used + stats.free + stats.cached == stats.num_pages
            if not self.ids:
                assert stats.used == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
