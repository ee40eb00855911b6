"""Stages balanced by bytes, steps cut into microbatches, and the bubble that remains."""

import itertools
import random

import pytest

from intarsia.types import Row, RowResult, TokenLogprobs, Want
from intarsia_parallel.microbatches import cut, joined
from intarsia_parallel.stages import stage_sizes
from models import tiny_llama


def lengths(ranges):
    return [len(each) for each in ranges]


def loads(ranges, weights, first, last):
    sums = [sum(weights[layer] for layer in each) for each in ranges]
    sums[0] += first
    sums[-1] += last
    return sums


@pytest.mark.parametrize(("layers", "stages", "wanted"), [(30, 4, [8, 8, 7, 7]), (10, 3, [4, 3, 3]), (4, 4, [1] * 4)])
def test_equal_layers_are_shared_out_evenly_the_first_stages_having_more(layers, stages, wanted):
    assert lengths(stage_sizes([7] * layers, 0, 0, stages)) == wanted


def test_embedding_and_head_are_counted():
    # SmolLM2: a tied embedding of 49152 x 576 is worth 8 layers of 3540096 numbers, and is on both ends.
    table = 49152 * 576
    ranges = stage_sizes([3540096] * 30, table, table, 2)
    assert lengths(ranges) == [15, 15]
    ends = stage_sizes([3540096] * 30, table, table, 4)
    assert lengths(ends)[0] < 5 < lengths(ends)[1], "the ends have fewer layers, as they have the embedding"
    assert lengths(stage_sizes([1] * 12, 100, 0, 3)) == [1, 6, 5], (
        "every stage has a layer, however much it has besides"
    )


def test_every_layer_is_on_exactly_one_stage_and_the_largest_stage_is_as_small_as_can_be():
    draw = random.Random(5)
    for _ in range(60):
        weights = [draw.randint(1, 30) for _ in range(draw.randint(1, 9))]
        first, last = draw.randint(0, 40), draw.randint(0, 40)
        num_stages = draw.randint(1, len(weights))
        ranges = stage_sizes(weights, first, last, num_stages)
        assert list(itertools.chain(*ranges)) == list(range(len(weights))) and all(lengths(ranges))
        best = min(
            max(loads([range(a, b) for a, b in itertools.pairwise((0, *edges, len(weights)))], weights, first, last))
            for edges in itertools.combinations(range(1, len(weights)), num_stages - 1)
        )
        assert max(loads(ranges, weights, first, last)) == best


# --- microbatches -----------------------------------------------------------------------------------------------------


def row(name, length, *, start=0, drafts=0, want=Want.LAST):
    ids = tuple(range(start, start + length))
    return Row(sequence_id=(name, 0), token_ids=ids, start=start, num_drafts=drafts, want=want, pages=((1, 2),))


def check(rows, count, *, cuts_rows):
    """Cut rows, and check what holds of every cut; return tokens a microbatch."""
    batches = cut(rows, count, cuts_rows=cuts_rows)
    assert len(batches) <= count and all(batch.rows for batch in batches)
    pieces = [piece for batch in batches for piece in batch.rows]
    for whole in rows:
        own = [piece for piece in pieces if piece.sequence_id == whole.sequence_id]
        assert sum((piece.token_ids for piece in own), ()) == whole.token_ids
        assert [piece.start for piece in own] == [
            whole.start + sum(len(p.token_ids) for p in own[:i]) for i in range(len(own))
        ]
        assert all(piece.want is Want.NONE and not piece.num_drafts for piece in own[:-1])
        last = own[-1]
        assert (last.want, last.num_drafts, last.drafts_wanted, last.pages) == (
            whole.want,
            whole.num_drafts,
            whole.drafts_wanted,
            whole.pages,
        )
        assert len(last.token_ids) > last.num_drafts, "a token is chosen after the last known one, and after each draft"
        if not cuts_rows:
            assert own == [whole]
    names = [piece.sequence_id for piece in pieces]
    assert [name for name, _ in itertools.groupby(names)] == [each.sequence_id for each in rows], (
        "rows keep their order"
    )
    for batch in batches:
        assert len({piece.sequence_id for piece in batch.rows}) == len(batch.rows)
    return [batch.num_tokens for batch in batches]


