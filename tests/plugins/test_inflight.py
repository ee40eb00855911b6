"""In-flight batching over each allocator: budgets, turns, preemption, cancellation, forks; nobody waits for ever."""

import pytest

from intarsia.defaults.contiguous import ContiguousAllocator
from intarsia.types import CacheGroup, CacheLayout
from intarsia_inflight.contract import InflightContract
from intarsia_inflight.options import InflightOptions
from intarsia_inflight.queue import common_prefix
from intarsia_inflight.scheduler import InflightScheduler
from intarsia_paged.allocator import PagedAllocator
from intarsia_paged.options import PagedOptions
from simulation import Simulation, answer

MAX_LEN = 24


class TestContract(InflightContract):
    pass


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


def simulation(*, page_size=4, num_pages=None, windows=(None,), contiguous=False, prefix=True, propose=None, **options):
    facts = layout(page_size, windows)
    pages = num_pages if num_pages is not None else 64
    if contiguous:
        region = -(-MAX_LEN // page_size)
        books = ContiguousAllocator(
            page_size=page_size, num_groups=len(windows), region_pages=region, num_regions=max(1, pages // region)
        )
    else:
        books = PagedAllocator(PagedOptions(page_size=page_size, prefix=prefix), facts, pages)
    settled = InflightOptions(**options)
    part = InflightScheduler(settled, books)
    return Simulation(part, books, facts, max_tokens=settled.max_tokens, max_batch=settled.max_batch, propose=propose)


def is_idle(sim):
    books = sim.allocator.stats()
    return (sim.scheduler.num_waiting, sim.scheduler.num_running, books.used) == (0, 0, 0)


def preemptions(sim):
    return sum(len(plan.preempted) for plan in sim.log)


# --- filling a step ---------------------------------------------------------------------------------------------------


def test_a_finished_row_leaves_and_a_waiting_one_enters_at_the_very_next_step():
    sim = simulation(max_batch=2)
    for name, count in (("short", 2), ("long", 6), ("next", 3)):
        sim.add(name, [1, 2], count)
    running = [{row.sequence_id[0] for row in sim.step().rows} for _ in range(3)]
    assert running == [{"short", "long"}, {"short", "long"}, {"long", "next"}]


def test_running_rows_come_first_and_prompts_are_cut_to_what_is_left():
    sim = simulation(max_tokens=5)
    sim.add("first", [1, 2], 8)
    sim.step()
    sim.add("second", list(range(3)) * 4, 1)
    tokens = []
    while ("second", 0) in sim.sequences:
        plan = sim.step()
        tokens.append({row.sequence_id[0]: len(row.token_ids) for row in plan.rows})
    assert tokens == [{"first": 1, "second": 4}] * 3


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 36, 37, 38])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_answers_do_not_depend_on_budgets_or_page_sizes(max_tokens, page_size):
    prompts = {n: [(n + i) % 3 for i in range(n)] for n in (15, 16, 17, 31, 32, 33, 37)}
    sim = simulation(max_tokens=max_tokens, page_size=page_size, num_pages=1024)
    for n, prompt in prompts.items():
        sim.add(f"p{n}", prompt, 20)
    sim.run()
    for n, prompt in prompts.items():
        assert sim.finished[f"p{n}", 0].output == answer(prompt, 20)
    assert is_idle(sim)


# --- turns ------------------------------------------------------------------------------------------------------------


def test_first_come_first_served_and_nobody_overtakes_a_big_prompt():
    sim = simulation(num_pages=4, page_size=4, prefix=False)
    sim.add("running", [1] * 8, 4)  # three pages
    sim.step()
    sim.add("big", [2] * 10, 2)  # three pages: must wait
    sim.add("small", [3], 1)  # would fit at once
    order = []
    while sim.sequences:
        for row in sim.step().rows:
            if row.sequence_id[0] not in order:
                order.append(row.sequence_id[0])
    assert order == ["running", "big", "small"]


def test_a_higher_priority_takes_the_place_of_the_lowest_latest_arrival():
    sim = simulation(num_pages=4, page_size=4, prefix=False)
    for name in ("low-1", "low-2"):
        sim.add(name, [1] * 5, 3)
    sim.step()
    sim.add("high", [2] * 5, 3, priority=5)
    plan = sim.step()
    assert plan.preempted == (("low-2", 0),)
    assert {row.sequence_id[0] for row in plan.rows} == {"low-1", "high"}
    sim.run()
    for name, prompt in (("low-1", [1] * 5), ("low-2", [1] * 5), ("high", [2] * 5)):
        assert sim.finished[name, 0].output == answer(prompt, 3)
    assert list(sim.finished).index(("high", 0)) < list(sim.finished).index(("low-2", 0))


