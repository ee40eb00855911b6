"""Static batching with the naive cache's books: who runs, in which order, with which tokens, whatever happens."""

import pytest
from attrs import define, evolve, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from intarsia.defaults.contiguous import ContiguousAllocator
from intarsia.defaults.contract import StaticContract
from intarsia.defaults.static import StaticOptions, StaticScheduler
from intarsia.errors import OverloadedError
from intarsia.types import Entered, RowResult, SamplingParams, Want

PAGE = 4


@define(eq=False)
class FakeSequence:
    """What the engine would own."""

    sequence_id: tuple[str, int]
    token_ids: list[int]
    max_total: int
    priority: int = 0
    salt: str = ""
    num_prompt: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    params: SamplingParams = field(factory=SamplingParams, init=False)
    seed: int = field(default=11, init=False)

    def __attrs_post_init__(self):
        self.num_prompt = len(self.token_ids)

    def entered(self):
        return Entered(
            sequence_id=self.sequence_id,
            params=self.params,
            seed=self.seed,
            token_ids=tuple(self.token_ids),
            num_prompt=self.num_prompt,
        )

    @property
    def finished(self):
        return len(self.token_ids) >= self.max_total

    def accept(self, tokens):
        self.token_ids += tokens[: self.max_total - len(self.token_ids)]
        self.num_computed = len(self.token_ids) - 1


def sequence(name, prompt=3, limit=2, priority=0):
    return FakeSequence((name, 0), list(range(prompt)), prompt + limit, priority)


def scheduler(*, max_batch=2, max_waiting=4096, num_regions=4, region_pages=3):
    books = ContiguousAllocator(page_size=PAGE, num_groups=1, region_pages=region_pages, num_regions=num_regions)
    return StaticScheduler(StaticOptions(max_batch=max_batch, max_waiting=max_waiting), books)


def step(part, sequences, *, choose=lambda row: (7,), propose=lambda row: ()):
    """Plan a step, let the sequences accept what it chose, and remove those that are done; return the plan."""
    plan = part.plan()
    results = []
    for row in plan.rows:
        chosen = choose(row)
        sequences[row.sequence_id].accept(list(chosen))
        part.allocator.commit(row.sequence_id, *(lambda s: (s.token_ids, s.num_computed))(sequences[row.sequence_id]))
        results.append(RowResult(sequence_id=row.sequence_id, token_ids=tuple(chosen), drafts=tuple(propose(row))))
    part.update(plan, results)
    for row in plan.rows:
        if sequences[row.sequence_id].finished:
            part.remove(row.sequence_id)
    return plan


def enter(part, *new):
    for one in new:
        part.add(one)
    return {one.sequence_id: one for one in new}


def ids(rows):
    return [row.sequence_id[0] for row in rows]


class TestContract(StaticContract):
    pass


