"""Logits processors: they see drafts and their own ids alone, and end no row but their own."""

import pytest
import torch

from intarsia.sampling import Sampler
from intarsia.types import SamplingParams
from sampling_rows import VOCAB, enter, random_logits, row


class Processor:
    """Asked for by a request whose seed is 13; does in `process` what it is made with."""

    def __init__(self, process, applies=lambda params: params.seed == 13, opened=lambda params, num_prompt: None):
        self.process, self._applies, self._opened = process, applies, opened

    def applies(self, params):
        return self._applies(params)

    def prepare(self, params):
        return None

    def open(self, params, num_prompt):
        self._opened(params, num_prompt)
        return self


def fail(*_):
    raise KeyError("grammar")


def test_logits_processors_see_drafts_and_apply_where_they_say():
    def ban_the_token_before(token_ids, logits_V):
        logits_V[token_ids[-1]] = -torch.inf

    sampler = Sampler(VOCAB, (Processor(ban_the_token_before),))
    first = enter(sampler, "a", SamplingParams(temperature=0, seed=13))
    second = enter(sampler, "b", SamplingParams(temperature=0))
    logits = torch.zeros(4, VOCAB)
    logits[:, 3], logits[:, 4] = 9.0, 8.0
    results = sampler.choose([row(first, drafts=(4, 3)), row(second)], logits)
    # after 3: 3 is banned, so 4; after the draft 4: 3; after the draft 3: 4 again
    assert results[0].token_ids == (4, 3, 4)
    assert results[1].token_ids == (3,)


def test_a_processor_gets_the_row_of_real_ids_after_penalties_and_bias_and_before_bans():
    seen = []
    opened = []
    processor = Processor(
        lambda token_ids, logits_V: seen.append((list(token_ids), logits_V.clone())),
        opened=lambda params, num_prompt: opened.append(num_prompt),
    )
    sampler = Sampler(VOCAB, (processor,))
    params = SamplingParams(
        temperature=0, seed=13, repetition_penalty=2.0, logit_bias={4: 1.5}, banned_token_ids=[7], frequency_penalty=0.5
    )
    sequence_id = enter(sampler, "a", params, prompt=(1, 2), answer=(5, 5))
    logits = torch.full((1, VOCAB + 14), 2.0)
    sampler.choose([row(sequence_id, prompt=(1, 2, 5, 5))], logits)
    ((ids, logits_V),) = seen
    expected = torch.full((VOCAB,), 2.0)
    expected[[1, 2]], expected[5], expected[4] = 1.0, 1.0 - 2 * 0.5, 3.5
    assert (opened, ids) == ([2], [1, 2, 5, 5])
    assert torch.equal(logits_V, expected)


def test_what_a_processor_allows_stays_banned():
    def want(token_ids, logits_V):
        logits_V.fill_(-torch.inf)
        logits_V[[7, 9]] = torch.tensor([5.0, 1.0])

    sampler = Sampler(VOCAB, (Processor(want),))
    sequence_id = enter(sampler, "a", SamplingParams(seed=13, banned_token_ids=[7], logit_bias={7: 100}))
    (result,) = sampler.choose([row(sequence_id)], random_logits(1))
    assert result.token_ids == (9,)


def test_changing_the_ids_that_a_processor_is_given_changes_no_sequence():
    sampler = Sampler(VOCAB, (Processor(lambda token_ids, logits_V: token_ids.clear()),))
    sequence_id = enter(sampler, "a", SamplingParams(seed=13))
    (result,) = sampler.choose([row(sequence_id)], random_logits(1))
    assert list(sampler.token_ids(sequence_id)) == [1, 2, 3, *result.token_ids]


