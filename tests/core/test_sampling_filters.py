"""Filters keep what transformers' keep, and a row's weights are the same bits whatever rows are beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from intarsia.sampling import arithmetic
from intarsia.sampling.filters import candidates
from intarsia.sampling.ranking import rank
from intarsia.sampling.settings import Settings
from intarsia.types import SamplingDefaults, SamplingParams
from sampling_rows import VOCAB, probabilities, random_logits


def transformers_distribution(logits, params):
    """Transformers' own warpers in the order of the contract, in float64."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits.double())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p is not None and params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.typical_p is not None and params.typical_p < 1:
        scores = TypicalLogitsWarper(params.typical_p)(None, scores)
    return scores.softmax(-1)


def numpy_distribution(logits, params):
    """The contract of SamplingParams, written plainly for one row."""
    scores = logits.double().numpy() / params.temperature
    kept = np.isfinite(scores)
    if params.top_k and params.top_k < kept.sum():
        kept &= scores >= np.sort(scores[kept])[-params.top_k]

    def shares():
        weights = np.where(kept, np.exp(scores - scores.max()), 0)
        return weights / weights.sum()

    if params.top_p < 1:
        p = shares()
        order = np.lexsort((np.arange(len(p)), -scores))
        before = np.cumsum(p[order]) - p[order]
        kept[order[1:]] &= before[1:] < params.top_p
    p = shares()
    kept &= p >= params.min_p * p.max()
    if params.typical_p < 1:
        p = shares()
        with np.errstate(divide="ignore"):
            surprise = np.where(kept, -np.log(p), np.inf)
        distance = np.abs(surprise - np.sum(p[kept] * surprise[kept]))
        order = np.argsort(distance, kind="stable")
        last = min(int((np.cumsum(p[order]) < params.typical_p).sum()), len(p) - 1)
        kept &= distance <= distance[order[last]]
    return shares()


SETTINGS = [
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"typical_p": 0.95, "temperature": 1.8},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.4, "top_k": 20, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.02, "typical_p": 0.8},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.6, "temperature": 1.2},
]


@pytest.mark.parametrize("vocab", [VOCAB, 5003])
@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_each_filter_and_their_order_are_transformers_own(chosen, vocab):
    params = SamplingParams(**{"temperature": 1.0, **chosen})
    logits = random_logits(8, vocab=vocab, seed=len(str(chosen)))
    expected = transformers_distribution(logits, params)
    found = probabilities(logits, [params] * 8)
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected).abs().max() < 1e-12


@settings(deadline=None, max_examples=150)
@given(
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_filters_is_what_the_contract_says(temperature, top_k, top_p, min_p, typical_p, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    logits = random_logits(1, seed=seed)
    found, expected = probabilities(logits, [params])[0].numpy(), numpy_distribution(logits[0], params)
    if np.array_equal(found > 0, expected > 0):
        assert np.abs(found - expected).max() < 1e-9
    else:  # At an edge that is met to the last bits, either side is right: then a hair's change of the edge agrees.
        near = [
            numpy_distribution(logits[0], SamplingParams(
                temperature=temperature, top_k=top_k, top_p=min(top_p * a, 1), min_p=min(min_p * b, 1),
                typical_p=min(typical_p * c, 1)))
            for a in (1 - 1e-9, 1 + 1e-9) for b in (1 - 1e-9, 1 + 1e-9) for c in (1 - 1e-9, 1 + 1e-9)
        ]  # fmt: skip
        assert any(np.array_equal(found > 0, one > 0) for one in near)


def test_tokens_tied_with_the_last_of_top_k_are_kept():
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0, 0.0]])
    found = probabilities(logits, [SamplingParams(temperature=1.0, top_k=3)])
    assert (found[0] > 0).tolist() == [True, True, True, True, True, False]
    found = probabilities(logits.roll(1), [SamplingParams(temperature=1.0, top_k=1)])
    assert (found[0] > 0).sum() == 1


def test_the_likeliest_is_kept_however_narrow_the_filters():
    logits = random_logits(4, vocab=3000)
    for chosen in ({"top_p": 1e-12}, {"min_p": 1.0}, {"top_k": 1}, {"top_k": 5, "top_p": 1e-12, "min_p": 1.0}):
        found = probabilities(logits, [SamplingParams(temperature=1.0, **chosen)] * 4)
        assert (found > 0).sum(-1).tolist() == [1] * 4
        assert torch.equal(found.argmax(-1), logits.argmax(-1))


def test_typical_p_0_keeps_the_most_typical_token():
    logits = random_logits(3, vocab=3000)
    p = logits.double().softmax(-1)
    distance = (-p.log() + (p * p.log()).sum(-1, keepdim=True)).abs()
    found = probabilities(logits, [SamplingParams(temperature=1.0, typical_p=0.0)] * 3)
    assert torch.equal(found.argmax(-1), distance.argmin(-1))
    assert (found > 0).sum(-1).tolist() == [1] * 3


