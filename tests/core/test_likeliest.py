"""A runner that finds likeliest ids: steps of plain rows ask it for these, and all is as if it had given logits."""

import random

import pytest
import torch
from attrs import define, evolve, field

from engines import engine_of
from intarsia import Request, SamplingParams
from intarsia.errors import ExecutionError
from intarsia.hookspecs import hookimpl
from intarsia.protocols import Drafter, LikeliestRunner
from intarsia.sampling import Sampler
from intarsia.sampling.arithmetic import likeliest, likeliest_ids
from intarsia.types import Draft, Provider, Want
from models import tiny_llama
from sampling_rows import VOCAB, enter, random_logits, row

GREEDY = SamplingParams(temperature=0)
#: What makes a row one whose logits are needed.
NOT_PLAIN = {
    "drawn": SamplingParams(temperature=1.0, seed=3),
    "penalised": SamplingParams(temperature=0, repetition_penalty=1.2),
    "biased": SamplingParams(temperature=0, logit_bias={5: 2.0}),
    "banned": SamplingParams(temperature=0, banned_token_ids=(5,)),
    "reported": SamplingParams(temperature=0, logprobs=2),
}


# --- the sampler ------------------------------------------------------------------------------------------------------


def chosen(rows, logits, params=GREEDY):
    """What two samplers choose, from logits and from likeliest ids; and what they know of their sequences then."""
    found = []
    for serves in ("choose", "take"):
        sampler = Sampler(VOCAB)
        for one in dict.fromkeys(one.sequence_id for one in rows):
            enter(sampler, one[0], params)
        if serves == "take":
            assert sampler.are_plain(rows)
            results = sampler.take(rows, *likeliest(logits[:, :VOCAB].clone()))
        else:
            results = sampler.choose(rows, logits.clone())
        found.append((results, [list(sampler.token_ids(one.sequence_id)) for one in rows]))
    return found


def test_plain_rows_are_taken_as_they_are_chosen():
    rows = [row(("a", 0)), row(("b", 0), want=Want.NONE), row(("c", 0))]
    by_logits, by_ids = chosen(rows, random_logits(2))
    assert by_ids == by_logits


