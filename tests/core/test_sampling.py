"""Sampling: draws are counter-based, filters are transformers', drafts never change the output."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from intarsia.sampling import CHOOSE, Sampler, accept, philox, uniforms
from intarsia.sampling.drawing import invert
from intarsia.sampling.filters import Candidates
from intarsia.types import SamplingParams, Want
from sampling_rows import VOCAB, enter, probabilities, random_logits, row

# --- the generator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # the vectors that Random123 publishes (kat_vectors, philox4x32 10)
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(key, counter, words):
    found = philox(np.array([key], dtype=np.uint64), np.array([counter], dtype=np.uint64))
    assert tuple(found[0].tolist()) == words


def test_uniform_numbers_are_uniform_and_depend_on_every_word():
    positions = list(range(20000))
    numbers = uniforms([42] * 20000, [0] * 20000, positions, CHOOSE)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert kstest(numbers, "uniform").pvalue > 1e-3
    same = uniforms([42], [0], [7], CHOOSE)[0]
    assert numbers[7] == same
    others = [
        uniforms([43], [0], [7], CHOOSE)[0],
        uniforms([42 + 2**32], [0], [7], CHOOSE)[0],
        uniforms([42], [1], [7], CHOOSE)[0],
        uniforms([42], [0], [8], CHOOSE)[0],
        uniforms([42], [0], [7], CHOOSE + 1)[0],
    ]
    assert len({same, *others}) == 6


# --- the distribution -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 100),
)
def test_the_distribution_is_transformers_own(temperature, top_k, top_p, seed):
    logits = random_logits(3, seed=seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    expected = expected.softmax(-1)
    before = logits.clone()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    found = probabilities(logits, [params] * 3)
    # At a nucleus whose edge is met to the last bit, either side of the edge is right.
    assert (found - expected).abs().max() < 1e-6 or abs(_edge(logits, params, found)) < 1e-6
    assert torch.equal(logits, before)


def _edge(logits, params, found):
    """How far the kept probability is from top_p, at the nearest row."""
    full = probabilities(logits, [SamplingParams(temperature=params.temperature, top_k=params.top_k)] * 3)
    kept = [(full[i] * (found[i] > 0)).sum().item() for i in range(3)]
    return min((k - params.top_p for k in kept), key=abs)


def test_rows_with_different_settings_do_not_disturb_each_other():
    logits = random_logits(4)
    params = [
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.4),
        SamplingParams(temperature=1e-300, top_k=7, top_p=0.9),
    ]
    together = probabilities(logits, params)
    alone = torch.cat([probabilities(logits[i : i + 1], [p]) for i, p in enumerate(params)])
    assert torch.equal(together, alone)
    assert (together > 0).sum(-1)[1] == 3
    assert together[3].max() == 1.0


def test_draws_follow_the_distribution():
    weights = torch.tensor([[0.1, 0.0, 0.2, 0.05, 0.65]], dtype=torch.float64)
    count = 20000
    numbers = uniforms([7] * count, [0] * count, range(count), CHOOSE)
    counts = Counter(invert(Candidates(tuple(range(count)), weights.expand(count, -1).contiguous()), numbers))
    assert counts[1] == 0
    kept = [0, 2, 3, 4]
    assert chisquare([counts[i] for i in kept], [weights[0, i].item() * count for i in kept]).pvalue > 1e-3


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53, 0.5])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability(number):
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.1, 0.0]], dtype=torch.float64)
    (token,) = invert(Candidates((0,), weights), np.array([number]))
    assert token in (1, 3)


# --- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-9}])
def test_every_way_to_be_greedy_takes_the_likeliest(params):
    sampler = Sampler(VOCAB)
    sequence_id = enter(sampler, "a", SamplingParams(**params, seed=3))
    logits = random_logits(1)
    (result,) = sampler.choose([row(sequence_id)], logits.clone())
    assert result.token_ids == (int(logits.argmax()),)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_seeded_row_draws_the_same_whatever_its_neighbours(data):
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=42)
    logits = random_logits(1, seed=5)
    alone = Sampler(VOCAB)
    (expected,) = alone.choose([row(enter(alone, "a", params))], logits.clone())
    others = data.draw(
        st.lists(
            st.builds(
                SamplingParams,
                temperature=st.floats(0, 3),
                top_k=st.integers(0, 60),
                top_p=st.floats(0, 1),
                seed=st.integers(0, 2**64 - 1),
            ),
            max_size=6,
        )
    )
    place = data.draw(st.integers(0, len(others)))
    sampler = Sampler(VOCAB)
    ids = [enter(sampler, f"other-{i}", p) for i, p in enumerate(others)]
    ids.insert(place, enter(sampler, "a", params))
    crowd = random_logits(len(ids), seed=9)
    crowd[place] = logits[0]
    results = sampler.choose([row(i) for i in ids], crowd)
    assert results[place].token_ids == expected.token_ids
    assert all(0 <= r.token_ids[0] < VOCAB for r in results)


def test_the_choices_of_one_seed_differ_and_repeat():
    params = SamplingParams(temperature=1.5, seed=7, n=4)

    def run():
        sampler = Sampler(VOCAB)
        ids = [enter(sampler, "a", params, choice=c) for c in range(4)]
        texts = [[] for _ in ids]
        for step in range(8):
            rows = [row(i, prompt=(1, 2, 3, *texts[c])) for c, i in enumerate(ids)]
            for c, result in enumerate(sampler.choose(rows, random_logits(1, seed=step).expand(4, -1).clone())):
                texts[c] += result.token_ids
        return texts

    first, second = run(), run()
    assert first == second
    assert len({tuple(t) for t in first}) > 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_fails_alone(bad, temperature):
    sampler = Sampler(VOCAB)
    params = SamplingParams(temperature=temperature, seed=1)
    ids = [enter(sampler, name, params) for name in "abc"]
    logits = random_logits(3)
    expected = [Sampler(VOCAB) for _ in ids]
    solo = [s.choose([row(enter(s, "x", params))], logits[i : i + 1].clone())[0] for i, s in enumerate(expected)]
    logits[1, 4] = bad
    results = sampler.choose([row(i) for i in ids], logits)
    assert [bool(r.error) for r in results] == [False, True, False]
    assert results[1].token_ids == ()
    assert [results[0].token_ids, results[2].token_ids] == [solo[0].token_ids, solo[2].token_ids]


def test_rows_that_want_no_logits_get_no_tokens():
    sampler = Sampler(VOCAB)
    first, second = (enter(sampler, name, SamplingParams(temperature=0)) for name in "ab")
    logits = random_logits(1)
    results = sampler.choose([row(first, want=Want.NONE), row(second)], logits.clone())
    assert results[0].token_ids == ()
    assert results[1].token_ids == (int(logits.argmax()),)


# --- verification -----------------------------------------------------------------------------------------------------


def test_drafts_are_accepted_up_to_the_first_that_differs():
    assert accept([], [5]) == [5]
    assert accept([5, 6], [5, 6, 7]) == [5, 6, 7]
    assert accept([5, 9], [5, 6, 7]) == [5, 6]
    assert accept([9, 6], [5, 6, 7]) == [5]
    assert accept([0], [0, 0]) == [0, 0]


@settings(deadline=None, max_examples=60)
@given(
    drafts=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    right=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
)
def test_a_verified_run_equals_plain_decoding(drafts, right, temperature):
    """The logits after a prefix depend on the prefix alone, as a model's do."""

    def logits_after(ids):
        return random_logits(1, seed=hash(tuple(ids)) % 2**31)

    params = SamplingParams(temperature=temperature, seed=11, logprobs=2)
    plain, known, entries = Sampler(VOCAB), [1, 2, 3], []
    sequence_id = enter(plain, "a", params)
    for _ in range(8):
        (result,) = plain.choose([row(sequence_id, prompt=tuple(known))], logits_after(known))
        known += result.token_ids
        entries += result.logprobs
    guesses = known[3 : 3 + right] + drafts[right:]
    sampler = Sampler(VOCAB)
    sequence_id = enter(sampler, "a", params)
    stacked = torch.cat([logits_after([1, 2, 3, *guesses[:i]]) for i in range(len(guesses) + 1)])
    (result,) = sampler.choose([row(sequence_id, drafts=tuple(guesses))], stacked)
    accepted = list(result.token_ids)
    assert accepted == known[3 : 3 + len(accepted)]
    assert len(accepted) >= min(right, len(guesses)) + 1
    assert list(sampler.token_ids(sequence_id)) == [1, 2, 3, *accepted]
    assert result.logprobs == tuple(entries[: len(accepted)])


