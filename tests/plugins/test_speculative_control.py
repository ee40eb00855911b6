"""When speculation pays: the rule against brute force, its exceptions, and what it must never do."""

import itertools
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engines import scripted_engine
from intarsia.protocols import Drafter, DraftRequest, StepCost, Verified
from intarsia.testing.drafters import DrafterContract
from intarsia.types import Draft, Provider, SamplingParams
from intarsia_speculative.acceptance import Acceptance, Rate
from intarsia_speculative.control import MARGIN, Adaptive, Capped, best, counts, ladder
from intarsia_speculative.cost import CostCurve, bucket
from models import tiny_llama

CHANCES = st.lists(st.floats(0, 1), min_size=1, max_size=3)


def brute_force(chances, limits, cost):
    """The best allotment of all there are."""
    best_rate, found = 0.0, None
    for taken in itertools.product(*(range(limit + 1) for limit in limits)):
        tokens = sum(1 + sum(a**j for j in range(1, n + 1)) for a, n in zip(chances, taken, strict=True))
        rate = tokens / cost(sum(taken))
        rate /= 1 if not any(taken) else 1 + MARGIN
        if rate > best_rate * (1 + 1e-12):
            best_rate, found = rate, taken
    return best_rate, found


def allot(chances, limits, cost):
    rungs = ladder(chances, limits)
    return counts(rungs, best(rungs, len(chances), lambda n, _: cost(n)), len(chances))


# --- the rule ---------------------------------------------------------------------------------------------------------


@given(data=st.data(), chances=CHANCES)
def test_the_rule_is_the_best_of_all_allotments_whatever_the_costs(data, chances):
    limits = data.draw(st.lists(st.integers(0, 3), min_size=len(chances), max_size=len(chances)))
    table = data.draw(st.lists(st.floats(0.1, 10), min_size=10, max_size=10))
    rate, _ = brute_force(chances, limits, table.__getitem__)
    taken = allot(chances, limits, table.__getitem__)
    tokens = sum(1 + sum(a**j for j in range(1, n + 1)) for a, n in zip(chances, taken, strict=True))
    own = tokens / table[sum(taken)] / (1 + MARGIN if any(taken) else 1)
    assert own == pytest.approx(rate)
    assert all(n <= limit for n, limit in zip(taken, limits, strict=True))


@given(low=st.floats(0, 1), high=st.floats(0, 1), slope=st.floats(0, 2), limit=st.integers(0, 12))
def test_a_row_gets_no_fewer_drafts_as_its_acceptance_grows(low, high, slope, limit):
    low, high = sorted((low, high))
    assume(high - low > 1e-6 or high == low)
    more, fewer = (allot([a], [limit], lambda n: 1 + slope * n) for a in (high, low))
    assert more >= fewer


@given(chances=st.lists(st.floats(0, 1), min_size=2, max_size=6), slope=st.floats(0, 0.5))
def test_of_two_rows_the_more_accepted_gets_no_fewer(chances, slope):
    taken = allot(chances, [6] * len(chances), lambda n: 1 + slope * n)
    for (a, n), (b, m) in itertools.permutations(zip(chances, taken, strict=True), 2):
        assert n >= m or a <= b


@given(chances=st.lists(st.floats(0, 0.9), min_size=1, max_size=16))
def test_where_each_token_costs_as_much_as_the_last_nothing_is_drafted(chances):
    rows = len(chances)
    assert not any(allot(chances, [8] * rows, lambda n: rows + n))


@given(chances=st.lists(st.floats(0.2, 1), min_size=1, max_size=16))
def test_where_more_tokens_cost_nothing_all_that_brings_anything_is_drafted(chances):
    taken = allot(chances, [2] * len(chances), lambda n: 1)
    assert taken == [2] * len(chances)


def test_a_jump_in_the_costs_does_not_hide_what_is_behind_it():
    """One draft costs as much as eight: a rule that looks at the next one alone would never begin."""
    assert allot([0.8], [8], lambda n: 1.9 if n else 1) == [8]
    assert allot([0.3], [8], lambda n: 1.9 if n else 1) == [0]


