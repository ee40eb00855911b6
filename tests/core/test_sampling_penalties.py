"""Penalties and biases against transformers and a plain reference, at every position of a row with drafts."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from intarsia.sampling import Sampler
from intarsia.sampling.history import History
from intarsia.types import SamplingParams
from sampling_rows import VOCAB, enter, generate, random_logits, row

PROMPT = (5, 5, 5, 9, 9)


def logits_after(ids):
    return random_logits(1, seed=sum((i + 1) * token for i, token in enumerate(ids)) % 2**31)[0]


def test_repetition_counts_prompt_and_answer_as_transformers_does():
    answer, _ = generate(SamplingParams(temperature=0, repetition_penalty=1.3), logits_after, 24, prompt=PROMPT)
    known, processor = list(PROMPT), RepetitionPenaltyLogitsProcessor(1.3)
    for _ in range(24):
        known.append(int(processor(torch.tensor([known]), logits_after(known).unsqueeze(0)).argmax()))
    assert answer == known[len(PROMPT) :]
    plain, _ = generate(SamplingParams(temperature=0), logits_after, 24, prompt=PROMPT)
    assert answer != plain


def reference(known, num_prompt, params):
    """Logits after `known`, penalised and biased by the contract, in float64."""
    logits = logits_after(known).double().numpy()
    counts = Counter(known[num_prompt:])
    for token in set(known):
        r = params.repetition_penalty or 1.0
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    logits[list(params.banned_token_ids)] = -np.inf
    return logits


def test_presence_and_frequency_count_the_answer_alone():
    params = SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=1.5)
    answer, _ = generate(params, logits_after, 24, prompt=PROMPT)
    assert answer[0] == int(logits_after(list(PROMPT)).argmax())
    known = list(PROMPT)
    for token in answer:
        assert token == int(reference(known, len(PROMPT), params).argmax())
        known.append(token)


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_an_answer_that_came_before_a_preemption_is_still_answer(cut):
    params = SamplingParams(
        temperature=0.8, seed=4, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=9
    )
    whole, _ = generate(params, logits_after, 12, prompt=PROMPT, stop_ids=range(10))
    rest, _ = generate(params, logits_after, 12, prompt=PROMPT, answer=whole[:cut], stop_ids=range(10))
    assert rest == whole


drawn = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3, 20]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    typical_p=st.sampled_from([1.0, 0.7]),
    repetition_penalty=st.floats(0.5, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=4),
    banned_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    min_tokens=st.integers(0, 8),
    logprobs=st.sampled_from([None, 0, 3]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(deadline=None, max_examples=120)
@given(params=drawn, guesses=st.lists(st.integers(0, VOCAB - 1), max_size=40), right=st.integers(0, 6))
def test_drafts_change_nothing_with_every_parameter_in_force(params, guesses, right):
    plain, entries = generate(params, logits_after, 10, stop_ids=(1, 2, 3))

    def drafts(answer):
        """Right for a while, then any."""
        return [*plain[len(answer) : len(answer) + right], *guesses[len(answer) :]][:5]

    drafted, drafted_entries = generate(params, logits_after, 10, drafts=drafts, stop_ids=(1, 2, 3))
    assert drafted == plain
    assert drafted_entries == entries


@settings(deadline=None, max_examples=120)
@given(params=drawn, drafts=st.lists(st.integers(0, VOCAB - 1), max_size=4))
def test_every_position_sees_the_drafts_before_it_and_none_after(params, drafts):
    """The logits that are chosen from are what the contract says, and none of them knows a draft after it."""
    known, answer = [1, 2, 3], [4, 4, 7]
    sampler = Sampler(VOCAB)
    sequence_id = enter(sampler, "a", params, answer=answer, stop_ids=())
    logits = torch.stack([logits_after([*known, *answer, *drafts[:i]]) for i in range(len(drafts) + 1)])
    (result,) = sampler.choose([row(sequence_id, prompt=(*known, *answer), drafts=tuple(drafts))], logits)
    assert result.error is None
    for i, found in enumerate(logits):
        expected = reference([*known, *answer, *drafts[:i]], len(known), params)
        assert found.numpy() == pytest.approx(expected, abs=2e-5)


@settings(deadline=None, max_examples=60)
@given(others=st.lists(drawn, min_size=1, max_size=5), place=st.integers(0, 5))
def test_a_row_with_everything_in_force_is_alone_among_others(others, place):
    mine = SamplingParams(
        temperature=1.1,
        top_p=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        logit_bias={3: 2.0},
        seed=8,
        logprobs=2,
    )
    place = min(place, len(others))
    everyone = [*others[:place], mine, *others[place:]]
    alone = Sampler(VOCAB)
    logits = random_logits(len(everyone), seed=3)
    sequence_id = enter(alone, "a", mine)
    (expected,) = alone.choose([row(sequence_id)], logits[place : place + 1].clone())
    sampler = Sampler(VOCAB)
    ids = [enter(sampler, str(i), params) for i, params in enumerate(everyone)]
    results = sampler.choose([row(i) for i in ids], logits.clone())
    assert (results[place].token_ids, results[place].logprobs) == (expected.token_ids, expected.logprobs)
    assert all(result.error is None and 0 <= result.token_ids[0] < VOCAB for result in results)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_requests_batched_in_either_order_equal_their_solo_runs(order):
    both = [SamplingParams(temperature=0, repetition_penalty=2.0), SamplingParams(seed=99, top_k=1, temperature=1.0)]
    solo = [generate(params, logits_after, 5, prompt=PROMPT)[0] for params in both]
    sampler = Sampler(VOCAB)
    ids = [enter(sampler, str(i), params, prompt=PROMPT) for i, params in enumerate(both)]
    for _ in range(5):
        rows = [row(ids[i], prompt=tuple(sampler.token_ids(ids[i]))) for i in order]
        sampler.choose(rows, torch.stack([logits_after(list(sampler.token_ids(ids[i]))) for i in order]))
    assert [list(sampler.token_ids(i))[len(PROMPT) :] for i in ids] == solo


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 200), min_size=1, max_size=50),
    chunks=st.lists(st.lists(st.integers(0, 189), max_size=40), max_size=8),
    drafts=st.lists(st.integers(0, 189), max_size=5),
)
def test_counts_kept_as_tokens_come_equal_counting_all(prompt, chunks, drafts):
    history = History(list(prompt), len(prompt), counted=True, num_ids=190)
    for chunk in chunks:
        history.extend(chunk)
    for guesses in ([], drafts, []):
        ids, counts = history.counts(guesses)
        answer = Counter([token for chunk in chunks for token in chunk] + guesses)
        assert len(ids) == len(set(ids.tolist()))
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            token: answer[token] for token in {*(token for token in prompt if token < 190), *answer}
        }
