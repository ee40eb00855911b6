"""Speculation through an engine: whatever a drafter says or fails with, the output is that of plain decoding."""

import logging
import random

import pytest
from attrs import define, field

from engines import engine_of, scripted_engine, smollm2_shaped
from intarsia import SamplingParams
from intarsia.errors import CompositionError, PluginError
from intarsia.hookspecs import hookimpl
from intarsia.protocols import Drafter
from intarsia.types import Draft, Provider
from models import tiny_llama

TOKEN_BYTES = 2 * 4 * 2 * 16 * 4  # of the tiny model: keys and values, layers, kv heads, head dim, fp32
END = 2


@define
class Oracle(Drafter):
    """Knows what plain decoding says, and says it, or what `bend` makes of it."""

    answers: dict = field(factory=dict)
    bend: object = None
    k: int = 4
    log: list = field(factory=list)

    def enter(self, entered):
        self.log.append(("enter", entered.sequence_id, len(entered.token_ids)))

    def propose(self, requests):
        return [Draft(self._guess(request)) for request in requests]

    def _guess(self, request):
        known = list(request.token_ids)
        for (prompt, choice), answer in self.answers.items():
            if known[: len(prompt)] == list(prompt) and request.sequence_id[1] == choice:
                done = len(known) - len(prompt)
                right = list(answer[done : done + self.k])
                return tuple(self.bend(right, done) if self.bend else right)
        return ()

    def observe(self, verified, cost):
        self.log.append(("observe", tuple(verified), cost))

    def forget(self, sequence_id):
        self.log.append(("forget", sequence_id))

    def stats(self):
        return {"calls": len(self.log)}

    def stop(self):
        self.log.append(("stop",))


def plugin_of(drafter):
    """A plugin that offers this drafter."""

    class Plugin:
        @hookimpl
        def provide_drafters(self):
            return [Provider(key="oracle", summary="knows", build=lambda context: drafter)]

    return Plugin()


def drafting(model, drafter, **sections):
    return engine_of(model, drafter="oracle", plugins=[plugin_of(drafter)], **sections)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))[0]


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