def test_what_drafting_costs_counts():
    rungs = ladder([0.9], [8])
    assert best(rungs, 1, lambda n, depth: 1 + 0.01 * n) == 8
    assert best(rungs, 1, lambda n, depth: 1 + 0.01 * n + 0.95 * depth) == 0


# --- costs and acceptance ---------------------------------------------------------------------------------------------


def curve(pairs, times=3):
    costs = CostCurve()
    for _ in range(times):
        for tokens, seconds in pairs:
            costs.add(tokens, seconds)
    return costs


def test_costs_are_what_was_measured_and_between_that_in_between():
    costs = curve([(1, 0.010), (9, 0.018)])
    assert costs.seconds(1) == pytest.approx(0.010)
    assert costs.seconds(9) == pytest.approx(0.018)
    assert 0.010 < costs.seconds(5) < 0.018
    assert costs.seconds(40) > costs.seconds(9)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 1)), max_size=30), st.integers(1, 5000))
def test_a_cost_is_always_a_time(samples, tokens):
    costs = CostCurve()
    for sample in samples:
        costs.add(*sample)
    assert 0 < costs.seconds(tokens) < 1e6


def test_buckets_are_few_and_never_below_their_tokens():
    assert [bucket(t) for t in (1, 32, 33, 64, 65)] == [1, 32, 36, 64, 72]
    assert all(t <= bucket(t) <= 1.25 * t for t in range(1, 5000))
    assert len({bucket(t) for t in range(1, 4097)}) < 100


def test_a_busy_machine_changes_no_ratio():
    """Everything takes ten times as long for a while, first at one size and then at the other."""
    costs = curve([(1, 0.01), (9, 0.015)], times=10)
    for _ in range(50):
        costs.add(9, 0.15)
    assert costs.seconds(9) / costs.seconds(1) == pytest.approx(1.5, rel=0.05)
    assert costs.seconds(9) == pytest.approx(0.15, rel=0.05)


def test_a_few_slow_steps_change_nothing():
    costs = curve([(1, 0.01), (9, 0.015)], times=10)
    for _ in range(2):
        costs.add(9, 3.0)
    assert costs.seconds(9) == pytest.approx(0.015)


def test_the_first_step_of_a_size_is_not_trusted():
    costs = CostCurve()
    costs.add(1, 5.0)
    assert not costs.is_known
    costs.add(1, 0.01)
    assert costs.seconds(1) == pytest.approx(0.01)


def test_acceptance_is_found_and_forgotten():
    rate, rng = Rate(24.0), random.Random(0)
    for _ in range(500):
        rate.add(1, 0) if rng.random() < 0.8 else rate.add(0, 1)
    assert rate.toward(0.5, 3) == pytest.approx(0.8, abs=0.15)
    rate.add(0, 60)
    assert rate.toward(0.5, 3) < 0.15


def test_a_new_request_begins_with_what_others_of_its_grade_had():
    acceptance = Acceptance()
    for i in range(50):
        acceptance.learn((f"{i}", 0), 5, 4, 0)
        acceptance.learn((f"{i}", 0), 2, 0, 1)
    assert acceptance.chance(("new", 0), 5) > 0.95
    assert acceptance.chance(("new", 0), 2) < 0.1
    assert acceptance.chance(("new", 0), 3) == 0.5


# --- the drafter under control ----------------------------------------------------------------------------------------


class Fixed(Drafter):
    """Proposes its ids, however many are wanted."""

    def __init__(self, ids):
        self.ids, self.asked = ids, []

    def propose(self, requests):
        self.asked += [request.wanted for request in requests]
        return [Draft(tuple(self.ids)) for _ in requests]


def simulate(adaptive, cost, rows, steps, right, wanted=8):
    """Run steps whose answers are zeros; each guess is a zero with the chance `right`. Return tokens and seconds."""
    rng = random.Random(1)
    known = {(f"{i}", 0): [0] for i in range(rows)}
    drafts = dict.fromkeys(known, ())
    tokens, seconds, counted = 0, 0.0, []
    for _ in range(steps):
        verified, num_tokens = [], 0
        for one, ids in known.items():
            agreeing = len(list(itertools.takewhile(lambda token: token == 0, drafts[one])))
            ids += [0] * (agreeing + 1)
            tokens += agreeing + 1
            num_tokens += 1 + len(drafts[one])
            if drafts[one]:
                verified.append(Verified(sequence_id=one, drafted=len(drafts[one]), accepted=agreeing))
        seconds += cost(num_tokens)
        counted.append(num_tokens - rows)
        adaptive.observe(verified, StepCost(num_rows=rows, num_tokens=num_tokens, target_s=cost(num_tokens), draft_s=0))
        adaptive.inner.ids = [0 if rng.random() < right else 1 for _ in range(8)]
        asked = [DraftRequest(sequence_id=one, token_ids=ids, wanted=wanted) for one, ids in known.items()]
        drafts = {one: d.token_ids for one, d in zip(known, adaptive.propose(asked), strict=True)}
    return tokens, seconds, counted


