"""The naive cache's books: nothing is lost, owned twice, or copied wrongly, whatever the calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from intarsia.defaults.contiguous import ContiguousAllocator, build
from intarsia.protocols import CacheContext
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


class Books(RuleBasedStateMachine):
    """Any calls in any order, beside a model of what each sequence owns and of the tokens in its slots."""

    sequences = Bundle("sequences")

    @initialize(num_regions=st.integers(1, 4), num_groups=st.integers(1, 2), spare=st.integers(0, 2))
    def open(self, num_regions, num_groups, spare):
        self.books: ContiguousAllocator = allocator(num_pages=3 * num_regions + spare, num_groups=num_groups)
        self.num_regions, self.num_groups = num_regions, num_groups
        self.tokens: dict[tuple[str, int], list[int]] = {}  # per sequence, its accepted tokens that have slots
        self.memory: dict[tuple[int, int, int], int] = {}  # (group, page, offset) -> token
        self.names = 0

    def name(self):
        self.names += 1
        return (f"r{self.names}", 0)

    def write(self, sequence, first, tokens):
        """What a step would do: cache moves first, then the new tokens' keys and values."""
        for move in self.books.take_moves():
            assert move.kind == "copy"
            for offset in range(PAGE):
                self.memory[move.group, move.target, offset] = self.memory.get((move.group, move.source, offset), -1)
        for group, pages in enumerate(self.books.pages(sequence)):
            for position, token in enumerate(tokens, start=first):
                self.memory[group, pages[position // PAGE], position % PAGE] = token

    @rule(target=sequences, num_tokens=st.integers(0, 14))
    def enter(self, num_tokens):
        sequence = self.name()
        before = self.books.stats()
        found = self.books.reserve(sequence, (), num_tokens)
        if num_tokens > 12 or len(self.tokens) == self.num_regions:
            assert found is None and self.books.stats() == before
            return multiple()
        assert found == 0
        self.tokens[sequence] = []
        return sequence

    @rule(sequence=sequences, new=st.lists(st.integers(0, 99), min_size=1, max_size=5), kept=st.integers(0, 5))
    def run(self, sequence, new, kept):
        """A row of tokens, of which the first `kept` are accepted: the others were wrong drafts."""
        held = self.tokens[sequence]
        new = new[: 12 - len(held)]
        assert self.books.reserve(sequence, held, len(held) + len(new)) == len(held)
        self.write(sequence, len(held), new)
        held += new[:kept]
        self.books.commit(sequence, held, len(held))

    @rule(sequence=sequences, num_tokens=st.integers(0, 14))
    def rewind(self, sequence, num_tokens):
        self.books.rewind(sequence, num_tokens)
        del self.tokens[sequence][num_tokens:]

    @rule(sequence=sequences)
    def beyond_its_region_nothing_is_reserved(self, sequence):
        before = self.books.stats()
        assert self.books.reserve(sequence, (), 13) is None and self.books.stats() == before

    @rule(target=sequences, parent=sequences)
    def fork(self, parent):
        child = self.name()
        if len(self.tokens) == self.num_regions:
            assert not self.books.fork(parent, child, len(self.tokens[parent]))
            return multiple()
        assert self.books.fork(parent, child, len(self.tokens[parent]))
        self.tokens[child] = list(self.tokens[parent])
        return child

    @rule(sequence=consumes(sequences), again=st.booleans())
    def release(self, sequence, again):
        del self.tokens[sequence]
        self.books.release(sequence)
        if again:
            self.books.release(sequence)

    @rule()
    def release_what_never_was(self):
        before = self.books.stats()
        self.books.release(("nobody", 0))
        assert self.books.stats() == before

    @invariant()
    def no_page_is_lost_or_owned_twice(self):
        self.books.check_integrity()
        for group in range(self.num_groups):
            owned = [page for sequence in self.tokens for page in self.books.pages(sequence)[group]]
            assert len(owned) == len(set(owned)) and all(0 <= page < self.books.num_pages for page in owned)
            assert all(len(self.books.pages(sequence)[group]) == 3 for sequence in self.tokens)

    @invariant()
    def the_figures_add_up(self):
        stats = self.books.stats()
        assert (stats.num_pages, stats.used) == (3 * self.num_regions, 3 * len(self.tokens))
        assert stats.free == stats.num_pages - stats.used
        assert stats.wasted_slots == stats.used * PAGE - sum(map(len, self.tokens.values()))

    @rule(sequence=sequences)
    def every_token_is_in_its_slot(self, sequence):
        self.write(sequence, 0, ())
        for group, pages in enumerate(self.books.pages(sequence)):
            held = [self.memory[group, pages[i // PAGE], i % PAGE] for i in range(len(self.tokens[sequence]))]
            assert held == self.tokens[sequence]


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


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