def test_of_equal_logits_the_lowest_id_is_chosen():
    logits_LV = torch.zeros(2, VOCAB)
    logits_LV[1, [3, 7]] = 1.0
    sampler = Sampler(VOCAB)
    ids = [enter(sampler, name, SamplingParams(temperature=0)) for name in "ab"]
    assert [result.token_ids for result in sampler.choose([row(i) for i in ids], logits_LV)] == [(0,), (3,)]


def test_drafts_leave_the_joint_distribution_as_it_is_with_penalties_and_filters():
    """X03: of two tokens, with a drafter of its own mind, against the product of the target's conditionals."""
    vocab, count = 8, 20000
    tables = random_logits(vocab + 1, vocab=vocab, seed=3, scale=1.2)
    penalties = {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    params = SamplingParams(temperature=1.3, top_p=0.8, logit_bias={2: 0.5}, **penalties)
    first_drafts = random_logits(1, vocab=vocab, seed=9).repeat(count, 1).softmax(-1).multinomial(
        2, replacement=True, generator=torch.Generator().manual_seed(1)
    )  # fmt: skip
    joint = Counter()
    sampler = Sampler(vocab)
    for start in range(0, count, 500):
        drafts = first_drafts[start : start + 500].tolist()
        ids = [enter(sampler, str(i), params, prompt=(1,), seed=start + i) for i in range(500)]
        logits = torch.stack([tables[row_] for guess in drafts for row_ in (vocab, guess[0], guess[1])])
        rows = [row(i, prompt=(1,), drafts=guess) for i, guess in zip(ids, drafts, strict=True)]
        first = sampler.choose(rows, logits)
        short = [i for i, result in enumerate(first) if len(result.token_ids) < 2]
        rest = [row(ids[i], prompt=tuple(sampler.token_ids(ids[i]))) for i in short]
        sampler.choose(rest, torch.stack([tables[first[i].token_ids[0]] for i in short]))
        joint.update(tuple(list(sampler.token_ids(i))[1:3]) for i in ids)

    def conditional(known):
        logits = tables[vocab if len(known) == 1 else known[-1]].double().numpy().copy()
        for token in set(known):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in known[1:]:
            logits[token] -= 0.8 + 0.4
        logits[2] += 0.5
        p = np.exp(logits / 1.3) / np.exp(logits / 1.3).sum()
        order = np.argsort(-p)
        p[order[np.cumsum(p[order]) - p[order] >= 0.8]] = 0
        return p / p.sum()

    expected = {
        (a, b): count * pa * pb
        for a, pa in enumerate(conditional([1]))
        for b, pb in enumerate(conditional([1, a]))
        if pa * pb > 0
    }
    assert set(joint) <= set(expected)
    observed = [joint[pair] for pair in expected]
    assert chisquare(observed, list(expected.values())).pvalue > 1e-3


def test_a_seed_draws_the_same_tokens_in_any_company_order_and_after_a_preemption():
    """S01: alone, beside others in any order, taken again in the middle."""

    def run(seeds, place, *, again=False):
        sampler = Sampler(VOCAB)
        params = [SamplingParams(temperature=0.8, seed=seed) for seed in seeds]
        ids = [enter(sampler, str(i), p) for i, p in enumerate(params)]
        for step in range(16):
            if again and step == 7:
                answer = list(sampler.token_ids(ids[place]))[3:]
                sampler.leave(ids[place])
                enter(sampler, str(place), params[place], answer=answer)
            known = [tuple(sampler.token_ids(i)) for i in ids]
            logits = torch.cat([random_logits(1, seed=sum(k) + len(k)) for k in known])
            sampler.choose([row(i, prompt=k) for i, k in zip(ids, known, strict=True)], logits)
        return list(sampler.token_ids(ids[place]))[3:]

    alone = run([42], 0)
    assert run([42], 0, again=True) == alone
    for place in (0, 3, 7):
        others = list(range(100 * place, 100 * place + 8))
        others[place] = 42
        assert run(others, place) == alone
        assert run([seed + 1 if i != place else 42 for i, seed in enumerate(others)], place, again=True) == alone
    assert len({tuple(run([seed], 0)) for seed in range(20)}) > 15  # S02