PROMPTS = [prompt_of(length, seed=length) for length in (3, 17, 32, 40, 8, 5)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=30, temperature=1, seed=1, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=24, temperature=0.7, top_p=0.8, seed=2, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0, presence_penalty=1.5, frequency_penalty=1.0, min_tokens=10),
    SamplingParams(max_tokens=17, temperature=1.3, seed=4, n=3, logit_bias={7: 2.0}, banned_token_ids=(9,)),
    SamplingParams(max_tokens=24, temperature=0, banned_words=("e",), prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def plain(tiny):
    """What plain decoding says: completions, and (prompt, choice) -> ids."""
    with engine_of(tiny) as engine:
        made = engine.generate(PROMPTS, PARAMS)
    answers = {
        (tuple(one.prompt_token_ids), i): choice.token_ids for one in made for i, choice in enumerate(one.choices)
    }
    return made, answers


def told(completions):
    return [(one.choices, one.prompt_logprobs, one.usage.completion_tokens) for one in completions]


BENDS = {
    "always right": None,
    "always wrong": lambda right, done: [(token + 1) % 250 for token in right],
    "right for a while": lambda right, done: [t if i < done % 4 else (t + 1) % 250 for i, t in enumerate(right)],
    "out of vocabulary": lambda right, done: [*right[:1], 257, -3, 10**9],
    "now and then": lambda right, done: right if done % 3 else [],
}
LAYOUTS = {
    "in flight": {},
    "static": {"scheduler": "static", "cache": {"use": "contiguous", "memory": "64MiB"}},
    "chunks": {"scheduler": {"use": "inflight", "max_tokens": 7}},
    "crowded": {
        "engine": {"max_model_len": 80},
        "cache": {"page_size": 4, "memory": str(132 * TOKEN_BYTES)},
        "scheduler": {"use": "inflight", "max_tokens": 11},
    },
}


@pytest.mark.parametrize("sections", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("bend", BENDS.values(), ids=BENDS)
def test_the_output_is_that_of_plain_decoding_bit_for_bit(tiny, plain, bend, sections):
    """X02: greedy, seeded, penalties, bans, min_tokens, n > 1, log-probabilities, all in one batch."""
    expected, answers = plain
    drafter = Oracle(answers, bend)
    with drafting(tiny, drafter, **sections) as engine:
        engine.parts.executor.poison()
        assert told(engine.generate(PROMPTS, PARAMS)) == told(expected)
        engine.parts.cache.check_integrity()
        figures = engine.stats()
        assert figures["cache"]["used"] == 0
        # The prompts are cached by now: hits, and what is shared was never a rejected draft's.
        assert told(engine.generate(PROMPTS, PARAMS)) == told(expected)
        engine.parts.cache.check_integrity()
    speculation = figures["speculation"]
    assert speculation["failures"] == 0 and speculation["drafted"] > 0
    if bend is None:
        assert speculation["accepted"] == speculation["drafted"] and speculation["tokens_per_step"] > 1.5


@pytest.mark.parametrize("k", range(1, 9))
def test_any_number_of_drafts_a_step_leaves_the_output(tiny, plain, k):
    expected, answers = plain
    with drafting(tiny, Oracle(answers, BENDS["right for a while"], k=k)) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == told(expected)


def test_fewer_steps_run_where_drafts_are_right(tiny, plain):
    _, answers = plain
    prompt = PROMPTS[0]
    steps = {}
    for name in ("always right", "always wrong"):
        with drafting(tiny, Oracle(answers, BENDS[name])) as engine:
            engine.generate([prompt], PARAMS[:1])
            steps[name] = engine.stats()["steps"]
    assert steps == {"always right": 6, "always wrong": 24}


# --- X01: stops inside the accepted run -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    return smollm2_shaped(tmp_path_factory.mktemp("smol"))


@pytest.mark.parametrize(
    ("script", "params", "ids", "reason"),
    [
        ([10, 11, 15, 20, 21, 22], {"stop_token_ids": [15], "max_tokens": 5}, (10, 11, 15), "stop"),
        ([10, 11, END, 20, 21, 22], {"max_tokens": 5}, (10, 11, END), "stop"),
        ([10, 11, 57, 20, 21, 22], {"stop": ["I"], "max_tokens": 5}, (10, 11, 57), "stop"),
        ([10, 11, 12, 13, 14, END], {"max_tokens": 5}, (10, 11, 12, 13, 14), "length"),
        ([10, 0, 0, 11, 12, 13], {"max_tokens": 6, "ignore_eos": True}, (10, 0, 0, 11, 12, 13), "length"),
    ],
    ids=["stop id", "end of sequence", "stop text", "beyond the limit", "id 0 as the bonus token"],
)
def test_a_stop_inside_an_accepted_run_ends_the_answer_there(smol, script, params, ids, reason):
    sections = {"cache": {"memory": "1MiB"}, "engine": {"max_model_len": 64}}
    with scripted_engine(smol, script, guesses=script, **sections) as engine:
        params = SamplingParams(temperature=0, logprobs=1, **params)
        pieces = list(engine.stream([1], params))
        assert tuple(token for piece in pieces for token in piece.token_ids) == ids
        assert sum(len(piece.logprobs) for piece in pieces) == len(ids)
        assert pieces[-1].finish_reason == reason and pieces[-1].usage.completion_tokens == len(ids)
        assert engine.stats()["generated_tokens"] == len(ids)
        assert engine.stats()["speculation"]["accepted"] > 0
        assert engine.stats()["cache"]["used"] == 0
        engine.parts.cache.check_integrity()


# --- what a drafter hears ---------------------------------------------------------------------------------------------


def test_a_drafter_hears_of_sequences_outcomes_and_costs(tiny, plain):
    _, answers = plain
    drafter = Oracle(answers, BENDS["always wrong"], k=3)
    with drafting(tiny, drafter) as engine:
        engine.generate(PROMPTS[:1], PARAMS[:1])
        engine.generate(PROMPTS[1:2], PARAMS[1:2])
    kinds = [entry[0] for entry in drafter.log]
    assert kinds.count("enter") == 2 and kinds.count("forget") >= 1 and kinds[-1] == "stop"
    outcomes = [entry[1] for entry in drafter.log if entry[0] == "observe"]
    costs = [entry[2] for entry in drafter.log if entry[0] == "observe"]
    assert outcomes[0] == () and costs[0].num_tokens == 3 and costs[0].draft_s == 0
    assert all(one.drafted == 3 and one.accepted == 0 for (one,) in outcomes[1:3])
    assert costs[1].num_tokens == 4 and costs[1].target_s > 0 and costs[1].draft_s > 0


@define
class Failing(Oracle):
    """Fails in one method."""

    where: str = ""

    def enter(self, entered):
        self._maybe("enter")

    def propose(self, requests):
        self._maybe("propose")
        if self.where == "count":
            return []
        if self.where == "type":
            return [None for _ in requests]
        return super().propose(requests)

    def observe(self, verified, cost):
        self._maybe("observe")

    def forget(self, sequence_id):
        self._maybe("forget")

    def stats(self):
        self._maybe("stats")
        return {}

    def stop(self):
        self._maybe("stop")

    def start(self, target):
        self._maybe("start")

    def _maybe(self, where):
        if where == self.where:
            raise RuntimeError(f"no {where} today")


@pytest.mark.parametrize("where", ["enter", "propose", "observe", "forget", "stats", "stop", "count", "type"])
def test_a_drafter_that_fails_costs_its_guesses_and_no_request(tiny, plain, caplog, where):
    expected, answers = plain
    with caplog.at_level(logging.ERROR, "intarsia"), drafting(tiny, Failing(answers, where=where)) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == told(expected)
        engine.generate(PROMPTS[:1], PARAMS[:1])
        figures = engine.stats()["speculation"]
    if where == "stats":
        assert "no stats today" in figures["own"]["error"]
    elif where != "stop":
        assert figures["failures"] > 0
        assert figures["last_failure"].startswith("drafter 'oracle' of plugin 'Plugin' (- -) failed in")
    logged = [record for record in caplog.records if "logged once" in record.message]
    assert len(logged) == (0 if where == "stats" else 1)


def test_a_drafter_that_cannot_start_ends_the_start_by_name(tiny):
    says = r"drafter 'oracle' of plugin 'Plugin' \(- -\) failed in start: RuntimeError: no start today"
    with pytest.raises(PluginError, match=says):
        drafting(tiny, Failing(where="start"))


# --- pages ------------------------------------------------------------------------------------------------------------


def test_drafts_preempt_nobody_and_give_their_pages_back(tiny, plain):
    """A pool that holds the two answers exactly: without their drafts nobody has to wait."""
    prompts, params = [prompt_of(8, seed=1), prompt_of(8, seed=2)], SamplingParams(max_tokens=24, temperature=0)
    wrong = Oracle({(tuple(p), 0): [1] * 99 for p in prompts}, k=8)
    cache = {"page_size": 4, "memory": str(64 * TOKEN_BYTES), "prefix": False}
    with drafting(tiny, wrong, cache={"use": "paged"} | cache, engine={"max_model_len": 32}) as engine:
        scheduler, plans = engine.parts.scheduler, []
        plan = type(scheduler).plan
        try:
            type(scheduler).plan = lambda self: plans.append(plan(self)) or plans[-1]
            engine.generate(prompts, [params] * 2)
        finally:
            type(scheduler).plan = plan
        assert engine.stats()["speculation"]["drafted"] > 20
    assert not any(one.preempted for one in plans)


def test_every_decoding_row_has_its_token_before_anyone_drafts(tiny):
    """A budget of five for four sequences: drafts of the first do not keep the last waiting."""
    prompts, params = (
        [prompt_of(1, seed=i) for i in range(4)],
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    )
    wrong = Oracle({(tuple(p), 0): [1] * 99 for p in prompts})
    with drafting(tiny, wrong, scheduler={"use": "inflight", "max_tokens": 5}) as engine:
        scheduler, plans = engine.parts.scheduler, []
        plan = type(scheduler).plan
        try:
            type(scheduler).plan = lambda self: plans.append(plan(self)) or plans[-1]
            engine.generate(prompts, [params] * 4)
        finally:
            type(scheduler).plan = plan
    assert [len(one.rows) for one in plans if one.rows] == [4] * 8
    assert any(row.num_drafts for one in plans for row in one.rows)


# --- composition ------------------------------------------------------------------------------------------------------


def test_rejection_is_refused_where_equal_tokens_are_demanded(tiny):
    with pytest.raises(CompositionError, match=r"'rejection' with drafter 'oracle'.*'bitwise'"):
        drafting(tiny, Oracle(), engine={"verify": "rejection", "invariance": "bitwise"})
    with drafting(tiny, Oracle(), engine={"verify": "rejection"}) as engine:
        report = engine.explain()
    assert report["invariance"]["level"] == "numeric" and report["engine"]["verify"] == "rejection"
    with engine_of(tiny, engine={"verify": "rejection", "invariance": "bitwise"}) as engine:
        assert "speculation" not in engine.stats()


def test_rejection_leaves_greedy_answers_and_those_without_drafts(tiny, plain):
    expected, answers = plain
    with drafting(tiny, Oracle(answers, BENDS["right for a while"]), engine={"verify": "rejection"}) as engine:
        greedy = [i for i, one in enumerate(PARAMS) if one.temperature == 0]
        found = engine.generate([PROMPTS[i] for i in greedy], [PARAMS[i] for i in greedy])
        assert told(found) == told([expected[i] for i in greedy])
    with drafting(tiny, Oracle(), engine={"verify": "rejection"}) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == told(expected)
