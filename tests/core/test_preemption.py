"""What preempting costs: tokens that are computed again are counted, and prices are those of what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intarsia.preemption import Preemption
from intarsia.types import BatchPlan, Row, StepResult, SwapPrices, SwapStats, Want

A, B = ("a", 0), ("b", 0)


class Books:
    """An allocator, as far as it is asked here."""

    prices = None

    def swap_out(self, sequence_id):
        raise AssertionError("who measures decides nothing")

    def price(self, prices):
        self.prices = prices

    def swap_stats(self):
        return SwapStats(num_pages=9, used=1, free=8, cached=0, swapped=1, outs=2, ins=1, declined=0, no_room=0)


def row(name, start, count, want=Want.LAST, drafts=0):
    return Row(sequence_id=name, token_ids=(1,) * count, start=start, want=want, num_drafts=drafts)


def plan(*rows, **more):
    return BatchPlan(rows=rows, **more)


def took(seconds, swapped=0, swap_s=0.0):
    return StepResult(target_s=seconds, swapped=swapped, swap_s=swap_s)


# --- tokens that are computed again -----------------------------------------------------------------------------------


def begin(cost, computed, *rows, **more):
    cost.begin(plan(*rows, **more), lambda name: computed.get(name, 0))


def test_tokens_are_counted_that_were_lost_and_are_run_again():
    cost = Preemption(Books())
    begin(cost, {A: 30}, row(B, 5, 1), preempted=(A,))
    assert (cost.preempted, cost.recomputed) == (1, 0)
    begin(cost, {}, row(A, 16, 15))  # 16 were found in the cache
    assert cost.recomputed == 14
    begin(cost, {}, row(A, 31, 1))
    assert cost.recomputed == 14
    begin(cost, {B: 6}, preempted=(B,))
    begin(cost, {}, row(B, 6, 1))  # came back whole
    assert (cost.preempted, cost.recomputed) == (2, 14)


def test_a_sequence_that_is_preempted_again_before_it_has_run_has_lost_no_more():
    cost = Preemption(Books())
    begin(cost, {A: 30}, preempted=(A,))
    begin(cost, {A: 0}, preempted=(A,))
    begin(cost, {}, row(A, 0, 31))
    assert (cost.preempted, cost.recomputed) == (2, 30)


def test_one_that_left_is_forgotten_and_another_may_take_its_id():
    cost = Preemption(Books())
    begin(cost, {A: 30}, preempted=(A,))
    begin(cost, {}, left=(A,))
    begin(cost, {}, row(A, 0, 9))
    assert cost.recomputed == 0


def observe(cost, made, result):
    """What the step loop does after a step; return whether there was something to tell."""
    news = cost.observe(made, result)
    if news:
        cost.tell()
    return news


# --- prices -----------------------------------------------------------------------------------------------------------


def test_before_anything_is_measured_prices_are_the_assumed_ones():
    books = Books()
    cost = Preemption(books)
    assert cost.prices == SwapPrices() and cost.stats()["token_s"] is None
    assert observe(cost, plan(row(A, 5, 1)), took(1.0))  # a step that decodes
    assert books.prices == SwapPrices()


def test_steps_that_only_decode_have_nothing_new_to_tell_the_cache():
    cost = Preemption(Books())
    observe(cost, plan(row(A, 0, 100)), took(0.5))
    assert not any(observe(cost, plan(row(A, start, 1)), took(0.1)) for start in range(100, 110))
    assert observe(cost, plan(row(A, 110, 1)), took(0.1, swapped=1000, swap_s=0.5))


def test_steps_with_mostly_prompts_say_what_a_token_takes():
    books = Books()
    cost = Preemption(books)
    observe(cost, plan(row(A, 0, 100)), took(0.5))
    assert books.prices.token_s == pytest.approx(0.005)
    assert books.prices.bytes_per_s == SwapPrices().bytes_per_s
    observe(cost, plan(row(A, 100, 1), row(B, 50, 1)), took(9.0))
    assert books.prices.token_s == pytest.approx(0.005)
    # Ten of 21 tokens: rows with drafts are no prompts.
    observe(cost, plan(row(A, 100, 11, drafts=10), row(B, 0, 10)), took(9.0))
    assert books.prices.token_s == pytest.approx(0.005)
    observe(cost, plan(row(B, 0, 10), row(A, 100, 1)), took(0.11))
    assert books.prices.token_s == pytest.approx((0.9 * 0.5 + 0.11) / (0.9 * 100 + 11))


def test_a_step_that_chooses_no_token_is_measured_with_the_next_that_does():
    """The device may still be at work on it when its time is taken."""
    cost = Preemption(Books())
    observe(cost, plan(row(A, 0, 400, Want.NONE)), took(0.001))
    assert cost.stats()["token_s"] is None
    observe(cost, plan(row(A, 400, 100)), took(0.999))
    assert cost.stats()["token_s"] == pytest.approx(1.0 / 500)


def test_copies_say_what_a_byte_takes_and_count_by_their_size():
    books = Books()
    cost = Preemption(books)
    observe(cost, plan(row(A, 5, 1)), took(1.0, swapped=1000, swap_s=0.5))
    assert books.prices.bytes_per_s == 2000
    observe(cost, plan(row(A, 6, 1)), took(1.0))
    assert books.prices.bytes_per_s == 2000, "nothing new"
    observe(cost, plan(row(A, 7, 1)), took(1.0, swapped=10**6, swap_s=1.0))
    assert books.prices.bytes_per_s == pytest.approx((900 + 10**6) / (0.45 + 1.0))
    assert cost.stats()["swap"]["bytes_per_s"] == books.prices.bytes_per_s
    assert cost.stats()["swap"]["outs"] == 2


def test_a_clock_that_stood_still_divides_nothing_by_zero():
    cost = Preemption(Books())
    observe(cost, plan(row(A, 0, 10)), took(0.0, swapped=10, swap_s=0.0))
    assert cost.prices == SwapPrices()


def test_a_cache_that_never_swaps_is_told_nothing():
    cost = Preemption(object())
    observe(cost, plan(row(A, 0, 10)), took(1.0))
    assert cost.stats() == {"preempted": 0, "recomputed_tokens": 0, "token_s": 0.1, "swap": None}


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.floats(1e3, 1e12), st.floats(1e-9, 1.0))
def test_copying_pays_where_it_takes_less_time(num_bytes, num_tokens, bytes_per_s, token_s):
    prices = SwapPrices(bytes_per_s=bytes_per_s, token_s=token_s)
    assert prices.pays(num_bytes, num_tokens) == (num_bytes / bytes_per_s < num_tokens * token_s)
    assert not prices.pays(num_bytes, 0)
    assert prices.pays(0, num_tokens) == (num_tokens > 0)
