"""A step names the tokens whose residual stream is read, and reads no other's."""

import random

import pytest
import torch
from attrs import define, field

from engines import engine_of
from intarsia import SamplingParams
from intarsia.testing import scripted
from models import tiny_llama

CHUNKS = {"scheduler": {"use": "inflight", "max_tokens": 7}}
AHEAD = {"executor": {"use": "local", "depth": 2}}
PROMPTS = [[random.Random(seed).randrange(256) for _ in range(5 + 4 * seed)] for seed in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@define
class Leaving:
    """Runs another runner, and leaves NaN of tokens that are not read.

    Attributes:
        batches: those that ran.
    """

    inner: object
    batches: list = field(factory=list)

    def run(self, batch, *args):
        self.batches.append(batch)
        hidden_TE = self.inner.run(batch, *args)
        if batch.read_L is None:
            return hidden_TE
        left_TE = torch.full_like(hidden_TE, torch.nan)
        return left_TE.index_copy(0, batch.read_L, hidden_TE[batch.read_L])

    def logits(self, hidden_TE, rows_L):
        return self.inner.logits(hidden_TE, rows_L)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))[0]


def said(model, prompts, params, **sections):
    """The answers of an engine."""
    with engine_of(model, **sections) as engine:
        return engine.generate(prompts, params)


def left(model, prompts, params, **sections):
    """The answers of an engine whose runner leaves what is not read, and the batches that it ran."""
    with engine_of(model, **sections) as engine:
        stage = engine.parts.executor._stage
        stage._runner = Leaving(stage._runner)
        return engine.generate(prompts, params), stage._runner.batches


@pytest.mark.parametrize("sections", [{}, CHUNKS, AHEAD, CHUNKS | AHEAD], ids=["whole", "chunks", "ahead", "both"])
def test_those_are_read_after_which_a_token_is_chosen(tiny, sections):
    others = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, repetition_penalty=1.2),
    ]
    params = [GREEDY, *others, GREEDY]
    found, batches = left(tiny, PROMPTS, params, **sections)
    assert [one.choices for one in found] == [one.choices for one in said(tiny, PROMPTS, params, **sections)]
    assert all(torch.equal(batch.read_L, batch.logits_L) for batch in batches)
    assert any(len(batch.read_L) < len(batch.ids_T) for batch in batches)


def test_of_a_chunk_behind_which_none_is_chosen_no_token_is_read(tiny):
    _, batches = left(tiny, [PROMPTS[3]], GREEDY, **CHUNKS)
    assert [batch.read_L.tolist() for batch in batches[:3]] == [[], [], [2]]


@pytest.mark.parametrize("sections", [{}, CHUNKS, AHEAD], ids=["whole", "chunks", "ahead"])
def test_all_are_read_while_a_prompt_is_scored(tiny, sections):
    scored = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    params = [GREEDY, GREEDY, scored, GREEDY]
    found, batches = left(tiny, PROMPTS, params, **sections)
    for one, expected in zip(found, said(tiny, PROMPTS, params, **sections), strict=True):
        assert (one.choices, one.prompt_logprobs) == (expected.choices, expected.prompt_logprobs)
    assert len(found[2].prompt_logprobs) == len(PROMPTS[2])
    assert {batch.read_L is None for batch in batches} == {True, False}, "once it has left that is over"


def test_drafts_that_are_verified_are_read_all(tiny):
    prompt = PROMPTS[2]
    (expected,) = said(tiny, [prompt], GREEDY)
    ids = [
        (token + place // 2 % 2) % 256 for place, token in enumerate(expected.choices[0].token_ids)
    ]  # some are wrong
    drafter = {"use": "scripted", "ids": ids, "prompt_tokens": len(prompt)}
    (found,), batches = left(tiny, [prompt], GREEDY, drafter=drafter, plugins=[scripted])
    assert found.choices == expected.choices
    first, *verifying = [batch.read_L.tolist() for batch in batches]
    assert first == [len(prompt) - 1]
    assert any(len(read) > 2 for read in verifying)
    assert verifying == [list(range(len(batch.ids_T))) for batch in batches[1:]]
