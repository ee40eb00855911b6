"""In-flight batching with several steps in flight: plans name ids that are not chosen yet, and answers stay right."""

from collections import deque

import pytest
from attrs import define, evolve, field
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from intarsia.defaults.contiguous import ContiguousAllocator
from intarsia.types import PENDING, CacheGroup, CacheLayout, Want
from intarsia_inflight.options import InflightOptions
from intarsia_inflight.scheduler import InflightScheduler
from intarsia_paged.allocator import PagedAllocator
from intarsia_paged.options import PagedOptions
from simulation import SimulatedSequence, Simulation, answer

MAX_LEN = 24
#: shrinking long lives takes minutes; a failing life is short enough to read as it is
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@define(eq=False)
class Ahead(Simulation):
    """A simulation whose device runs each plan when it is submitted, and whose host hears of it `depth` plans later.

    The device knows sequences by what plans told it alone: shadows, which go on where the host has ended them.
    """

    depth: int = 2
    names_pending: bool = True
    stop: int | None = None
    shadows: dict = field(factory=dict, init=False)
    flight: deque = field(factory=deque, init=False)
    discarded: int = field(default=0, init=False)

    def step(self):
        while len(self.flight) < self.depth:
            plan = self._submit()
            if not plan.rows:
                break
        if self.flight:
            self._collect(*self.flight.popleft())
        self.allocator.check_integrity()
        return self.log[-1]

    def _submit(self):
        plan = self.scheduler.plan()
        self.log.append(plan)
        flying = [
            row
            for each, _, sequences in self.flight
            for row, s in zip(each.rows, sequences, strict=True)
            if self._lives(s)
        ]
        assert not {row.sequence_id for row in flying} & set(plan.preempted), "it has a row in flight"
        if not self.names_pending:
            waiting = {row.sequence_id for row in flying if row.want is Want.LAST}
            assert not waiting & {row.sequence_id for row in plan.rows}, "its next row's ids are not known"
        for sequence_id in plan.left:
            self.shadows.pop(sequence_id, None)
        for sequence_id in plan.preempted:
            self.sequences[sequence_id].num_computed = 0
        for entered in plan.entered:
            self.shadows[entered.sequence_id] = self._shadow(entered)
        sequences = [self.sequences[row.sequence_id] for row in plan.rows]
        results = self._run_plan(plan)
        for row, sequence in zip(plan.rows, sequences, strict=True):
            sequence.cached_tokens = row.start if sequence.cached_tokens is None else sequence.cached_tokens
        assert plan.rows or not plan.entered
        if plan.rows or plan.left or plan.moves:
            self.flight.append((plan, results, sequences))
            self.scheduler.expect(plan, names_pending=self.names_pending)
        return plan

    def _run_plan(self, plan):
        """Check and run a plan with the device's sequences in the place of the host's."""
        rows = [self._resolved(row) for row in plan.rows]
        host, self.sequences = self.sequences, self.sequences | self.shadows
        try:
            self._check_plan(evolve(plan, rows=tuple(rows)))
            for move in plan.moves:
                self._move(move)
            results = [self._run(row) for row in rows]
        finally:
            self.sequences = host
        for result in results:
            self.shadows[result.sequence_id].token_ids += result.token_ids
        return results

    def _lives(self, sequence):
        return self.sequences.get(sequence.sequence_id) is sequence

    def _shadow(self, entered):
        shadow = SimulatedSequence(
            entered.sequence_id,
            list(entered.token_ids),
            self.sequences[entered.sequence_id].max_total,
            salt=self.sequences[entered.sequence_id].salt,
        )
        shadow.num_prompt = entered.num_prompt
        return shadow

    def _resolved(self, row):
        """Only what the host does not know is pending, and the device knows it by now."""
        known, device = self.sequences[row.sequence_id].token_ids, self.shadows[row.sequence_id].token_ids
        ids = list(row.token_ids)
        for i in range(len(ids) - row.num_drafts):
            assert (ids[i] == PENDING) == (row.start + i >= len(known))
            if ids[i] == PENDING:
                ids[i] = device[row.start + i]
        return evolve(row, token_ids=tuple(ids))

    def _collect(self, plan, results, sequences):
        live = [each for each in zip(plan.rows, results, sequences, strict=True) if self._lives(each[2])]
        self.discarded += len(plan.rows) - len(live)
        for row, result, sequence in live:
            tokens = list(result.token_ids[: sequence.max_total - len(sequence.token_ids)])
            if self.stop in tokens:
                tokens = tokens[: tokens.index(self.stop) + 1]
                sequence.max_total = len(sequence.token_ids) + len(tokens)
            sequence.token_ids += tokens
            sequence.num_computed = len(sequence.token_ids) - 1 if tokens else row.start + len(row.token_ids)
            self.allocator.commit(row.sequence_id, sequence.token_ids, sequence.num_computed)
        kept = tuple(row for row, _, _ in live)
        self.scheduler.update(evolve(plan, rows=kept), [result for _, result, _ in live])
        for row, _, sequence in live:
            if len(sequence.token_ids) >= sequence.max_total:
                self.scheduler.remove(row.sequence_id)
                self.finished[row.sequence_id] = self.sequences.pop(row.sequence_id)

    def run(self, limit=10_000):
        super().run(limit)
        while self.flight:
            self._collect(*self.flight.popleft())