# --- whatever happens -------------------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Requests come, grow, finish and are cancelled in any order, beside a model of who must run."""

    @initialize(max_batch=st.integers(1, 4), max_waiting=st.integers(1, 6), num_regions=st.integers(1, 5))
    def open(self, max_batch, max_waiting, num_regions):
        self.part = scheduler(max_batch=max_batch, max_waiting=max_waiting, num_regions=num_regions)
        self.room = min(max_batch, num_regions)
        self.max_waiting = max_waiting
        self.waiting: list[FakeSequence] = []
        self.running: dict[tuple[str, int], FakeSequence] = {}
        self.drafts: dict[tuple[str, int], tuple[int, ...]] = {}
        self.left: list[tuple[str, int]] = []
        self.gone: list[tuple[str, int]] = []
        self.names = 0

    @rule(prompt=st.integers(1, 6), limit=st.integers(1, 3 * PAGE - 6), priority=st.integers(-1, 1))
    def add(self, prompt, limit, priority):
        self.names += 1
        new = sequence(f"r{self.names}", prompt, limit, priority)
        books = self.part.allocator.stats()
        if len(self.waiting) == self.max_waiting:
            with pytest.raises(OverloadedError):
                self.part.add(new)
        else:
            self.part.add(new)
            self.waiting.append(new)
            # Python's sort is stable: first come, first served within a priority.
            self.waiting.sort(key=lambda s: -s.priority)
        assert self.part.allocator.stats() == books

    @rule(data=st.data())
    def step(self, data):
        plan = self.part.plan()
        if not self.running:
            entering, self.waiting = self.waiting[: self.room], self.waiting[self.room :]
            self.running = {s.sequence_id: s for s in entering}
            assert [e.sequence_id for e in plan.entered] == list(self.running)
            for entered, new in zip(plan.entered, entering, strict=True):
                assert (entered.token_ids, entered.num_prompt) == (tuple(new.token_ids), new.num_prompt)
                assert (entered.params, entered.seed) == (new.params, new.seed)
        else:
            assert plan.entered == ()
        assert [row.sequence_id for row in plan.rows] == list(self.running)
        assert (sorted(plan.left), self.left, plan.preempted) == (sorted(self.left), self.left, ())
        self.left = []
        results = [self.check_and_run(row, data) for row in plan.rows]
        self.part.update(plan, results)
        for row in plan.rows:
            if self.running[row.sequence_id].finished:
                self.end(row.sequence_id)

    def check_and_run(self, row, data):
        one = self.running[row.sequence_id]
        assert row.start == one.num_computed and row.want is Want.LAST
        drafts = self.drafts.pop(row.sequence_id, ())
        assert row.num_drafts == len(drafts)
        assert row.token_ids == (*one.token_ids[one.num_computed :], *drafts)
        # Should every draft be accepted, one token more is chosen: that must be within the limit too.
        assert len(one.token_ids) + row.num_drafts + 1 <= one.max_total
        # Slots for all that runs, and the books agree on what is in them.
        assert row.start + len(row.token_ids) <= len(row.pages[0]) * PAGE
        assert self.part.allocator.reserve(row.sequence_id, one.token_ids, one.max_total) == row.start
        one.accept([5] * data.draw(st.integers(1, row.num_drafts + 1)))
        self.part.allocator.commit(row.sequence_id, one.token_ids, one.num_computed)
        # All that is proposed within what was asked for must fit; what is proposed beyond must not harm.
        proposed = tuple(data.draw(st.lists(st.integers(20, 29), max_size=row.drafts_wanted + 2)))
        room = one.max_total - len(one.token_ids) - 1
        assert row.drafts_wanted <= max(room, 0)
        if not one.finished:
            self.drafts[row.sequence_id] = proposed[: max(room, 0)]
        return RowResult(sequence_id=row.sequence_id, token_ids=(5,), drafts=proposed)

    def end(self, sequence_id):
        self.part.remove(sequence_id)
        if self.running.pop(sequence_id, None) is not None:
            self.left.append(sequence_id)
        self.waiting = [s for s in self.waiting if s.sequence_id != sequence_id]
        self.drafts.pop(sequence_id, None)
        self.gone.append(sequence_id)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), twice=st.booleans())
    def cancel(self, data, twice):
        target = data.draw(st.sampled_from([*(s.sequence_id for s in self.waiting), *self.running]))
        for _ in range(1 + twice):
            self.end(target)

    @rule(data=st.data())
    def cancel_what_is_gone_or_never_was(self, data):
        self.part.remove(data.draw(st.sampled_from([("nobody", 0), *self.gone])))

    @invariant()
    def the_books_agree(self):
        self.part.allocator.check_integrity()
        assert (self.part.num_waiting, self.part.num_running) == (len(self.waiting), len(self.running))
        assert self.part.allocator.stats().used == 3 * len(self.running)
        assert len(self.running) <= self.room

    def teardown(self):
        """All that still waits is served within a bounded number of steps."""
        if not hasattr(self, "part"):
            return
        sequences = {s.sequence_id: s for s in [*self.waiting, *self.running.values()]}
        tokens = sum(s.max_total - len(s.token_ids) for s in sequences.values())
        for _ in range(tokens):
            step(self.part, sequences)
        assert all(s.finished for s in sequences.values())
        assert (self.part.num_waiting, self.part.num_running, self.part.allocator.stats().used) == (0, 0, 0)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


