"""The scheduler `srpt`: the contract of schedulers, and what is its own: whose turn it is."""

from intarsia.testing.caches import SimulatedCache
from intarsia.testing.schedulers import SchedulerContract
from intarsia.testing.simulation import SimulatedSequence, answer
from intarsia_srpt import provide_schedulers
from intarsia_srpt.turns import Entry, Turns

ROOMY = SimulatedCache(num_pages=200, max_len=64)


class TestContract(SchedulerContract):
    def provider(self):
        return provide_schedulers()[0]


def simulate(cache=ROOMY, **options):
    """Return a simulation of the scheduler with some of its options."""

    class Case(SchedulerContract):
        def provider(self):
            return provide_schedulers()[0]

    case = Case()
    limits = {name: options.pop(name) for name in ("max_batch", "max_tokens", "max_waiting") if name in options}
    case.options = options
    return case.simulate(cache, **limits)


def finished(sim):
    """Run to the end, and return the names in the order in which they finished."""
    sim.run()
    sim.check_answers()
    return [name for name, _ in sim.finished]


# --- the shortest first -----------------------------------------------------------------------------------------------


def test_the_shortest_request_that_waits_is_next_whatever_came_first():
    sim = simulate(max_batch=1)
    for name, prompt, num_tokens in (("long", 9, 9), ("middle", 3, 8), ("short", 2, 2), ("wordy", 2, 20)):
        sim.add(name, [1] * prompt, num_tokens)
    assert finished(sim) == ["short", "middle", "long", "wordy"]


def test_what_remains_counts_prompt_and_answer_alike():
    sim = simulate(max_batch=1)
    sim.add("of its prompt", [1] * 12, 2)
    sim.add("of its answer", [1] * 2, 11)
    assert finished(sim) == ["of its answer", "of its prompt"]


def test_a_short_prompt_goes_before_the_next_chunk_of_a_long_one():
    sim = simulate(max_tokens=4)
    sim.add("long", [1] * 20, 4)
    sim.step()
    sim.add("short", [2] * 3, 1)
    rows = {row.sequence_id[0]: len(row.token_ids) for row in sim.step().rows}
    assert rows == {"short": 3, "long": 1}
    assert finished(sim) == ["short", "long"]


def test_answers_in_progress_never_wait_for_prompts():
    sim = simulate(max_tokens=4)
    sim.add("answering", [1, 2], 20)
    sim.step()
    for i in range(4):
        sim.add(f"prompt-{i}", [i % 3] * 2, 1)
        assert "answering" in {row.sequence_id[0] for row in sim.step().rows}


def test_where_pages_run_out_the_longest_gives_way_and_keeps_its_place():
    sim = simulate(SimulatedCache(num_pages=9, prefix=False))
    for name, num_tokens in (("a", 12), ("b", 16), ("c", 8)):
        sim.add(name, [1] * 8, num_tokens)
    assert finished(sim) == ["c", "a", "b"]
    assert [sequence_id for plan in sim.log for sequence_id in plan.preempted] == [("b", 0)]


def test_what_was_run_once_never_remains_again():
    sim, before = simulate(SimulatedCache(num_pages=9, prefix=False), max_tokens=9), {}
    for name, num_tokens in (("a", 12), ("b", 16), ("c", 8)):
        sim.add(name, [1] * 8, num_tokens)
    while sim.sequences:
        sim.step()
        for one in (*sim.scheduler._running.values(), *sim.scheduler._waiting):
            assert one.remaining <= before.get(one.arrival, one.remaining)
            before[one.arrival] = one.remaining
    assert any(plan.preempted for plan in sim.log)


# --- what it gains ----------------------------------------------------------------------------------------------------


def mean_wait(ageing):
    """Return the mean step at which requests of very different lengths, which come in a burst, are finished."""
    sim = simulate(max_batch=2, max_tokens=32, ageing=ageing)
    for i in range(24):
        sim.add(f"r{i}", [i % 3] * (2 + i % 5), 40 if i % 4 == 0 else 2 + i % 3)
        sim.step()
    ends = {}
    while sim.sequences:
        sim.step()
        ends |= {name: len(sim.log) for name in sim.finished if name not in ends}
    return sum(ends.values()) / len(ends)


def test_requests_wait_less_in_the_mean_than_first_come_first_served():
    shortest, by_arrival = mean_wait(ageing=1), mean_wait(ageing=10_000)
    assert shortest < 0.7 * by_arrival


# --- ageing -----------------------------------------------------------------------------------------------------------


def entry(arrival, step, size, priority=0):
    sequence = SimulatedSequence((f"r{arrival}", 0), [1], size, priority=priority)
    return Entry(sequence, arrival, step)


def test_a_request_is_overtaken_for_as_long_as_its_size_and_its_priority_say_and_no_longer():
    turns = Turns(ageing=4, max_len=64)
    old = entry(0, step=10, size=48)
    for later, is_before in ((entry(1, 20, 7), True), (entry(1, 20, 8), False), (entry(1, 22, 1), False)):
        assert (turns.of(later) < turns.of(old)) is is_before
    last = 10 + (48 + 64) // 4  # a priority more is worth max_len tokens
    assert turns.of(entry(1, last - 1, 1, priority=1)) < turns.of(old)
    assert turns.of(entry(1, last, 1, priority=1)) > turns.of(old)


def test_size_never_outweighs_priority_among_those_that_came_together():
    turns = Turns(ageing=1, max_len=64)
    assert turns.of(entry(1, 0, 64, priority=1)) < turns.of(entry(0, 0, 1))


def test_a_long_request_ends_although_short_ones_never_stop_coming():
    sim = simulate(max_batch=1, ageing=2)
    sim.add("long", [1] * 20, 10)
    overtook = 0
    for step in range(200):
        sim.add(f"short-{step}", [2], 1)
        sim.step()
        if ("long", 0) in sim.finished:
            break
        overtook = sum(name.startswith("short") for name, _ in sim.finished)
    assert ("long", 0) in sim.finished
    assert sim.finished["long", 0].output == answer([1] * 20, 10)
    assert overtook <= 30 // 2  # its tokens / ageing