@pytest.mark.parametrize(
    "broken",
    [Processor(fail), Processor(None, opened=fail), Processor(None, applies=lambda p: p.seed == 13 and fail())],
    ids=["process", "open", "applies"],
)
def test_a_processor_that_raises_ends_its_own_row(broken):
    sampler = Sampler(VOCAB, (broken,))
    ids = [enter(sampler, "a", SamplingParams(temperature=0)), enter(sampler, "b", SamplingParams(seed=13))]
    results = sampler.choose([row(i) for i in ids], random_logits(2))
    assert results[0].error is None and results[0].token_ids
    assert "Processor" in results[1].error and "grammar" in results[1].error
    assert results[1].token_ids == ()


@pytest.mark.parametrize("fill", [-torch.inf, torch.nan])
def test_a_processor_that_leaves_nothing_is_an_error_not_a_token(fill):
    sampler = Sampler(VOCAB, (Processor(lambda token_ids, logits_V: logits_V.fill_(fill)),))
    ids = [enter(sampler, "a", SamplingParams(seed=13)), enter(sampler, "b", SamplingParams(seed=1))]
    results = sampler.choose([row(i) for i in ids], random_logits(2))
    assert not results[0].token_ids and results[1].token_ids
    assert ("NaN" if fill != fill else "no token is allowed") in results[0].error


def test_after_a_complete_grammar_the_answer_ends_though_min_tokens_are_left():
    """G02: a grammar that allows nothing but the end, with min_tokens to go, is no row without a token."""

    def end(token_ids, logits_V):
        kept = logits_V[[0, 2]].clone()
        logits_V.fill_(-torch.inf)
        logits_V[[0, 2]] = kept

    for temperature in (0, 1):
        sampler = Sampler(VOCAB, (Processor(end),))
        params = SamplingParams(seed=13, temperature=temperature, min_tokens=9, banned_token_ids=[2])
        ids = [enter(sampler, "a", params, stop_ids=(0, 2)), enter(sampler, "b", params, stop_ids=(2,))]
        results = sampler.choose([row(i) for i in ids], random_logits(2))
        assert [r.token_ids for r in results] == [(0,), (0,)]
        # What is banned on its own account stays so: then nothing is left, and that is said.
        sampler = Sampler(VOCAB, (Processor(end),))
        params = SamplingParams(seed=13, temperature=temperature, min_tokens=9, banned_token_ids=[0, 2])
        (result,) = sampler.choose([row(enter(sampler, "a", params, stop_ids=(0, 2)))], random_logits(1))
        assert "no token is allowed" in result.error


def test_what_fails_behind_a_rejected_draft_ends_nothing():
    """A grammar may raise at a draft that it would never have allowed; the token before it is chosen all the same."""

    def refuse_9(token_ids, logits_V):
        if 9 in token_ids:
            raise ValueError("9 is not in the grammar")
        logits_V[9] = -torch.inf

    logits = random_logits(3)
    logits[:, 9] = 50.0
    for drafts in ((9, 4), (int(logits[0, :9].argmax()), 9)):
        sampler = Sampler(VOCAB, (Processor(refuse_9),))
        sequence_id = enter(sampler, "a", SamplingParams(temperature=0, seed=13))
        (result,) = sampler.choose([row(sequence_id, drafts=drafts)], logits.clone())
        assert result.error is None
        assert result.token_ids and 9 not in result.token_ids
    # Behind an accepted draft it counts.
    sampler = Sampler(VOCAB, (Processor(lambda ids, logits_V: fail() if len(ids) > 3 else None),))
    sequence_id = enter(sampler, "a", SamplingParams(temperature=0, seed=13))
    (result,) = sampler.choose([row(sequence_id, drafts=(9, 4))], logits.clone())
    assert "grammar" in result.error and not result.token_ids


def test_logits_that_are_not_finite_behind_a_rejected_draft_end_nothing():
    sampler = Sampler(VOCAB)
    sequence_id = enter(sampler, "a", SamplingParams(temperature=0, logprobs=2))
    logits = random_logits(2)
    logits[1] = torch.nan
    wrong = int(logits[0].argmin())
    (result,) = sampler.choose([row(sequence_id, drafts=(wrong,))], logits.clone())
    assert result.error is None and result.token_ids == (int(logits[0].argmax()),)
    assert len(result.logprobs) == 1