def layout(page_size, windows=(None,)):
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


def ahead(
    *,
    page_size=4,
    num_pages=64,
    windows=(None,),
    contiguous=False,
    prefix=True,
    depth=2,
    names_pending=True,
    stop=None,
    propose=None,
    **options,
):
    facts = layout(page_size, windows)
    if contiguous:
        region = -(-MAX_LEN // page_size)
        books = ContiguousAllocator(
            page_size=page_size, num_groups=len(windows), region_pages=region, num_regions=max(1, num_pages // region)
        )
    else:
        books = PagedAllocator(PagedOptions(page_size=page_size, prefix=prefix), facts, num_pages)
    settled = InflightOptions(**options)
    return Ahead(
        InflightScheduler(settled, books),
        books,
        facts,
        max_tokens=settled.max_tokens,
        max_batch=settled.max_batch,
        propose=propose,
        depth=depth,
        names_pending=names_pending,
        stop=stop,
    )


def expected(prompt, num_tokens, stop):
    ids = answer(prompt, num_tokens)
    return ids[: ids.index(stop) + 1] if stop in ids else ids


def is_idle(sim):
    return (sim.scheduler.num_waiting, sim.scheduler.num_running, sim.allocator.stats().used) == (0, 0, 0)


def rows(plan):
    return {row.sequence_id[0]: row.token_ids for row in plan.rows}


# --- what is planned --------------------------------------------------------------------------------------------------


def test_a_step_is_planned_before_the_one_in_front_of_it_is_collected():
    sim = ahead()
    sim.add("a", [1, 2], 3)
    sim.step()
    assert [rows(plan) for plan in sim.log] == [{"a": (1, 2)}, {"a": (PENDING,)}]
    sim.run()
    assert sim.finished["a", 0].output == answer([1, 2], 3)
    assert sum(len(plan.rows) for plan in sim.log) == 3, "nothing is planned beyond a limit that is known"
    assert sim.discarded == 0 and is_idle(sim)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_what_runs_beyond_a_stop_is_discarded_and_no_more_than_is_in_flight(depth):
    prompt = next([i, j] for i in range(3) for j in range(3) if 3 in answer([i, j], 8)[1:6])
    sim = ahead(depth=depth, stop=3)
    sim.add("a", prompt, 20)
    sim.run()
    assert sim.finished["a", 0].output == expected(prompt, 20, 3)
    assert sim.discarded == depth - 1 and is_idle(sim)


def test_chunks_of_a_prompt_follow_one_another_without_waiting():
    sim = ahead(max_tokens=3, depth=3, names_pending=False)
    sim.add("a", [0, 1, 2] * 3, 2)
    sim.step()
    assert [rows(plan)["a"] for plan in sim.log] == [(0, 1, 2)] * 3
    sim.step()
    assert not sim.log[-1].rows, "its next id is not known, and cannot be named"
    sim.run()
    assert sim.finished["a", 0].output == answer([0, 1, 2] * 3, 2)


def test_a_sequence_whose_next_id_cannot_be_named_is_in_one_step_at_a_time():
    sim = ahead(names_pending=False, max_tokens=3)
    sim.add("a", [1, 2, 0, 2], 4)
    sim.step()
    sim.add("b", [2], 4)
    for _ in range(4):
        sim.step()
    assert [set(rows(plan)) for plan in sim.log[:6]] == [{"a"}, {"a"}, {"b"}, {"a"}, {"b"}, {"a"}]
    sim.run()
    assert [sim.finished[n, 0].output for n in "ab"] == [answer([1, 2, 0, 2], 4), answer([2], 4)]


def test_rows_with_drafts_wait_for_what_became_of_them():
    sim = ahead(names_pending=False, propose=lambda context: [*answer(context, 2), 9])
    sim.add("a", [1, 2], 16)
    sim.run()
    assert sim.finished["a", 0].output == answer([1, 2], 16)
    assert any(row.num_drafts for plan in sim.log for row in plan.rows)
    assert not any(PENDING in row.token_ids for plan in sim.log for row in plan.rows)


def test_proposals_behind_which_a_row_is_in_flight_are_dropped():
    sim = ahead(propose=lambda context: answer(context, 3))
    sim.add("a", [1, 2], 12)
    sim.run()
    assert sim.finished["a", 0].output == answer([1, 2], 12)


def test_nobody_is_preempted_before_what_is_in_flight_is_collected():
    sim = ahead(num_pages=13, page_size=4)
    prompts = {f"r{i}": [(i + j) % 3 for j in range(10)] for i in range(6)}
    for name, prompt in prompts.items():
        sim.add(name, prompt, 10)
    sim.run()
    assert sum(len(plan.preempted) for plan in sim.log) > 0
    assert all(sim.finished[name, 0].output == answer(prompt, 10) for name, prompt in prompts.items())
    assert next(iter(sim.finished)) == ("r0", 0) and is_idle(sim)


def test_a_higher_priority_takes_its_place_as_soon_as_nothing_is_in_flight():
    sim = ahead(num_pages=2, page_size=16, prefix=False)
    for name in ("low-1", "low-2"):
        sim.add(name, [1] * 5, 8)
    sim.step()
    sim.add("high", [2] * 5, 3, priority=5)
    sim.step()
    assert set(rows(sim.log[-1])) == {"low-1", "low-2"} and not sim.log[-1].preempted
    sim.step()
    assert not sim.log[-1].rows and not sim.log[-1].preempted
    sim.step()
    preempting = next(plan for plan in sim.log if plan.preempted)
    assert preempting.preempted == (("low-2", 0),) and ("high" in rows(preempting))
    sim.run()
    assert all(sim.finished[n, 0].output == answer([1] * 5, 8) for n in ("low-1", "low-2"))


def test_choices_fork_a_prompt_that_is_computed_and_not_one_in_flight():
    sim = ahead(prefix=False, depth=3)
    for choice in range(3):
        sim.add("n", [1, 2, 0, 2, 1], 6, choice=choice)
    sim.run()
    assert all(sim.finished["n", c].output == answer([1, 2, 0, 2, 1], 6) for c in range(3))
    assert [sim.finished["n", c].cached_tokens for c in (1, 2)] == [4, 4]


def test_a_prompt_waits_for_the_same_one_in_flight():
    shared = [i % 3 for i in range(100)]
    sim = ahead(num_pages=400)
    for n in range(3):
        sim.add(f"p{n}", [*shared, n], 3)
    sim.run()
    assert [sim.finished[f"p{n}", 0].cached_tokens for n in range(3)] == [0, 100, 100]


@pytest.mark.parametrize("steps", range(6))
def test_an_id_can_be_taken_anew_while_the_old_one_is_in_flight(steps):
    sim = ahead(max_tokens=4)
    sim.add("a", [0] * 7, 9)
    sim.add("b", [2], 9)
    for _ in range(steps):
        sim.step()
    sim.cancel(("a", 0))
    sim.add("a", [1] * 6, 5)
    sim.run()
    assert sim.finished["a", 0].output == answer([1] * 6, 5) and sim.finished["b", 0].output == answer([2], 9)
    assert is_idle(sim)


# --- whatever happens -------------------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Random arrivals, choices, cancels and steps: every plan is checked, and every answer is the solo answer."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        spare=st.integers(0, 12),
        windows=st.sampled_from([(None,), (None, 5), (4,)]),
        contiguous=st.booleans(),
        prefix=st.booleans(),
        max_tokens=st.sampled_from([1, 3, 5, 40]),
        max_batch=st.integers(1, 5),
        ageing_steps=st.integers(1, 20),
        depth=st.integers(2, 4),
        names_pending=st.booleans(),
        stop=st.sampled_from([None, 3]),
        guess=st.sampled_from([None, None, "right", "wrong"]),
    )
    def begin(self, page_size, spare, guess, **options):
        def propose(context):
            return {"right": answer(context, 3), "wrong": [9, 9]}[guess]

        least = -(-MAX_LEN // page_size)
        self.sim = ahead(page_size=page_size, num_pages=least + spare, propose=propose if guess else None, **options)
        self.count = 0
        self.expected = {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        num_tokens=st.integers(1, 10),
        priority=st.integers(-1, 2),
        choices=st.integers(1, 3),
        salt=st.sampled_from(["", "x"]),
    )
    def arrive(self, prompt, num_tokens, priority, choices, salt):
        name = f"s{self.count}"
        self.count += 1
        for choice in range(choices):
            self.sim.add(name, prompt, num_tokens, choice=choice, priority=priority, salt=salt)
            self.expected[name, choice] = expected(prompt, num_tokens, self.sim.stop)

    @precondition(lambda self: self.sim.sequences)
    @rule(data=st.data())
    def cancel(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.sim.sequences)))
        self.sim.cancel(sequence_id)
        del self.expected[sequence_id]

    @rule(steps=st.integers(1, 4))
    def go_on(self, steps):
        for _ in range(steps):
            self.sim.step()

    @invariant()
    def answers_are_solo_answers(self):
        for sequence_id, sequence in getattr(self, "sim", Simulation(None, None, None)).finished.items():
            assert sequence.output == self.expected[sequence_id]
            assert sequence.cached_tokens < sequence.num_prompt

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.run()
            self.answers_are_solo_answers()
            assert set(self.sim.finished) == set(self.expected)
            assert is_idle(self.sim)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, phases=PHASES)