def test_forbidden_tokens_have_no_probability_under_any_filter():
    logits = random_logits(1, vocab=3000)
    logits[0, 5:] = -torch.inf
    for chosen in SETTINGS:
        params = SamplingParams(**{"temperature": 1.0, **chosen})
        found = probabilities(logits, [params])[0]
        assert found[5:].max() == 0
        assert found.numpy() == pytest.approx(
            numpy_distribution(logits[0], params.filled(SamplingDefaults())), abs=1e-12
        )


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999999])
def test_a_nucleus_of_any_size_is_found(scale, top_p):
    """Few tokens or nearly all: ranking more and more tokens comes to the same set as sorting all."""
    logits = random_logits(2, vocab=20011, scale=scale)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    found = probabilities(logits, [params] * 2)
    for row in range(2):
        expected = numpy_distribution(logits[row], params.filled(SamplingDefaults()))
        assert abs(int((found[row] > 0).sum()) - int((expected > 0).sum())) <= 1
        assert np.abs(found[row].numpy() - expected).max() < 1e-8


@pytest.mark.parametrize("vocab", [7, 50, 1000, 20011])
@pytest.mark.parametrize("count", [1, 3, 50, 600, 30000])
def test_a_ranking_holds_the_highest_and_all_that_tie_with_them(vocab, count):
    logits = random_logits(4, vocab=vocab).round(decimals=1)
    logits[1, ::2] = -torch.inf
    logits[2] = 0.0
    logits[2, 3] = -0.0
    logits[3, 2:] = -torch.inf
    ranking = rank(logits, count)
    for row in range(4):
        order = sorted((-value, i) for i, value in enumerate(logits[row].tolist()) if value > -np.inf)
        lowest = order[min(count, len(order)) - 1][0]
        ids = [i for i in ranking.ids_LM[row].tolist() if i < vocab]
        assert len(ids) >= sum(value <= lowest for value, _ in order)
        assert ids == [i for _, i in order[: len(ids)]]
        assert ranking.logits_LM[row, : len(ids)].tolist() == [-value for value, _ in order[: len(ids)]]
        assert ranking.logits_LM[row, len(ids) :].eq(-torch.inf).all()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_rows_weights_are_the_same_bits_whatever_is_beside_it(data):
    drawn = st.builds(
        SamplingParams,
        temperature=st.floats(0.05, 4),
        top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 200, 3000]),
        top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.0, 0.001, 0.2]),
        typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.2]),
    )
    vocab = data.draw(st.sampled_from([37, 1000, 3001]))
    params = data.draw(st.lists(drawn, min_size=2, max_size=7))
    logits = random_logits(len(params), vocab=vocab, seed=data.draw(st.integers(0, 99)), scale=2.0)
    filled = [Settings.of(p.filled(SamplingDefaults())) for p in params]
    alone = [next(iter(candidates(logits[i : i + 1], [filled[i]]))) for i in range(len(params))]
    seen = []
    for together in candidates(logits, filled):
        for place, row in enumerate(together.rows):
            seen.append(row)
            assert kept(together, place) == kept(alone[row], 0)
    assert sorted(seen) == list(range(len(params)))


def kept(some, row):
    """(id, weight) of what is kept, and the running sums that are drawn from, to the bit."""
    weights, sums = some.weights_LM[row], some.weights_LM.cumsum(-1)[row]
    ids = torch.arange(len(weights)) if some.ids_LM is None else some.ids_LM[row]
    there = weights > 0
    return list(zip(ids[there].tolist(), weights[there].tolist(), sums[there].tolist(), strict=True))


def test_filtering_leaves_the_logits_as_they_are():
    logits = random_logits(len(SETTINGS), vocab=3000)
    before = logits.clone()
    probabilities(logits, [SamplingParams(**{"temperature": 1.0, **chosen}) for chosen in SETTINGS])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_vocabulary_gives_the_same_weights_alone_and_among_sixteen(threads):
    """Long rows are where sums and vectorised functions are split by rows and threads."""
    params = [SamplingParams(**{"temperature": 0.9, **SETTINGS[i % len(SETTINGS)]}) for i in range(16)]
    filled = [Settings.of(p.filled(SamplingDefaults())) for p in params]
    logits = random_logits(16, vocab=49155, scale=2.5)[:, :49152]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = {row: kept(some, i) for some in candidates(logits, filled) for i, row in enumerate(some.rows)}
    finally:
        torch.set_num_threads(before)
    for row in range(0, 16, 3):
        assert together[row] == kept(next(iter(candidates(logits[row : row + 1].clone(), [filled[row]]))), 0)


def test_exponentials_logarithms_and_sums_are_the_same_bits_in_any_company_and_with_any_threads():
    weights = torch.rand(5, 49152, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1e-3
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(torch.cat([arithmetic.totals(row) for row in weights.split(1)]))
            found.append(arithmetic.totals(weights))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found[1:])
    assert found[0].flatten().numpy() == pytest.approx(weights.numpy().sum(-1), rel=1e-12)
    for function, reference in ((arithmetic.exp, np.exp), (arithmetic.log, np.log)):
        whole = function(weights)
        assert whole.numpy() == pytest.approx(reference(weights.numpy()), rel=1e-15)
        for first, count in ((0, 1), (3, 5), (17, 7), (1001, 13)):
            assert torch.equal(function(weights[2, first : first + count].clone()), whole[2, first : first + count])
