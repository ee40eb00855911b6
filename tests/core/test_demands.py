"""Which logits a step asks for, worked out from its plan."""

import pytest

from intarsia.demands import SCORED_ROWS, LogitsDemands, is_plain
from intarsia.types import BatchPlan, Demand, Entered, Row, SamplingDefaults, SamplingParams, Want


def filled(**params):
    return SamplingParams(**{"temperature": 0.0} | params).filled(SamplingDefaults())


def entered(name, ids, **params):
    return Entered(sequence_id=(name, 0), params=filled(**params), seed=1, token_ids=tuple(ids), num_prompt=len(ids))


def row(name, ids, start=0, **facts):
    return Row(sequence_id=(name, 0), token_ids=tuple(ids), start=start, **facts)


def demands(*sequences, has_processors=False):
    made = LogitsDemands(has_processors)
    made.meet(BatchPlan(entered=sequences))
    return made


def test_a_greedy_request_needs_the_likeliest_id_alone():
    assert is_plain(filled())
    assert is_plain(filled(temperature=1.0, top_p=0.0))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
        {"banned_token_ids": (4,)},
        {"banned_words": ("no",)},
    ],
    ids=lambda params: next(iter(params)),
)
def test_whatever_reads_or_changes_logits_needs_all_of_them(params):
    assert not is_plain(filled(**params))


def test_an_engine_with_logits_processors_needs_all_logits_of_every_request():
    made = demands(entered("a", [1, 2]), has_processors=True)
    assert made.of([row("a", [1, 2])], [0, 2])[-1].plain_L == (False,)


def test_tokens_are_chosen_after_the_last_and_after_each_draft():
    made = demands(entered("a", [1, 2, 3]), entered("b", [4], temperature=1.0), entered("c", [5, 6]))
    rows = [
        row("a", [3, 8, 9], start=2, num_drafts=2),
        row("c", [5], want=Want.NONE),
        row("b", [4]),
    ]
    assert made.of(rows, [0, 3, 4, 5]) == (Demand(rows_L=(0, 1, 2, 4), plain_L=(True, True, True, False)),)


def test_a_step_that_chooses_nothing_asks_for_no_rows():
    made = demands(entered("a", [1, 2, 3]))
    assert made.of([row("a", [1], want=Want.NONE)], [0, 1]) == (Demand(rows_L=(), plain_L=()),)


def test_prompts_that_are_scored_come_first_in_pieces():
    ids = list(range(SCORED_ROWS + 10))
    made = demands(entered("x", [1]), entered("a", ids, prompt_logprobs=1))
    first, second, chosen = made.of([row("x", [1]), row("a", ids)], [0, 1, 1 + len(ids)])
    assert (first.row, first.first, first.rows_L) == (1, 0, tuple(range(1, 1 + SCORED_ROWS)))
    # The last token of a prompt is followed by none of it.
    assert (second.row, second.first, len(second.rows_L)) == (1, SCORED_ROWS, 9)
    assert chosen.rows_L == (0, len(ids))


def test_a_sequence_that_left_is_forgotten():
    made = demands(entered("a", [1]))
    made.meet(BatchPlan(left=(("a", 0),)))
    assert made.of([row("a", [1])], [0, 1])[-1].plain_L == (False,)
