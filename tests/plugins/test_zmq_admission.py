"""Admission: fair between clients, whatever each of them asks for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intarsia.errors import OverloadedError
from intarsia_zmq.admission import Admission, AdmissionLimits

LIMITS = AdmissionLimits(waiting=1000, waiting_of_client=1000, quantum=100)


def drain(admission: Admission) -> list:
    order = []
    while (item := admission.next()) is not None:
        order.append(item)
    return order


def test_clients_have_their_turns_in_the_order_in_which_they_came():
    admission = Admission(LIMITS)
    for client in "abc":
        admission.add(client, client, 100)
    assert drain(admission) == ["a", "b", "c"]


def test_one_clients_flood_does_not_hold_up_another():
    admission = Admission(LIMITS)
    for i in range(100):
        admission.add("flood", ("flood", i), 100)
    admission.add("other", ("other", 0), 100)
    assert ("other", 0) in [admission.next(), admission.next()]


def test_clients_get_the_same_tokens_though_one_asks_for_large_requests():
    admission = Admission(LIMITS)
    for i in range(50):
        admission.add("large", ("large", i), 1000)
    for i in range(500):
        admission.add("small", ("small", i), 10)
    got = Counter()
    for _ in range(200):
        client, _ = admission.next()
        got[client] += 1000 if client == "large" else 10
    assert abs(got["large"] - got["small"]) <= 1000 + 100


def test_within_a_client_priority_is_first_then_age_and_to_others_it_is_nothing():
    admission = Admission(LIMITS)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)):
        admission.add(1, name, 100, priority)
    for name in ("v", "w", "x", "y", "z"):
        admission.add(2, name, 100, -(10**9))
    order = drain(admission)
    assert [item for item in order if item in "abcde"] == ["b", "d", "a", "c", "e"]
    assert order[1::2] == ["v", "w", "x", "y", "z"]


def test_full_queues_refuse_with_a_hint_and_change_nothing():
    now = [0.0]
    admission = Admission(AdmissionLimits(waiting=4, waiting_of_client=3, quantum=10), lambda: now[0])
    for i in range(3):
        admission.add("a", i, 1)
    with pytest.raises(OverloadedError, match="3 requests of yours wait") as caught:
        admission.add("a", 3, 1)
    assert caught.value.retry_after_s == 1.0
    admission.add("b", 4, 1)
    with pytest.raises(OverloadedError, match="4 requests wait") as caught:
        admission.add("c", 5, 1)
    assert (len(admission), admission.waiting("a"), admission.waiting("c")) == (4, 3, 0)
    for i in range(10, 30):
        now[0] += 2.0
        admission.next()
        admission.add(f"client {i}", i, 1)
    with pytest.raises(OverloadedError) as caught:
        admission.add("c", 5, 1)
    assert caught.value.retry_after_s == pytest.approx(2.0)  # one is admitted every two seconds


def test_what_is_removed_waits_no_more_and_its_client_pays_nothing():
    admission = Admission(LIMITS)
    admission.add("a", 1, 10**9)
    admission.add("a", 2, 10)
    admission.add("b", 3, 10)
    assert admission.remove(1) and not admission.remove(1) and 1 not in admission
    assert sorted(drain(admission)) == [2, 3]
    admission.add("a", 4, 10)
    admission.add("a", 5, 10, 3)
    assert sorted(admission.remove_client("a")) == [4, 5] and admission.remove_client("a") == []
    assert len(admission) == 0 and admission.next() is None


def test_a_request_of_a_billion_tokens_costs_no_billion_turns():
    admission = Admission(LIMITS)
    admission.add("a", 1, 10**15)
    admission.add("b", 2, 10**15 + 1)
    assert drain(admission) == [1, 2]


requests = st.tuples(st.integers(0, 4), st.integers(1, 2000), st.integers(-2, 2))
steps = st.lists(st.one_of(requests, st.just("next"), st.integers(0, 60)), max_size=120)


@given(steps, st.integers(1, 500))
def test_nothing_is_lost_or_doubled_and_it_is_never_idle_with_requests_waiting(program, quantum):
    admission = Admission(AdmissionLimits(waiting=10**6, waiting_of_client=10**6, quantum=quantum))
    model: dict[int, tuple[int, int]] = {}  # item -> (client, priority)
    for number, step in enumerate(program):
        if isinstance(step, tuple):
            client, cost, priority = step
            admission.add(client, number, cost, priority)
            model[number] = (client, priority)
        elif step == "next":
            item = admission.next()
            assert (item is None) == (not model)
            if item is not None:
                client, priority = model.pop(item)
                rivals = [(-p, i) for i, (c, p) in model.items() if c == client]
                assert all((-priority, item) < rival for rival in rivals)
        else:
            assert admission.remove(step) == (model.pop(step, None) is not None)
        assert len(admission) == len(model)
        for client in range(5):
            assert admission.waiting(client) == sum(c == client for c, _ in model.values())
    assert sorted(drain(admission)) == sorted(model)


@given(
    st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=12), min_size=1, max_size=6),
    st.integers(1, 1000),
)
def test_while_clients_wait_none_falls_behind_another_by_more_than_a_turn(costs, quantum):
    """The bound of deficit round robin: within one quantum and the largest request."""
    admission = Admission(AdmissionLimits(waiting=10**6, waiting_of_client=10**6, quantum=quantum))
    for client, each in enumerate(costs):
        for i, cost in enumerate(each):
            admission.add(client, (client, i), cost)
    got = dict.fromkeys(range(len(costs)), 0)
    largest = max(max(each) for each in costs)
    while all(admission.waiting(client) for client in got):
        client, i = admission.next()
        got[client] += costs[client][i]
        assert max(got.values()) - min(got.values()) <= quantum + 2 * largest


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(1, 5000), st.integers(1, 700))
def test_whoever_waits_is_admitted_within_bounded_tokens_of_others_though_they_never_stop(flood, cost, quantum):
    admission = Admission(AdmissionLimits(waiting=10**6, waiting_of_client=10**6, quantum=quantum))
    for number in range(2 * len(flood)):
        admission.add("flood", ("flood", number), flood[number % len(flood)])
    admission.add("one", "one", cost)
    spent = 0
    for number in range(10**5):
        item = admission.next()
        if item == "one":
            break
        spent += flood[item[1] % len(flood)]
        admission.add("flood", ("flood", 10**6 + item[1] + number * len(flood) * 4), flood[item[1] % len(flood)])
    # What "one" saves up while it waits, the other may spend, and a turn and a request more.
    assert item == "one"
    assert spent <= cost + 2 * quantum + max(flood)