# --- one thing each ---------------------------------------------------------------------------------------------------


def test_a_batch_runs_until_its_last_sequence_is_done_before_the_next_is_filled():
    part = scheduler(max_batch=2)
    sequences = enter(part, sequence("short", limit=1), sequence("long", limit=3), sequence("next"))
    batches = [ids(step(part, sequences).rows) for _ in range(5)]
    assert batches == [["short", "long"], ["long"], ["long"], ["next"], ["next"]]
    assert part.plan().rows == ()


def test_the_first_row_is_the_whole_prompt_and_later_ones_a_token():
    part = scheduler()
    sequences = enter(part, sequence("a", prompt=5, limit=3))
    plans = [step(part, sequences) for _ in range(3)]
    assert [(p.rows[0].start, p.rows[0].token_ids) for p in plans] == [(0, (0, 1, 2, 3, 4)), (5, (7,)), (6, (7,))]
    assert [len(p.entered) for p in plans] == [1, 0, 0]
    assert len({p.rows[0].pages for p in plans}) == 1


def test_a_batch_is_no_larger_than_the_cache_has_room_for():
    part = scheduler(max_batch=8, num_regions=3)
    sequences = enter(part, *(sequence(f"r{i}", limit=1) for i in range(7)))
    assert [len(step(part, sequences).rows) for _ in range(3)] == [3, 3, 1]


def test_proposals_are_the_drafts_of_the_next_row_only():
    part = scheduler()
    sequences = enter(part, sequence("a", prompt=2, limit=6))
    first = step(part, sequences, propose=lambda row: (21, 22))
    assert (first.rows[0].num_drafts, first.rows[0].drafts_wanted) == (0, 4)
    second = step(part, sequences)
    assert (second.rows[0].token_ids, second.rows[0].num_drafts) == ((7, 21, 22), 2)
    # 3 tokens are there; were both drafts right there would be 6, and of the 2 that are left only one can be a draft.
    assert second.rows[0].drafts_wanted == 1
    assert step(part, sequences).rows[0].num_drafts == 0


def test_no_draft_is_wanted_where_one_token_is_left():
    part = scheduler()
    sequences = enter(part, sequence("a", prompt=2, limit=2))
    assert [step(part, sequences).rows[0].drafts_wanted for _ in range(2)] == [0, 0]


def test_more_drafts_than_there_is_room_for_are_cut():
    part = scheduler()
    sequences = enter(part, sequence("a", prompt=2, limit=4))
    step(part, sequences, propose=lambda row: range(20, 40))
    row = step(part, sequences).rows[0]
    assert row.token_ids == (7, 20, 21)


def test_results_of_a_sequence_that_was_cancelled_meanwhile_are_dropped():
    part = scheduler()
    sequences = enter(part, sequence("a", limit=5), sequence("b", limit=5))
    plan = part.plan()
    part.remove(("a", 0))
    part.update(plan, [RowResult(sequence_id=(name, 0), token_ids=(7,), drafts=(21,)) for name in "ab"])
    assert ids(part.plan().rows) == ["b"]
    assert sequences[("a", 0)].num_computed == 0


def test_a_sequence_that_left_is_reported_once_and_one_that_never_ran_is_not():
    part = scheduler(max_batch=1)
    sequences = enter(part, sequence("a", limit=1), sequence("b"), sequence("c"))
    step(part, sequences)
    part.remove(("b", 0))
    assert step(part, sequences).left == (("a", 0),)
    part.remove(("c", 0))
    part.remove(("c", 0))
    assert [part.plan().left for _ in range(2)] == [(("c", 0),), ()]


@pytest.mark.parametrize("name", ["max_batch", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1])
def test_options_below_one_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"'{name}' must be >= 1: {value}"):
        evolve(StaticOptions(), **{name: value})
