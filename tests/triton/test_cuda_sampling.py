"""Sampling of the kernels `cuda`, in Triton's interpreter: the ids are the sampler's own, ties and all.

Shape legend: L rows of logits, V vocab.
"""

from functools import partial

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.sampling import Sampler, draw, draw_by
from intarsia.sampling.settings import Settings
from intarsia.types import SamplingDefaults, SamplingParams
from intarsia_cuda import sampling as ours
from sampling_rows import enter, random_logits, row

PLAIN = Settings.of(SamplingParams(temperature=1.0).filled(SamplingDefaults()))
#: One block, a block that is not full, several.
VOCABS = [1, 2, 50, 1024, 2100]
several = settings(deadline=None, max_examples=12)
a_setting = st.builds(
    lambda t, k, p, m: evolve(PLAIN, temperature=t, top_k=k, top_p=p, min_p=m),
    st.sampled_from([0.01, 0.7, 1.0, 2.5, 100.0]),
    st.sampled_from([0, 1, 2, 7, 64, 1000, 5000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Every new tensor is full of numbers that no kernel may leave there."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -77)

    monkeypatch.setattr(ours.torch, "empty", poisoned)


by_kernel = partial(draw_by, ours.sample_rows)


def logits_of(kind, num_rows, vocab, seed):
    logits = random_logits(num_rows, vocab, seed)
    if kind == "tied":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.full_like(logits, -3.25)
    elif kind == "holes":
        logits[:, 1:] = torch.where(logits[:, 1:] < 0, -torch.inf, logits[:, 1:])
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    elif kind == "steep":
        logits = logits * 40
    return logits


kinds = st.sampled_from(["normal", "tied", "equal", "holes", "zeros", "steep"])


@settings(deadline=None, max_examples=30)
@given(kinds, st.sampled_from(VOCABS), st.lists(a_setting, min_size=1, max_size=2), st.integers(0, 2**31))
def test_ids_are_the_samplers_own(kind, vocab, chosen, seed):
    logits = logits_of(kind, len(chosen), vocab, seed)
    before = logits.clone()
    uniforms = np.random.default_rng(seed).random(len(chosen))
    assert by_kernel(logits, chosen, uniforms) == draw(logits, chosen, uniforms)
    assert torch.equal(logits, before)


@several
@given(kinds, st.sampled_from(VOCABS), a_setting, st.integers(0, 2**31))
def test_the_lowest_and_the_highest_number_draw_the_first_and_the_last_that_may_be_drawn(kind, vocab, setting, seed):
    logits = logits_of(kind, 2, vocab, seed)
    uniforms = np.array([0.0, 1 - 2.0**-53])
    assert by_kernel(logits, [setting] * 2, uniforms) == draw(logits, [setting] * 2, uniforms)


def definition(logits, setting, uniform):
    """Return the id by the definition, in float64, with a sort; and how far the number is from the nearest edge."""
    x = logits.double().numpy()
    weights = np.exp((x - x.max()) / setting.temperature)
    order = np.lexsort((np.arange(len(x)), -x))
    kept = np.ones(len(x), dtype=bool)
    if 0 < setting.top_k < len(x):
        kept &= x >= x[order[setting.top_k - 1]]
    edges = []
    if setting.top_p < 1:
        ranked = np.where(kept, weights, 0)[order]
        before = np.concatenate([[0.0], ranked.cumsum()[:-1]])
        edge = setting.top_p * ranked.sum()
        kept[order] &= (before < edge) | (np.arange(len(x)) == 0)
        edges.append(np.abs(before - edge).min() / ranked.sum())
    kept &= weights >= setting.min_p
    sums = np.where(kept, weights, 0).cumsum()
    edges.append(np.abs(sums / sums[-1] - uniform).min())
    return int(np.searchsorted(sums, uniform * sums[-1], side="right")), min(edges)


@several
@given(a_setting, st.sampled_from([50, 1030]), st.integers(0, 2**31))
def test_ids_are_those_of_the_definition_in_float64(setting, vocab, seed):
    logits = random_logits(1, vocab, seed)
    uniform = float(np.random.default_rng(seed).random())
    token, distance = definition(logits[0], setting, uniform)
    # Nearer than that to an edge, the order in which float64 sums are taken may decide.
    if distance > 1e-12:
        assert by_kernel(logits, [setting], np.array([uniform])) == [token]


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_of_equal_tokens_the_lowest_ids_make_up_the_share(top_p, kept):
    logits = torch.tensor([[1.0, 5.0, 5.0, 1.0, 5.0, 5.0]]) * 100
    uniforms = np.arange(0, 1, 1 / 8)
    found = by_kernel(logits.expand(8, 6), [evolve(PLAIN, top_p=top_p)] * 8, uniforms)
    assert set(found) == set([1, 2, 4, 5][:kept])


def test_all_that_tie_with_the_last_of_top_k_stay():
    logits = torch.tensor([[2.0, 3.0, 2.0, 1.0, 2.0]])
    found = by_kernel(logits.expand(16, 5), [evolve(PLAIN, top_k=2)] * 16, np.arange(0, 1, 1 / 16))
    assert set(found) == {0, 1, 2, 4}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1023, 1500])
def test_a_row_that_is_not_finite_has_no_token_and_the_others_have_theirs(bad, place):
    logits = random_logits(3, 1501, 1)
    right = by_kernel(logits, [PLAIN] * 3, np.full(3, 0.5))
    logits[1, place] = bad
    assert by_kernel(logits, [PLAIN] * 3, np.full(3, 0.5)) == [right[0], -1, right[2]]


def test_a_row_without_any_logit_has_no_token():
    logits = torch.full((1, 70), -torch.inf)
    assert by_kernel(logits, [evolve(PLAIN, top_k=3, top_p=0.5)], np.array([0.3])) == [-1]


@pytest.mark.parametrize("vocab", [50, 1100])
def test_a_row_draws_the_same_alone_and_in_any_batch(vocab):
    chosen = [evolve(PLAIN, top_k=k, top_p=p) for k, p in ((0, 1.0), (9, 1.0), (0, 0.8), (9, 0.8), (0, 1.0))]
    logits, uniforms = random_logits(5, vocab, 3), np.random.default_rng(0).random(5)
    alone = [by_kernel(logits[i : i + 1], chosen[i : i + 1], uniforms[i : i + 1])[0] for i in range(5)]
    assert by_kernel(logits, chosen, uniforms) == alone
    assert by_kernel(logits[2:], chosen[2:], uniforms[2:]) == alone[2:]


def test_rows_beyond_those_that_fit_at_once_are_drawn_too(monkeypatch):
    logits, uniforms = random_logits(5, 60, 3), np.random.default_rng(0).random(5)
    whole = by_kernel(logits, [PLAIN] * 5, uniforms)
    monkeypatch.setattr(ours, "_ROWS", 2)
    assert by_kernel(logits, [PLAIN] * 5, uniforms) == whole


def test_logits_that_are_a_part_of_wider_rows_are_read_as_they_are():
    wide = torch.full((3, 90), torch.nan)
    wide[:, :70] = random_logits(3, 70, 5)
    chosen, uniforms = [evolve(PLAIN, top_p=0.9)] * 3, np.random.default_rng(0).random(3)
    assert by_kernel(wide[:, :70], chosen, uniforms) == draw(wide[:, :70].clone(), chosen, uniforms)


def test_frequencies_are_the_distributions():
    logits = random_logits(1, 8, 2, scale=1.0).expand(24, 8).contiguous()
    setting = evolve(PLAIN, temperature=1.3, top_p=0.8)
    uniforms = (np.arange(24) + 0.5) / 24
    found = np.bincount(by_kernel(logits, [setting] * 24, uniforms), minlength=8) / 24
    weights = np.exp((logits[0].double().numpy() - float(logits.max())) / 1.3)
    order = np.argsort(-weights)
    ranked = weights[order].cumsum() - weights[order]
    weights[order[ranked >= 0.8 * weights.sum()]] = 0
    assert np.abs(found - weights / weights.sum()).max() <= 1 / 24


def test_typical_p_which_the_kernel_does_not_know_is_drawn_by_the_sampler():
    chosen = [PLAIN, evolve(PLAIN, typical_p=0.3), evolve(PLAIN, top_k=5)]
    logits, uniforms = random_logits(3, 300, 4), np.random.default_rng(1).random(3)
    assert by_kernel(logits, chosen, uniforms) == draw(logits, chosen, uniforms)


def test_a_sampler_that_draws_by_the_kernel_chooses_the_same_with_all_else_that_requests_ask_for():
    asked = [
        SamplingParams(temperature=0.9, seed=3, top_p=0.9, repetition_penalty=1.3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.2, seed=4, min_p=0.05, logit_bias={7: 4.0}),
        SamplingParams(temperature=0.8, seed=5, top_k=6, banned_token_ids=(9, 11)),
    ]
    results = []
    for how in (draw, by_kernel):
        sampler = Sampler(50, draw=how)
        ids = [enter(sampler, str(i), params) for i, params in enumerate(asked)]
        chosen = []
        for step in range(3):
            known = [tuple(sampler.token_ids(one)) for one in ids]
            rows = [row(one, prompt=prompt) for one, prompt in zip(ids, known, strict=True)]
            chosen.append([r.token_ids for r in sampler.choose(rows, random_logits(4, 50, step))])
        results.append(chosen)
    assert results[0] == results[1]