def test_speculation_is_on_where_tokens_are_free_and_guesses_right():
    tokens, seconds, _ = simulate(Adaptive(Fixed([]), 8, is_cheap=True), lambda t: 1 + 0.02 * t, 1, 300, right=0.9)
    assert tokens / seconds > 3.5 / 1.02


@pytest.mark.parametrize("is_cheap", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_speculation_turns_itself_off_where_steps_are_bound_by_arithmetic(rows, is_cheap):
    """Never below 0.97 of plain decoding, whatever the guesses are worth."""
    for right in (0.0, 0.3, 0.6, 0.8):
        adaptive = Adaptive(Fixed([]), 8, is_cheap=is_cheap)
        tokens, seconds, counted = simulate(adaptive, lambda t: t, rows, 300, right)
        assert tokens / seconds >= 0.97 / 1.0, (right, adaptive.stats())
        assert sum(map(bool, counted[100:])) < 0.1 * len(counted[100:])


def test_wrong_guesses_cost_next_to_nothing_where_tokens_are_cheap():
    tokens, seconds, _ = simulate(Adaptive(Fixed([]), 8, is_cheap=True), lambda t: 1 + 0.1 * t, 1, 300, right=0.05)
    assert tokens / seconds >= 0.97 / 1.1


def test_it_comes_back_when_guesses_become_right():
    adaptive = Adaptive(Fixed([]), 8, is_cheap=False)
    simulate(adaptive, lambda t: 1 + 0.02 * t, 1, 200, right=0.0)
    _, _, counted = simulate(adaptive, lambda t: 1 + 0.02 * t, 1, 600, right=1.0)
    assert sum(counted[-50:]) > 6 * 50


def test_it_comes_back_when_steps_become_cheap():
    adaptive = Adaptive(Fixed([]), 8, is_cheap=True)
    simulate(adaptive, lambda t: t, 4, 200, right=0.8)
    _, _, counted = simulate(adaptive, lambda t: 10 + 0.01 * t, 4, 1200, right=0.8)
    assert sum(counted[-50:]) > 8 * 50


@settings(max_examples=50)
@given(data=st.data(), is_cheap=st.booleans(), k=st.integers(1, 8))
def test_no_more_is_proposed_than_wanted_and_equal_inputs_give_equal_answers(data, is_cheap, k):
    one, two = (Adaptive(Fixed([]), k, is_cheap) for _ in range(2))
    known = {("a", 0): [1], ("b", 0): [2]}
    for _ in range(data.draw(st.integers(1, 20))):
        wanted = data.draw(st.integers(0, 10))
        ids = data.draw(st.lists(st.integers(0, 1), max_size=10))
        asked = [DraftRequest(sequence_id=name, token_ids=tuple(known[name]), wanted=wanted) for name in known]
        answers = []
        for drafter in (one, two):
            drafter.inner.ids = ids
            answers.append([draft.token_ids for draft in drafter.propose(asked)])
        assert answers[0] == answers[1]
        assert all(len(answer) <= min(wanted, k) for answer in answers[0])
        assert all(tuple(ids[: len(answer)]) == answer for answer in answers[0])
        drafted = sum(map(len, answers[0]))
        cost = StepCost(num_rows=2, num_tokens=2 + drafted, target_s=data.draw(st.floats(0, 1)), draft_s=0.01)
        verified = [Verified(sequence_id=("a", 0), drafted=drafted, accepted=0)] if drafted else []
        for drafter in (one, two):
            drafter.observe(verified, cost)
        for name in known:
            known[name] += data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
    assert one.stats() == two.stats()


def test_without_control_k_are_asked_for():
    inner = Fixed([1, 2, 3])
    capped = Capped(inner, 2)
    request = DraftRequest(sequence_id=("a", 0), token_ids=[1], wanted=9)
    capped.propose([request])
    assert inner.asked == [2]


def test_a_sequence_that_left_leaves_nothing_behind():
    adaptive = Adaptive(Fixed([1]), 4, is_cheap=True)
    adaptive.propose([DraftRequest(sequence_id=("a", 0), token_ids=[1], wanted=4)])
    adaptive.propose([DraftRequest(sequence_id=("a", 0), token_ids=[1, 1], wanted=4)])
    adaptive.forget(("a", 0))
    assert not adaptive._guesses and not adaptive._grades and not adaptive.acceptance._requests


# --- in an engine -----------------------------------------------------------------------------------------------------


class Dice(Drafter):
    """Proposes anything, ids outside the vocabulary among it; more than was wanted, too."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def propose(self, requests):
        return [
            Draft(tuple(self.random.choice((0, 3, 3, 3, 4, 5, -7, 10**9)) for _ in range(self.random.randint(0, 9))))
            for _ in requests
        ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("control"), layers=1, hidden=16, heads=2, kv_heads=1, ffn=16)[0]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    script=st.lists(st.sampled_from((3, 3, 3, 4, 5)), min_size=1, max_size=24),
    max_tokens=st.integers(1, 24),
    stop=st.sampled_from(((), (5,), (4, 5))),
    costs=st.lists(st.floats(1e-4, 1), min_size=1, max_size=5),
    is_cheap=st.booleans(),
)
def test_whatever_is_decided_the_answer_is_the_script(tiny, seed, script, max_tokens, stop, costs, is_cheap):
    """Random drafters, costs, stops and limits."""
    from intarsia.hookspecs import hookimpl

    class Noisy(Adaptive):
        def observe(self, verified, cost):
            taken = costs[self.figures.steps % len(costs)]
            super().observe(
                verified,
                StepCost(num_rows=cost.num_rows, num_tokens=cost.num_tokens, target_s=taken, draft_s=taken / 9),
            )

    class Plugin:
        @hookimpl
        def provide_drafters(self):
            return [Provider(key="dice", summary="dice", build=lambda _: Noisy(Dice(seed), 6, is_cheap))]

    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop)
    wanted = (script + [0] * 24)[:max_tokens]
    end = next((i + 1 for i, token in enumerate(wanted) if token in stop), None)
    from intarsia.testing import scripted

    runner = {"use": "scripted", "ids": script, "prompt_tokens": 1}
    from engines import engine_of

    with engine_of(tiny, runner=runner, drafter="dice", plugins=[scripted, Plugin()]) as engine:
        (answer,) = engine.generate([[1]], params)
        assert answer.token_ids == tuple(wanted[:end])
        assert answer.finish_reason == ("length" if end is None else "stop")
        assert not engine.stats()["speculation"]["failures"]


def test_the_inputs_of_the_rule_are_in_the_figures(tiny):
    options = {"use": "ngram", "k": 4}
    with scripted_engine(tiny, [3] * 60, drafter=options) as engine:
        engine.generate([[1]], SamplingParams(temperature=0, max_tokens=60))
        own = engine.stats()["speculation"]["own"]
    assert own["chosen"].keys() == {"rows", "base_tokens", "chance", "offered", "by_rule", "drafts"}
    assert own["step_s"] and own["acceptance"] and own["patience"]
    assert own["accepted"] <= own["drafted"] and own["drafting_steps"] <= own["steps"]


# --- the contract asks for no sense -----------------------------------------------------------------------------------


def test_the_contract_finds_nothing_wrong_with_a_drafter_that_says_anything_of_the_right_length():
    class Anything(Drafter):
        def propose(self, requests):
            rng = random.Random(len(requests))
            return [Draft(tuple(rng.choice((0, 1, 63, 64, -1)) for _ in range(min(4, r.wanted)))) for r in requests]

    class Contract(DrafterContract):
        def provider(self):
            return Provider(key="anything", summary="anything", build=lambda _: Anything())

    Contract().test_drafts_change_no_answer()