def test_equal_priorities_never_preempt_for_an_arrival():
    sim = simulation(num_pages=4, page_size=4, prefix=False)
    for name in ("a", "b"):
        sim.add(name, [1] * 4, 3)
    sim.step()
    sim.add("c", [2] * 5, 2)
    sim.run()
    assert preemptions(sim) == 0


def test_when_pages_run_out_the_latest_arrival_gives_way_and_says_the_same_in_the_end():
    sim = simulation(num_pages=13, page_size=4)  # 2.5 of 6
    prompts = {f"r{i}": [(i + j) % 3 for j in range(10)] for i in range(6)}
    for name, prompt in prompts.items():
        sim.add(name, prompt, 10)
    sim.run()
    assert preemptions(sim) > 0
    for name, prompt in prompts.items():
        assert sim.finished[name, 0].output == answer(prompt, 10)
    assert next(iter(sim.finished)) == ("r0", 0)
    assert is_idle(sim)


def test_waiting_raises_the_rank_so_that_a_stream_of_high_priorities_starves_nobody():
    ageing, high = 5, 4
    sim = simulation(num_pages=3, page_size=4, max_batch=1, ageing_steps=ageing, prefix=False)
    sim.add("low", [1, 2], 3)
    for step in range(400):
        sim.add(f"high-{step}", [2, 1], 2, priority=high)
        sim.step()
        if ("low", 0) in sim.finished:
            break
    # After (p - q) * ageing steps it stands before later arrivals; those ahead, one at a time, take two steps each.
    ahead = high * ageing + 1
    assert ("low", 0) in sim.finished and step <= high * ageing + 2 * ahead + 3
    sim.run(limit=3000)


@pytest.mark.parametrize("name", ["max_batch", "max_tokens", "max_waiting", "ageing_steps"])
def test_options_are_at_least_one(name):
    with pytest.raises(ValueError, match=rf"'{name}' must be >= 1: 0"):
        InflightOptions(**{name: 0})


@pytest.mark.parametrize("max_tokens", [40, 400])
def test_a_prompt_waits_for_one_in_front_that_computes_the_same(max_tokens):
    shared = [i % 3 for i in range(100)]
    prompts = [[*shared, n] for n in range(4)]
    sim = simulation(page_size=4, num_pages=400, max_tokens=max_tokens)
    for n, prompt in enumerate(prompts):
        sim.add(f"p{n}", prompt, 3)
    sim.add("other", [2] * 50, 3)
    sim.run()
    assert all(sim.finished[f"p{n}", 0].output == answer(prompt, 3) for n, prompt in enumerate(prompts))
    cached = [sim.finished[f"p{n}", 0].cached_tokens for n in range(4)]
    assert cached[0] == 0 and min(cached[1:]) > 100 - 64  # for fewer tokens than that nobody waits
    if max_tokens == 400:
        assert cached == [0, 100, 100, 100]
        assert sum(plan.num_tokens for plan in sim.log) == 101 + 3 * 1 + 50 + 5 * 2
    assert is_idle(sim)


def test_nothing_waits_for_what_it_could_not_find():
    for options in ({"prefix": False}, {"contiguous": True}):
        sim = simulation(page_size=4, num_pages=400, **options)
        for name in "ab":
            sim.add(name, [1] * 20, 2)
        assert len(sim.step().rows) == 2
    sim = simulation(page_size=4, num_pages=400)
    for name in "ab":
        sim.add(name, [1] * 100, 2, salt=name)
    assert len(sim.step().rows) == 2


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("prompt", [[1], [1, 2], [0, 1, 2, 1], [2, 1, 0, 1, 2, 1, 0, 2, 2]])
def test_further_choices_take_the_prompt_over_and_run_its_last_token(contiguous, prompt):
    sim = simulation(contiguous=contiguous, prefix=False, max_tokens=6)
    for choice in range(3):
        sim.add("n", prompt, 6, choice=choice)
    sim.run()
    assert all(sim.finished["n", choice].output == answer(prompt, 6) for choice in range(3))
    assert [sim.finished["n", choice].cached_tokens for choice in (1, 2)] == [len(prompt) - 1] * 2
    assert is_idle(sim)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8])
def test_the_common_prefix_is_counted_exactly(length):
    one = list(range(8))
    assert common_prefix(one, [*one[:length], 99, 98]) == length
    assert common_prefix([], one) == common_prefix(one, []) == 0
