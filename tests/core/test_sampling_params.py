"""SamplingParams refuse what cannot be run, before any step, and name the field (S04)."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import InvalidRequestError
from intarsia.sampling import Sampler
from intarsia.sampling.settings import Settings
from intarsia.types import SamplingDefaults, SamplingParams
from sampling_rows import VOCAB, enter, random_logits, row

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1, NAN, INF, -INF, 1e400, "hot", True, [1], 10**400)),
        *((name, Fraction(10**400)) for name in ("temperature", "top_p", "presence_penalty", "max_tokens")),
        *(("logit_bias", value) for value in ({1: Fraction(10**400)}, {Fraction(10**400): 1}, {"1" * 5000: 1})),
        *(("top_p", value) for value in (-1, 2, NAN, 1.0000001, "1", False)),
        *(("min_p", value) for value in (-0.1, 1.5, NAN)),
        *(("typical_p", value) for value in (-0.1, 1.5, NAN)),
        *(("repetition_penalty", value) for value in (0, -1, NAN, INF, 1e-9)),
        *(("presence_penalty", value) for value in (3, -3, NAN, None)),
        *(("frequency_penalty", value) for value in (3, -3, NAN, None)),
        *(("top_k", value) for value in (-2, 1.5, NAN, INF, "5")),
        *(("max_tokens", value) for value in (-1, 0, 2.5, NAN)),
        *(("min_tokens", value) for value in (-1, 2.5, None)),
        *(("seed", value) for value in (-1, 2**64, 1.5, "7")),
        *(("n", value) for value in (0, -1, 129, 1.5)),
        *(("logprobs", value) for value in (-1, 1001, 1.5)),
        *(("prompt_logprobs", value) for value in (-1, 1001, 1.5)),
        *(("logit_bias", value) for value in ({1: NAN}, {1: INF}, {-1: 1}, {"x": 1}, {1: "1"}, {1.5: 1}, [1], 5)),
        *(("banned_token_ids", value) for value in ([-1], [1.5], ["1"], [True], -3)),
        *(("banned_words", value) for value in ([""], [5], "", 5, [b"x"])),
        *(("stop", value) for value in ([""], [5], "")),
        *(("stop_token_ids", value) for value in ([-1], ["1"], [NAN], np.array(1.5), np.array([[1]]), torch.ones(2))),
        *(("ignore_eos", value) for value in (1, "true", None)),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_value_out_of_range_is_refused_and_its_field_named(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == f"sampling.{name}"
    assert str(caught.value).startswith(f"sampling.{name}: ")
    assert "is not" in str(caught.value)


def test_min_tokens_above_max_tokens_are_refused():
    with pytest.raises(InvalidRequestError, match="at most max_tokens, which is 3"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_ids_are_taken_from_arrays_and_tensors_of_no_dimensions_too():
    for ids, expected in ((np.array(3), (3,)), (torch.tensor([3, 4]), (3, 4)), (np.array([], dtype=int), ())):
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == expected


def test_numbers_of_numpy_and_the_ids_of_json_are_taken_as_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        top_p=Fraction(1, 2),
        logit_bias=json.loads('{"7": 1.5}'),
        banned_token_ids=np.array([3, 4]),
    )
    assert (type(params.temperature), type(params.top_k), params.top_p) == (float, int, 0.5)
    assert params.logit_bias == {7: 1.5}
    assert params.banned_token_ids == (3, 4)
    assert all(type(token) is int for token in params.banned_token_ids)


def test_what_a_request_leaves_open_is_the_models_and_what_it_says_is_its_own():
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, typical_p=0.9, repetition_penalty=1.1)
    params = SamplingParams(temperature=0.0, top_k=0, repetition_penalty=1.0).filled(defaults)
    found = Settings.of(params)
    assert (found.temperature, found.top_k, found.repetition_penalty) == (0.0, 0, 1.0)
    assert (found.top_p, found.min_p, found.typical_p) == (0.95, 0.1, 0.9)


anything = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.one_of(st.floats(0, 1e4), st.sampled_from([0.0, 5e-324, 1e-300, 1e4])),
        "top_k": st.one_of(st.integers(0, VOCAB + 2), st.just(10**30)),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 10**12), st.floats(-1e4, 1e4), max_size=4),
        "banned_token_ids": st.lists(st.integers(0, VOCAB + 5), max_size=VOCAB - 1),
        "min_tokens": st.integers(0, 10**20),
        "logprobs": st.integers(0, 1000),
    },
)


@settings(deadline=None, max_examples=200)
@given(
    chosen=st.lists(anything, min_size=1, max_size=5),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 20.0, 1e4, 1e30]),
    forbidden=st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_value_that_is_taken_gives_a_token_of_the_vocabulary_and_no_nan(chosen, scale, forbidden, seed):
    logits = random_logits(len(chosen), vocab=VOCAB + 6, scale=scale, seed=seed % 1000)
    logits[0, list(forbidden)] = -math.inf
    params = [SamplingParams(**one) for one in chosen]
    sampler = Sampler(VOCAB)
    ids = [enter(sampler, str(i), one, seed=seed, stop_ids=(2, 9), answer=(4, 4)) for i, one in enumerate(params)]
    results = sampler.choose([row(i, prompt=(1, 2, 3, 4, 4)) for i in ids], logits.clone())
    for i, (one, result) in enumerate(zip(params, results, strict=True)):
        left = set(range(VOCAB)) - set(one.banned_token_ids) - (forbidden if i == 0 else set())
        if not left:
            assert "no token is allowed" in result.error
            continue
        assert result.error is None
        assert result.token_ids[0] in left
        json.dumps([[entry.logprob, entry.top] for entry in result.logprobs], allow_nan=False)
        alone = Sampler(VOCAB)
        again = enter(alone, "a", one, seed=seed, stop_ids=(2, 9), answer=(4, 4))
        assert (
            alone.choose([row(again, prompt=(1, 2, 3, 4, 4))], logits[i : i + 1].clone())[0].token_ids
            == result.token_ids
        )