@pytest.mark.parametrize("right", range(4))
def test_drafts_are_verified_against_likeliest_ids(right):
    logits = random_logits(5, seed=7)
    targets = logits.argmax(dim=-1).tolist()
    drafts = [token if depth < right else (token + 1) % VOCAB for depth, token in enumerate(targets[:3])]
    rows = [row(("a", 0), drafts=drafts), row(("b", 0))]
    by_logits, by_ids = chosen(rows, logits)
    assert by_ids == by_logits
    assert by_ids[0][0].token_ids == tuple(targets[: right + 1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("failing", range(4))
def test_a_row_whose_logits_are_not_finite_has_its_error_and_the_others_go_on(failing, value):
    logits = random_logits(4, seed=1)
    targets = logits.argmax(dim=-1).tolist()
    logits[failing, :] = value
    rows = [row(("a", 0)), row(("b", 0), drafts=targets[1:2]), row(("c", 0))]
    by_logits, by_ids = chosen(rows, logits)
    assert by_ids == by_logits
    assert sum(result.error is not None for result in by_ids[0]) == 1


def test_what_fails_behind_a_rejected_draft_does_not_count():
    logits = random_logits(2, seed=1)
    wrong = (int(logits[0].argmax()) + 1) % VOCAB
    logits[1] = float("nan")
    by_logits, by_ids = chosen([row(("a", 0), drafts=[wrong])], logits)
    assert by_ids == by_logits and by_ids[0][0].error is None


@pytest.mark.parametrize("params", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_rows_of_which_more_is_asked_are_not_plain_but_where_they_choose_nothing(params):
    sampler = Sampler(VOCAB)
    plain, other = enter(sampler, "a", GREEDY), enter(sampler, "b", params)
    assert sampler.are_plain([row(plain)])
    assert not sampler.are_plain([row(plain), row(other)])
    assert sampler.are_plain([row(plain), row(other, want=Want.NONE)])


def test_min_tokens_makes_a_row_not_plain_where_it_holds_stop_ids_back():
    sampler = Sampler(VOCAB)
    assert not sampler.are_plain([row(enter(sampler, "a", SamplingParams(temperature=0, min_tokens=4), stop_ids=(9,)))])


def test_a_prompt_that_is_scored_is_not_plain_and_the_answer_behind_it_is():
    sampler = Sampler(VOCAB)
    scored = enter(sampler, "a", SamplingParams(temperature=0, prompt_logprobs=1))
    assert not sampler.are_plain([row(scored, want=Want.NONE)])
    assert sampler.are_plain([row(scored, prompt=(4,), start=3)])


def test_a_sequence_with_an_error_of_its_own_is_not_plain():
    sampler = Sampler(VOCAB)
    failed = enter(sampler, "a", SamplingParams(temperature=0, banned_words=("no",)))
    assert not sampler.are_plain([row(failed, want=Want.NONE)])


# --- an engine --------------------------------------------------------------------------------------------------------


@define
class Finding:
    """Another runner that finds likeliest ids besides, from that one's logits."""

    inner: object
    asked: list = field(factory=list)
    broken: bool = False
    raising: bool = False

    def run(self, *args, **options):
        return self.inner.run(*args, **options)

    def logits(self, hidden_TE, rows_L):
        self.asked.append("logits")
        return self._logits(hidden_TE, rows_L)

    def likeliest(self, hidden_TE, rows_L, num_ids):
        self.asked.append("likeliest")
        if self.raising:
            raise RuntimeError("no head")
        assert len(rows_L) and rows_L.dtype == torch.int64
        return likeliest_ids(self._logits(hidden_TE, rows_L)[:, :num_ids].contiguous())

    def _logits(self, hidden_TE, rows_L):
        logits = self.inner.logits(hidden_TE, rows_L)
        if self.broken:
            logits[0, 3] = float("nan")
        return logits


@define
class Guesses(Drafter):
    """Guesses by what an answer says without it; every other guess is wrong."""

    answers: dict = field(factory=dict)

    def propose(self, requests):
        return [Draft(self._guess(one)) for one in requests]

    def _guess(self, request):
        known = list(request.token_ids)
        for prompt, answer in self.answers.items():
            if known[: len(prompt)] == list(prompt):
                done = len(known) - len(prompt)
                return tuple((token + place // 2) % 256 for place, token in enumerate(answer[done : done + 3]))
        return ()


class _Plugin:
    def __init__(self, drafter):
        self.drafter = drafter

    @hookimpl
    def provide_drafters(self):
        return [Provider(key="guesses", summary="for tests", build=lambda _: self.drafter)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))[0]


def finding(engine, **faults):
    """Let an engine's runner find likeliest ids, and keep what it is asked for."""
    stage = engine.parts.executor._stage
    stage._runner = stage._finding = Finding(stage._runner, **faults)
    assert isinstance(stage._runner, LikeliestRunner)
    return stage._runner


PROMPTS = [[random.Random(seed).randrange(256) for _ in range(5 + seed)] for seed in range(4)]


def said(engine, params):
    return [(one.token_ids, one.logprobs) for c in engine.generate(PROMPTS, params) for one in c.choices]


def test_where_all_rows_are_plain_no_logits_are_asked_for_and_the_answers_are_the_same(tiny):
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 9, 12, 6)]
    with engine_of(tiny) as engine:
        expected = said(engine, params)
        runner = finding(engine)
        assert said(engine, params) == expected
        assert set(runner.asked) == {"likeliest"}


def test_chunks_of_prompts_that_choose_nothing_ask_for_nothing(tiny):
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with engine_of(tiny, scheduler={"use": "inflight", "max_tokens": 3}) as engine:
        expected = engine.generate([PROMPTS[3]], params)[0].choices[0].token_ids
        runner = finding(engine)
        assert engine.generate([PROMPTS[3]], params)[0].choices[0].token_ids == expected
        assert runner.asked == ["likeliest", "likeliest"]


@pytest.mark.parametrize("other", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_a_step_with_another_row_asks_for_logits_and_answers_are_the_same(tiny, other):
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    params = [greedy, greedy, evolve(other, max_tokens=4, ignore_eos=True), greedy]
    with engine_of(tiny) as engine:
        expected = said(engine, params)
        runner = finding(engine)
        assert said(engine, params) == expected
        assert runner.asked.count("logits") == 4 and runner.asked.count("likeliest") == 5


def test_drafts_are_verified_without_logits(tiny):
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with engine_of(tiny) as engine:
        expected = said(engine, params)
    drafter = Guesses({tuple(prompt): list(ids) for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)})
    with engine_of(tiny, drafter={"use": "guesses"}, plugins=[_Plugin(drafter)]) as engine:
        runner = finding(engine)
        assert said(engine, params) == expected
        assert set(runner.asked) == {"likeliest"}
        figures = engine.stats()["speculation"]
        assert 0 < figures["accepted"] < figures["drafted"]


def test_a_row_whose_logits_hold_nan_fails_alone_with_the_same_words(tiny):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    texts = []
    for plain in (True, False):
        with engine_of(tiny) as engine:
            runner = finding(engine)
            engine.parts.executor._stage._finding = runner if plain else None
            runner.broken = True
            for name, prompt in zip("ab", PROMPTS, strict=False):
                engine.add(Request(request_id=name, prompt=prompt, params=params))
            first = engine.step()
            runner.broken = False
            while engine.has_work:
                first += engine.step()
            texts.append([(one.request_id, one.token_ids, one.finish_reason, one.error) for one in first])
            assert runner.asked[0] == ("likeliest" if plain else "logits")
    assert texts[0] == texts[1]
    assert [reason for _, _, reason, _ in texts[0] if reason] == ["error", "length"]


def test_a_runner_that_fails_in_it_is_named(tiny):
    with engine_of(tiny) as engine:
        finding(engine, raising=True)
        with pytest.raises(ExecutionError, match=r"runner .* failed in likeliest: RuntimeError: no head"):
            engine.generate([PROMPTS[0]], GREEDY)
