"""Log-probabilities: of the raw distribution, finite, of real ids, for answers and prompts."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.sampling import Sampler
from intarsia.sampling.reports import FLOOR
from intarsia.types import Row, SamplingParams, Want
from sampling_rows import VOCAB, enter, random_logits, row

#: Ways to choose that must not show in the report.
WAYS = [
    {"temperature": 0},
    {"temperature": 1.7, "top_p": 0.1},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0, "logit_bias": {"BEST": -100}},
    {"temperature": 0, "banned_token_ids": "BEST"},
    {"temperature": 0, "repetition_penalty": 3.0, "presence_penalty": 2},
    {"temperature": 2.0, "min_p": 0.3, "typical_p": 0.3},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_logprobs_are_of_the_raw_distribution_and_hold_the_chosen_token(way):
    """S09."""
    logits = random_logits(1, scale=1.0)
    reference = logits.double().log_softmax(-1)[0]
    best = reference.topk(5)
    way = dict(way)
    if "logit_bias" in way:
        way["logit_bias"] = {int(best.indices[0]): -100}
    if "banned_token_ids" in way:
        way["banned_token_ids"] = best.indices.tolist()
    sampler = Sampler(VOCAB)
    (result,) = sampler.choose([row(enter(sampler, "a", SamplingParams(**way, logprobs=5, seed=2)))], logits.clone())
    (entry,) = result.logprobs
    assert [t for t, _ in entry.top] == best.indices.tolist()
    assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert entry.token_id == result.token_ids[0]
    assert entry.logprob == pytest.approx(reference[entry.token_id].item(), abs=1e-6)
    if "banned_token_ids" in way:
        assert entry.token_id not in best.indices.tolist()


@settings(deadline=None, max_examples=60)
@given(
    forbidden=st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1),
    wanted=st.integers(0, VOCAB + 3),
    scale=st.sampled_from([0.0, 1.0, 1e4, 1e30]),
)
def test_reports_are_strict_json_whatever_the_raw_logits(forbidden, wanted, scale):
    logits = random_logits(1, scale=scale)
    logits[0, list(forbidden)] = -torch.inf
    sampler = Sampler(VOCAB)
    (result,) = sampler.choose([row(enter(sampler, "a", SamplingParams(seed=1, logprobs=wanted)))], logits.clone())
    (entry,) = result.logprobs
    json.dumps([entry.logprob, entry.top], allow_nan=False)
    assert len(entry.top) == min(wanted, VOCAB - len(forbidden))
    assert not {token for token, _ in entry.top} & forbidden
    assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)
    if wanted >= VOCAB and scale <= 1:
        assert math.fsum(math.exp(v) for _, v in entry.top) == pytest.approx(1, abs=1e-5)


def test_raw_logits_that_are_not_finite_are_an_error_where_they_are_to_be_reported():
    sampler = Sampler(VOCAB)
    params = SamplingParams(temperature=0, banned_token_ids=[4], logprobs=1)
    ids = [enter(sampler, name, params) for name in "ab"]
    logits = random_logits(2)
    logits[0, 4] = torch.nan
    results = sampler.choose([row(i) for i in ids], logits)
    assert "not finite" in results[0].error and not results[0].token_ids
    assert results[1].error is None


def test_reports_of_one_row_are_the_same_bits_beside_others():
    logits = random_logits(5, vocab=3001)
    params = SamplingParams(temperature=0, logprobs=20)
    sampler = Sampler(2999)
    ids = [enter(sampler, str(i), params) for i in range(5)]
    padded = logits.clone()
    together = sampler.choose([row(i) for i in ids], padded)
    for i in range(5):
        alone = Sampler(2999)
        (result,) = alone.choose([row(enter(alone, "a", params))], logits[i : i + 1].clone())
        assert result.logprobs == together[i].logprobs


def test_ids_of_a_padded_vocabulary_are_never_chosen_nor_reported():
    """D05."""
    sampler = Sampler(num_ids=257)
    params = SamplingParams(temperature=100, seed=1, logprobs=1000)
    sequence_id = enter(sampler, "a", params)
    logits = torch.cat([random_logits(1, vocab=257), torch.full((1, 63), 50.0)], dim=1)
    for _ in range(500):
        known = tuple(sampler.token_ids(sequence_id))
        (result,) = sampler.choose([row(sequence_id, prompt=known)], logits.clone())
        assert result.token_ids[0] < 257
    (entry,) = result.logprobs
    assert {token for token, _ in entry.top} == set(range(257))
    assert math.fsum(math.exp(value) for _, value in entry.top) == pytest.approx(1, abs=1e-5)


# --- prompts ----------------------------------------------------------------------------------------------------------

PROMPT = (4, 8, 15, 16, 23, 42)


@pytest.mark.parametrize(
    ("start", "length", "expected"), [(0, 6, 5), (0, 3, 3), (3, 3, 2), (5, 1, 0), (4, 1, 1), (6, 2, 0)]
)
def test_what_is_scored_is_what_a_token_of_the_prompt_follows(start, length, expected):
    sampler = Sampler(VOCAB)
    params = SamplingParams(prompt_logprobs=1, n=2)
    ids = [enter(sampler, "a", params, prompt=PROMPT, choice=choice, answer=(1, 2)) for choice in (0, 1)]
    known = (*PROMPT, 1, 2)
    first, second = (Row(sequence_id=i, token_ids=known[start : start + length], start=start) for i in ids)
    assert sampler.scored(first) == range(expected)
    assert sampler.scored(second) == range(0), "the choices of a request share a prompt: it is scored once"
    third = enter(sampler, "b", SamplingParams(), prompt=PROMPT)
    assert sampler.scored(Row(sequence_id=third, token_ids=PROMPT, start=0)) == range(0)


@pytest.mark.parametrize("chunks", [(6,), (1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_a_prompts_scores_are_the_same_in_any_chunks(chunks):
    logits = random_logits(len(PROMPT), vocab=VOCAB + 14)
    reference = logits[:, :VOCAB].double().log_softmax(-1)
    sampler = Sampler(VOCAB)
    sequence_id = enter(sampler, "a", SamplingParams(prompt_logprobs=3), prompt=PROMPT)
    entries, start = [], 0
    for length in chunks:
        one = Row(sequence_id=sequence_id, token_ids=PROMPT[start : start + length], start=start, want=Want.NONE)
        indices = sampler.scored(one)
        for part in (indices[: len(indices) // 2], indices[len(indices) // 2 :]):
            entries += sampler.score(one, part, logits[start + part.start : start + part.stop]) if part else ()
        start += length
    assert [entry.token_id for entry in entries] == list(PROMPT[1:])
    for i, entry in enumerate(entries):
        best = reference[i].topk(3)
        assert entry.logprob == pytest.approx(reference[i, PROMPT[i + 1]].item(), abs=1e-6)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_an_impossible_token_of_the_prompt_has_the_floor():
    sampler = Sampler(VOCAB)
    sequence_id = enter(sampler, "a", SamplingParams(prompt_logprobs=0), prompt=PROMPT)
    logits = random_logits(5)
    logits[2, PROMPT[3]] = -torch.inf
    one = row(sequence_id, prompt=PROMPT)
    before = logits.clone()
    entries = sampler.score(one, range(5), logits)
    assert entries[2].logprob == FLOOR and all(entry.logprob > FLOOR for i, entry in enumerate(entries) if i != 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("want", list(Want))
def test_a_prompt_whose_logits_are_not_finite_is_that_rows_error(want):
    sampler = Sampler(VOCAB)
    ids = [enter(sampler, name, SamplingParams(prompt_logprobs=1), prompt=PROMPT) for name in "ab"]
    rows = [row(ids[0], prompt=PROMPT, want=want), row(ids[1], prompt=PROMPT)]
    logits = random_logits(5)
    logits[3, 7] = torch.nan
    assert sampler.score(rows[0], range(5), logits) == ()
    assert len(sampler.score(rows[1], range(5), random_logits(5))) == 5
    results = sampler.choose(rows, random_logits(2 if want is Want.LAST else 1))
    assert "prompt" in results[0].error and "not finite" in results[0].error
    assert results[1].error is None and len(results[1].token_ids) == 1
