"""Swapping by the paged cache: what comes back is what was valid, nothing is copied twice, nothing is lost.

The state machine does what moves say to a cache in which each slot remembers the tokens it stands for: a page copied
too early, too late or to the wrong place is seen when its sequence reads it.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from intarsia.errors import ConfigError
from intarsia.types import CacheGroup, CacheLayout, CacheMove, SwapPrices
from intarsia_inflight.options import InflightOptions
from intarsia_inflight.scheduler import InflightScheduler
from intarsia_paged.allocator import GONE, PagedAllocator
from intarsia_paged.options import PagedOptions
from simulation import Simulation, answer

MAX_LEN = 24
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
A, B = ("a", 0), ("b", 0)


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


def allocator(num_pages=8, host=8, page_size=4, windows=(None,), prefix=True, when="always"):
    options = PagedOptions(page_size=page_size, prefix=prefix, swap_when=when)
    return PagedAllocator(options, layout(page_size, windows), num_pages, host)


def run(books, name, ids, computed=None):
    found = books.reserve(name, ids, len(ids))
    books.commit(name, ids, len(ids) if computed is None else computed)
    return found


def kinds(moves):
    return [move.kind for move in moves]


def fill(books, num_pages):
    """Take pages for others, so that cached ones are forgotten."""
    assert books.reserve(("other", 0), [99] * 4 * num_pages, 4 * num_pages) == 0
    books.release(("other", 0))
    books.take_moves()


# --- out and in -------------------------------------------------------------------------------------------------------


def test_valid_tokens_come_back_and_reserved_slots_behind_them_do_not():
    books = allocator(num_pages=8)
    ids = list(range(10))
    books.reserve(A, ids, 20)
    books.commit(A, ids, 6)
    pages = books.pages(A)[0]
    assert books.swap_out(A)
    assert books.take_moves() == (CacheMove("swap_out", 0, pages[0]), CacheMove("swap_out", 1, pages[1]))
    assert books.stats().used == 0 and books.swap_stats().used == 2
    fill(books, 8)
    assert books.reserve(A, ids, 10) == 6
    new = books.pages(A)[0]
    assert len(new) == 3
    assert books.take_moves() == (CacheMove("swap_in", new[0], 0), CacheMove("swap_in", new[1], 1))
    books.check_integrity()
    assert (books.swap_stats().outs, books.swap_stats().ins, books.swap_stats().swapped) == (1, 1, 0)


def test_slots_of_rejected_drafts_are_not_valid():
    books = allocator()
    ids = list(range(10))
    books.reserve(A, ids, 10)
    books.commit(A, ids, 10)
    books.rewind(A, 5)
    assert books.swap_out(A)
    assert len(books.take_moves()) == 2
    assert books.reserve(A, ids, 10) == 5
    # The second page was named as a whole before; half of it is valid now, so it is a copy of its own.
    assert kinds(books.take_moves()) == ["swap_in"]
    books.check_integrity()


def test_what_is_still_on_the_device_is_found_there_and_the_last_page_is_copied():
    books = allocator(num_pages=8)
    ids = list(range(10))
    run(books, A, ids)
    first = books.pages(A)[0]
    assert books.swap_out(A) and books.stats().cached == 2
    assert books.take_moves() == tuple(CacheMove("swap_out", i, page) for i, page in enumerate(first))
    assert books.reserve(A, [*ids, 1], 11) == 10
    assert books.pages(A)[0][:2] == first[:2]
    assert books.take_moves() == (CacheMove("swap_in", books.pages(A)[0][2], 2),)


def test_pages_that_are_in_host_memory_already_are_not_copied_again():
    books = allocator(num_pages=8)
    ids = list(range(10))
    run(books, A, ids)
    books.swap_out(A)
    books.take_moves()
    fill(books, 8)
    books.reserve(A, [*ids, 7, 7, 7], 13)
    assert books.swap_stats().cached == 2 and books.swap_stats().used == 0
    books.commit(A, [*ids, 7, 7, 7], 13)
    books.take_moves()
    assert books.swap_out(A)
    moves = books.take_moves()
    assert [(m.kind, m.source) for m in moves] == [("swap_out", page) for page in (moves[0].source, moves[1].source)]
    assert len(moves) == 2, "two pages are new: the one that has filled, and the one behind it"
    books.check_integrity()


def test_a_prefix_that_two_swapped_sequences_share_is_copied_once_each_way():
    books = allocator(num_pages=8)
    shared = list(range(8))
    run(books, A, [*shared, 1])
    run(books, B, [*shared, 2])
    assert books.swap_out(A) and len(books.take_moves()) == 3
    assert books.swap_out(B) and len(books.take_moves()) == 1
    assert books.swap_stats().used == 4
    fill(books, 8)
    assert books.reserve(A, [*shared, 1, 1], 10) == 9 and len(books.take_moves()) == 3
    assert books.reserve(B, [*shared, 2, 2], 10) == 9 and len(books.take_moves()) == 1
    assert books.pages(A)[0][:2] == books.pages(B)[0][:2]
    books.check_integrity()


def test_what_came_back_can_be_found_by_others():
    books = allocator(num_pages=8)
    ids = list(range(9))
    run(books, A, ids)
    books.swap_out(A)
    fill(books, 8)
    assert books.lookup(ids) == 0
    books.reserve(A, ids, 9)
    assert books.lookup(ids) == 8 == books.reserve(B, ids, 9)
    books.check_integrity()


def test_forks_are_swapped_apart_and_together():
    for prefix in (True, False):
        books = allocator(num_pages=8, prefix=prefix)
        ids = list(range(6))
        run(books, A, ids)
        assert books.fork(A, B, 6)
        page = books.pages(A)[0]
        assert books.swap_out(B)
        assert books.pages(A)[0] == page and kinds(books.take_moves()) == ["swap_out"] * 2
        books.reserve(A, ids, 7)
        assert books.take_moves() == (), "alone with its page by now"
        assert books.reserve(B, ids, 7) == 6
        assert books.pages(B)[0][1] != page[1]
        assert kinds(books.take_moves()) == ["swap_in"] * (1 if prefix else 2)
        books.check_integrity()
        with pytest.raises(AssertionError, match="the child holds pages already"):
            books.swap_out(B)
            books.fork(A, B, 3)


def test_pages_that_a_window_has_left_behind_are_not_copied():
    books = allocator(num_pages=16, windows=(None, 6))
    ids = list(range(18))
    for end in (10, 18):
        books.reserve(A, ids, end)
        books.commit(A, ids, end)
    assert books.pages(A)[1][:3] == (GONE,) * 3
    assert books.swap_out(A)
    moves = books.take_moves()
    assert [move.group for move in moves] == [0] * 5 + [1] * 2
    assert books.reserve(A, [*ids, 0], 19) == 18
    assert books.pages(A)[1][:3] == (GONE,) * 3 and GONE not in books.pages(A)[1][3:]
    books.check_integrity()


def test_one_that_comes_and_goes_in_the_same_plan_is_copied_in_that_order():
    books = allocator(num_pages=4, prefix=False)
    run(books, A, list(range(6)))
    books.swap_out(A)
    books.take_moves()
    books.reserve(A, list(range(6)), 7)
    pages = books.pages(A)[0]
    assert books.swap_out(A)
    moves = books.take_moves()
    assert kinds(moves) == ["swap_in"] * 2 + ["swap_out"] * 2
    assert [move.target for move in moves[:2]] == [move.source for move in moves[2:]] == list(pages)
    books.check_integrity()


def test_a_page_that_is_to_be_copied_first_is_swapped_out_after_that():
    books = allocator(prefix=False)
    run(books, A, list(range(6)))
    books.fork(A, B, 5)
    books.reserve(B, list(range(6)), 6)
    own = books.pages(B)[0][1]
    assert books.swap_out(B)
    copy, _, out = books.take_moves()
    assert (copy.kind, copy.target) == ("copy", own) and (out.kind, out.source) == ("swap_out", own)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_without_room_in_host_memory_nothing_changes():
    books = allocator(host=2)
    ids = list(range(9))
    run(books, A, ids)
    before = books.stats(), books.pages(A)
    assert not books.swap_out(A)
    assert (books.stats(), books.pages(A)) == before and books.take_moves() == ()
    assert books.swap_stats().no_room == 1 and books.swap_stats().used == 0
    books.check_integrity()


def test_cached_host_pages_give_way_but_not_those_that_are_found():
    books = allocator(num_pages=12, host=3)
    ids, other = list(range(9)), list(range(50, 59))
    run(books, A, ids)
    assert books.swap_out(A)
    fill(books, 12)
    books.reserve(A, [*ids, 1], 10)
    assert books.swap_stats().cached == 2 and books.swap_stats().free == 1
    run(books, B, other)
    assert books.swap_out(B), "all three pages are anyone's"
    assert not books.swap_out(A), "and are B's now"
    books.release(B)
    assert books.swap_out(A)
    books.check_integrity()


def test_without_room_on_the_device_a_sequence_stays_swapped_out():
    books = allocator(num_pages=4)
    ids = list(range(10))
    run(books, A, ids)
    books.swap_out(A)
    books.take_moves()
    run(books, B, [50] * 9)
    before = books.stats(), books.swap_stats()
    assert books.reserve(A, ids, 11) is None
    assert (books.stats(), books.swap_stats()) == before and books.take_moves() == ()
    books.check_integrity()
    books.release(B)
    assert books.reserve(A, ids, 11) == 10


def test_a_sequence_that_leaves_while_it_is_swapped_out_frees_its_host_pages():
    books = allocator()
    run(books, A, list(range(10)))
    books.swap_out(A)
    for _ in range(2):
        books.release(A)
        assert books.swap_stats().used == 0 and books.swap_stats().swapped == 0
        books.check_integrity()
    assert books.reserve(A, [60] * 10, 10) == 0, "another that takes its id begins anew"


def test_nothing_valid_and_no_host_memory_are_not_swapped():
    books = allocator()
    books.reserve(A, [1, 2], 2)
    assert not books.swap_out(A)
    books = allocator(host=0)
    run(books, A, [1, 2, 3])
    assert not books.swap_out(A) and books.swap_stats().no_room == 0


def test_the_cheaper_way_is_taken_copies_out_and_in_against_tokens():
    """Ten tokens in three pages of 4 slots x 32 bytes: 768 bytes both ways, 512 of them where two are there already."""
    for token_s, expected in ((75e-6, False), (78e-6, True)):
        books = allocator(when="cheaper")
        books.price(SwapPrices(bytes_per_s=1e6, token_s=token_s))
        run(books, A, list(range(10)))
        assert books.swap_out(A) is expected
        assert books.swap_stats().declined == (not expected)
    fill(books, 8)
    books.reserve(A, list(range(10)), 10)
    books.take_moves()
    books.price(SwapPrices(bytes_per_s=1e6, token_s=50e-6))
    assert not books.swap_out(A), "512 bytes take 512 us, and ten tokens 500"
    books.price(SwapPrices(bytes_per_s=1e6, token_s=52e-6))
    assert books.swap_out(A)


@pytest.mark.parametrize("size", ["auto", "much", "-1", ""])
def test_a_size_of_host_memory_is_a_size(size):
    with pytest.raises(ConfigError, match=r"cache\.swap: .* is not a size such as '4GiB' or '0'"):
        PagedOptions(swap=size)


# --- whatever happens -------------------------------------------------------------------------------------------------


class Books(RuleBasedStateMachine):
    """Random reservations, rows, forks, rewinds, swaps and releases, with moves done late: reads are always right."""

    @initialize(
        page_size=st.integers(1, 5),
        num_pages=st.integers(1, 12),
        host=st.integers(0, 10),
        windows=st.sampled_from([(None,), (None, 3), (7, 2)]),
        prefix=st.booleans(),
    )
    def begin(self, page_size, num_pages, host, windows, prefix):
        self.books = allocator(num_pages, host, page_size, windows, prefix)
        self.windows, self.size = windows, page_size
        self.device, self.host = {}, {}
        self.ids, self.computed, self.out = {}, {}, set()
        self.names = 0

    def pick(self, data, swapped=False):
        names = sorted(name for name in self.ids if (name in self.out) == swapped)
        return data.draw(st.sampled_from(names)) if names else None

    def do_moves(self):
        for move in self.books.take_moves():
            sources = self.host if move.kind == "swap_in" else self.device
            targets = self.host if move.kind == "swap_out" else self.device
            for slot in range(self.size):
                value = sources.get((move.group, move.source, slot))
                targets[move.group, move.target, slot] = value

    def row(self, name, stop):
        """Run a row: moves, writes, reads of all that it can see; then commit."""
        self.do_moves()
        ids, start = self.ids[name], self.computed[name]
        for group, (window, pages) in enumerate(zip(self.windows, self.books.pages(name), strict=True)):

            def place(position, group=group, pages=pages):
                assert pages[position // self.size] != GONE
                return group, pages[position // self.size], position % self.size

            for position in range(start, stop):
                self.device[place(position)] = tuple(ids[: position + 1])
            for position in range(0 if window is None else max(0, start - window + 1), stop):
                assert self.device.get(place(position)) == tuple(ids[: position + 1]), (name, position)
        self.computed[name] = stop
        self.books.commit(name, ids, stop)

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=14))
    def enter(self, ids):
        name = (f"s{self.names}", 0)
        self.names += 1
        found = self.books.reserve(name, ids, len(ids))
        if found is not None:
            self.ids[name], self.computed[name] = ids, found

    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=5))
    def go_on(self, data, more):
        name = self.pick(data)
        if name is None:
            return
        ids = [*self.ids[name], *more]
        if self.books.reserve(name, ids, len(ids)) is not None:
            self.ids[name] = ids
            self.row(name, data.draw(st.integers(self.computed[name], len(ids))))

    @rule(data=st.data())
    def rewind(self, data):
        """As far back as a window can still see: drafts are rejected, nothing before them."""
        name = self.pick(data)
        if name is not None and all(window is None for window in self.windows):
            self.computed[name] = data.draw(st.integers(0, self.computed[name]))
            self.books.rewind(name, self.computed[name])
            self.ids[name] = [*self.ids[name][: self.computed[name]], data.draw(st.integers(3, 5))]

    @rule(data=st.data())
    def fork(self, data):
        name, child = self.pick(data), (f"s{self.names}", 1)
        self.names += 1
        if name is None:
            return
        count = data.draw(st.integers(0, self.computed[name]))
        if self.books.fork(name, child, count):
            self.ids[child], self.computed[child] = self.ids[name][: count + 1], count

    @rule(data=st.data())
    def swap_out(self, data):
        name = self.pick(data)
        if name is not None and self.books.swap_out(name):
            assert self.computed[name] > 0
            self.out.add(name)

    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=3))
    def come_back(self, data, more):
        name = self.pick(data, swapped=True)
        if name is None:
            return
        ids = [*self.ids[name], *more]
        found = self.books.reserve(name, ids, len(ids))
        if found is not None:
            assert found == self.computed[name], "what was valid is valid, and no more"
            self.out.discard(name)
            self.ids[name] = ids

    @rule(data=st.data(), swapped=st.booleans())
    def release(self, data, swapped):
        name = self.pick(data, swapped)
        if name is not None:
            del self.ids[name]
            self.out.discard(name)
            self.books.release(name)

    @precondition(lambda self: not self.ids)
    @rule()
    def is_idle(self):
        assert self.books.stats().used == self.books.swap_stats().used == 0

    @invariant()
    def adds_up(self):
        if hasattr(self, "books"):
            self.books.check_integrity()
            stats, swap = self.books.stats(), self.books.swap_stats()
            assert stats.used + stats.free + stats.cached == stats.num_pages
            assert swap.used + swap.free + swap.cached == swap.num_pages
            assert swap.swapped == len(self.out)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, phases=PHASES)


# --- the scheduler asks -----------------------------------------------------------------------------------------------


def simulation(*, num_pages, host, page_size=4, windows=(None,), prefix=True, propose=None, **options):
    books = allocator(num_pages, host, page_size, windows, prefix)
    settled = InflightOptions(**options)
    return Simulation(
        InflightScheduler(settled, books),
        books,
        books.layout,
        max_tokens=settled.max_tokens,
        max_batch=settled.max_batch,
        propose=propose,
    )


def load(sim):
    """Six requests of 10 + 10 tokens; pages for two and a half."""
    prompts = {f"r{i}": [(i + j) % 3 for j in range(10)] for i in range(6)}
    for name, prompt in prompts.items():
        sim.add(name, prompt, 10)
    sim.run()
    for name, prompt in prompts.items():
        assert sim.finished[name, 0].output == answer(prompt, 10)
    return sum(plan.num_tokens for plan in sim.log)


@pytest.mark.parametrize("prefix", [True, False])
def test_preempted_sequences_go_on_where_they_were(prefix):
    swapping = simulation(num_pages=13, host=40, prefix=prefix)
    tokens = load(swapping)
    stats = swapping.allocator.swap_stats()
    assert stats.outs == stats.ins == sum(len(plan.preempted) for plan in swapping.log) > 0
    assert stats.used == 0
    if not prefix:
        assert tokens == 6 * 19, "no token is run twice"
    again = load(simulation(num_pages=13, host=0, prefix=prefix))
    assert tokens <= again and (prefix or tokens < again)


def test_where_host_memory_is_full_tokens_are_computed_again():
    sim = simulation(num_pages=13, host=4, prefix=False)
    assert load(sim) > 6 * 19 and sim.allocator.swap_stats().no_room > 0


def test_a_sequence_that_is_cancelled_while_it_is_swapped_out_frees_host_memory():
    sim = simulation(num_pages=5, host=20, prefix=False)
    for i, name in enumerate("ab"):
        sim.add(name, [i] * 7, 8)
    while not sim.allocator.swap_stats().swapped:
        sim.step()
    (gone,) = sim.log[-1].preempted
    sim.cancel(gone)
    assert sim.allocator.swap_stats().used == 0
    sim.run()
    assert sim.log[-1].left or gone in sim.scheduler.plan().left or any(gone in plan.left for plan in sim.log)


def test_a_choice_that_was_swapped_out_before_its_first_token_comes_back_and_forks_nothing():
    sim = simulation(num_pages=3, host=20, prefix=False)
    prompt = [0, 1, 2, 1, 0, 2, 2, 1]
    sim.add("low", [2], 4)
    sim.add("n", prompt, 4, priority=1)
    sim.step()
    sim.add("n", prompt, 4, choice=1, priority=1)
    plan = sim.step()  # it takes the place of the one below it, and gives it to the first choice
    assert plan.preempted == (("low", 0), ("n", 1)) and kinds(plan.moves)[-2:] == ["swap_out"] * 2
    sim.run()
    assert sim.finished["n", 1].output == sim.finished["n", 0].output == answer(prompt, 4)
    assert sim.finished["low", 0].output == answer([2], 4)
    assert sim.allocator.swap_stats().outs == sim.allocator.swap_stats().ins


class Life(RuleBasedStateMachine):
    """Random arrivals, choices, cancels and steps over a cache that swaps: every answer is the solo answer."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        spare=st.integers(0, 6),
        host=st.integers(0, 30),
        windows=st.sampled_from([(None,), (None, 5), (4,)]),
        prefix=st.booleans(),
        max_tokens=st.sampled_from([1, 3, 40]),
        max_batch=st.integers(2, 5),
        drafts=st.booleans(),
    )
    def begin(self, page_size, spare, drafts, **options):
        def propose(context):
            return [*answer(context, 1), 9]

        least = -(-MAX_LEN // page_size)
        proposing = propose if drafts else None
        self.sim = simulation(page_size=page_size, num_pages=least + spare, propose=proposing, **options)
        self.count, self.expected = 0, {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        num_tokens=st.integers(1, 10),
        priority=st.integers(0, 2),
        choices=st.integers(1, 3),
        salt=st.sampled_from(["", "x"]),
    )
    def arrive(self, prompt, num_tokens, priority, choices, salt):
        name = f"s{self.count}"
        self.count += 1
        for choice in range(choices):
            self.sim.add(name, prompt, num_tokens, choice=choice, priority=priority, salt=salt)
            self.expected[name, choice] = answer(prompt, num_tokens)

    @precondition(lambda self: self.sim.sequences)
    @rule(data=st.data())
    def cancel(self, data):
        self.sim.cancel(data.draw(st.sampled_from(sorted(self.sim.sequences))))

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.sim.step()

    def teardown(self):
        if not hasattr(self, "sim"):
            return
        self.sim.run()
        for sequence_id, finished in self.sim.finished.items():
            assert finished.output == self.expected[sequence_id]
        books = self.sim.allocator
        assert books.stats().used == books.swap_stats().used == books.swap_stats().swapped == 0


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, phases=PHASES)