def test_rows_that_decode_are_dealt_out_evenly():
    rows = [row(str(i), 1, start=20) for i in range(8)]
    assert check(rows, 4, cuts_rows=True) == [2, 2, 2, 2]
    assert check(rows, 3, cuts_rows=True) in ([2, 3, 3], [3, 2, 3], [3, 3, 2])
    assert check(rows, 1, cuts_rows=True) == [8]
    assert check(rows[:2], 4, cuts_rows=True) == [1, 1]
    assert check(rows[:1], 4, cuts_rows=True) == [1]


def test_a_long_prompt_is_cut_in_pieces_where_that_is_allowed():
    assert check([row("long", 100)], 4, cuts_rows=True) == [25, 25, 25, 25]
    assert check([row("long", 100)], 4, cuts_rows=False) == [100]
    assert check([row("a", 1, start=9), row("long", 99), row("b", 1, start=9)], 2, cuts_rows=True) == [50, 51]
    assert check([row("a", 1, start=9), row("long", 99), row("b", 1, start=9)], 2, cuts_rows=False) != [50, 51]


def test_drafts_are_verified_in_one_piece():
    sizes = check([row("verified", 40, drafts=30)], 4, cuts_rows=True)
    assert sizes[-1] >= 31


def test_no_plan_is_cut_wrongly():
    draw = random.Random(3)
    for _ in range(400):
        rows = []
        for index in range(draw.randint(1, 9)):
            length = draw.choice((1, 1, 2, 5, 17, 60, 200))
            drafts = draw.randint(0, min(5, length - 1))
            want = draw.choice((Want.LAST, Want.LAST, Want.NONE)) if not drafts else Want.LAST
            rows.append(row(str(index), length, start=draw.choice((0, 16, 33)), drafts=drafts, want=want))
        count, cuts_rows = draw.randint(1, 6), draw.random() < 0.5
        sizes = check(rows, count, cuts_rows=cuts_rows)
        if cuts_rows and len(sizes) == count > 1:
            assert max(sizes) <= sum(sizes) / count + 2 * 30, sizes


def test_results_of_pieces_are_one_result():
    rows = [row("a", 30), row("b", 1, start=4)]
    scores = [TokenLogprobs(token, -1.0) for token in range(3)]
    results = [
        RowResult(sequence_id=("a", 0), prompt_logprobs=(scores[0], scores[1])),
        RowResult(sequence_id=("a", 0), token_ids=(5,), prompt_logprobs=(scores[2],), drafts=(1,)),
        RowResult(sequence_id=("b", 0), token_ids=(6,)),
    ]
    first, second = joined(rows, results)
    assert first.token_ids == (5,) and first.prompt_logprobs == tuple(scores) and first.drafts == (1,)
    assert second == results[2]
    failed = [RowResult(sequence_id=("a", 0), error="of the first piece"), *results[1:]]
    assert joined(rows, failed)[0].error == "of the first piece"


# --- the bubble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(2, 4), (2, 1), (3, 2), (4, 4), (4, 8)],
)
@pytest.mark.slow
def test_stages_that_sleep_idle_as_much_as_the_formula_says(tmp_path, monkeypatch, stages, microbatches):
    """On a loaded machine steps take longer and all shares rise; so the least of three measurements counts."""
    from tools.bubble import bubble, install_sleeping_runner, measure

    model, _ = tiny_llama(tmp_path, layers=4)
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    install_sleeping_runner(plugins)
    monkeypatch.syspath_prepend(str(plugins))
    least = min((measure(model, stages, microbatches) for _ in range(1 + (stages == 2))), key=sum)
    assert least == pytest.approx([bubble(stages, microbatches)] * stages, abs=0.08)
