"""The engine's side of sampling: scored prompts, min_tokens and stop texts, ids that the vocabulary lacks, limits."""

import random
from contextlib import ExitStack
from functools import cache

import pytest
import torch

from engines import engine_of, scripted_engine, smollm2_shaped
from intarsia import Request, SamplingParams
from intarsia.errors import InvalidRequestError
from intarsia.testing import scripted
from models import tiny_llama

TOKEN_BYTES = 2 * 4 * 2 * 16 * 4  # of the tiny model: keys and values, layers, kv heads, head dim, fp32
ABC, DEF, GH, LETTER_I, LETTER_J = 35542, 33203, 23960, 57, 58
END = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(tiny):
    with engine_of(tiny[0], engine={"max_model_len": 64}) as engine:
        yield engine


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    return smollm2_shaped(tmp_path_factory.mktemp("smol"))


@pytest.fixture(scope="module")
def saying(smol):
    """Give engines that say a script; equal ones are made once, as the large tokenizer takes a second to load."""
    with ExitStack() as made:

        @cache
        def give(script, guesses=None, prompt_tokens=1):
            small = {"cache": {"memory": "1MiB"}, "engine": {"max_model_len": 64}}
            one = scripted_engine(smol, script, guesses=guesses, prompt_tokens=prompt_tokens, **small)
            return made.enter_context(one)

        yield give


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def is_idle(engine):
    engine.parts.cache.check_integrity()
    stats = engine.stats()
    used = (stats["preparing"], stats["waiting"], stats["running"], stats["cache"]["used"])
    return used == (0, 0, 0, 0) and not engine.has_work


def check_scores(model, prompt, scores, top):
    """Compare a prompt's log-probabilities with transformers' own."""
    assert len(scores) == len(prompt) and scores[0] is None
    if len(prompt) == 1:
        return
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for i, entry in enumerate(scores[1:]):
        assert entry.token_id == prompt[i + 1]
        assert entry.logprob == pytest.approx(float(expected[i, prompt[i + 1]]), abs=1e-4)
        best = expected[i].topk(top)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert {token for token, _ in entry.top} == set(best.indices.tolist())


# --- scored prompts ---------------------------------------------------------------------------------------------------

SECTIONS = {
    "static": {"scheduler": "static", "cache": {"use": "contiguous", "memory": "64MiB"}},
    "static over pages": {"scheduler": "static"},
    "in flight": {},
    "chunks of 1": {"scheduler": {"use": "inflight", "max_tokens": 1}},
    "chunks of 7": {"scheduler": {"use": "inflight", "max_tokens": 7}},
}


@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS)
def test_prompt_logprobs_equal_transformers_whatever_the_chunks(tiny, sections):
    prompts = [prompt_of(length, seed=length) for length in (1, 2, 16, 17, 40)]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=4)
    with engine_of(tiny[0], **sections) as engine:
        plain = engine.generate(prompts, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        found = engine.generate(prompts, params)
        assert is_idle(engine)
    for prompt, one, other in zip(prompts, found, plain, strict=True):
        check_scores(tiny[1], prompt, one.prompt_logprobs, 4)
        assert one.token_ids == other.token_ids and other.prompt_logprobs is None


def test_long_prompts_are_scored_in_pieces_and_never_as_one_matrix(tiny):
    prompt = prompt_of(300)
    with engine_of(tiny[0]) as engine:
        runner, sizes = engine.parts.executor._stage._runner, []

        class Watched:
            def __getattr__(self, name):
                return getattr(runner, name)

            def logits(self, hidden_TE, rows_L):
                sizes.append(len(rows_L))
                return runner.logits(hidden_TE, rows_L)

        engine.parts.executor._stage._runner = Watched()
        (found,) = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert sorted(sizes, reverse=True) == [256, 43, 1]
    check_scores(tiny[1], prompt, found.prompt_logprobs, 1)


@pytest.mark.parametrize("max_tokens", [64, 4])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(tiny, max_tokens):
    with engine_of(tiny[0], scheduler={"use": "inflight", "max_tokens": max_tokens}) as engine:
        executor = engine.parts.executor
        runner = executor._stage._runner

        class Poisoned:
            def __getattr__(self, name):
                return getattr(runner, name)

            def logits(self, hidden_TE, rows_L):
                logits = runner.logits(hidden_TE, rows_L)
                return logits * float("nan") if len(rows_L) == 3 else logits

        executor._stage._runner = Poisoned()
        scored = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=1)
        plain = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        bad, good = engine.generate([prompt_of(4), prompt_of(5)], [scored, plain])
        assert is_idle(engine)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "prompt" in bad.error and "not finite" in bad.error


def test_a_preempted_prompt_is_told_once_and_as_if_alone(tiny):
    """Six requests of 20 + 40 tokens in a pool for two and a half of them; odd ones score their prompts."""
    prompts = [prompt_of(20, seed=i) for i in range(6)]
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=i % 3 / 2,
            seed=i,
            ignore_eos=True,
            logprobs=2,
            repetition_penalty=1.3 if i == 2 else 1,
            prompt_logprobs=2 if i % 2 else None,
            n=2 if i == 3 else 1,
        )
        for i in range(6)
    ]
    with engine_of(tiny[0]) as engine:
        alone = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    cache = {"page_size": 4, "memory": str(152 * TOKEN_BYTES)}
    crowded = {"cache": cache, "scheduler": {"use": "inflight", "max_tokens": 7}, "engine": {"max_model_len": 64}}
    with engine_of(tiny[0], **crowded) as engine:
        plans, scheduler = [], engine.parts.scheduler
        plan = scheduler.plan
        type(scheduler).plan, original = (lambda self: plans.append(plan()) or plans[-1]), type(scheduler).plan
        try:
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                engine.add(Request(request_id=str(i), prompt=prompt, params=one))
            outputs = {str(i): [] for i in range(6)}
            while engine.has_work:
                for output in engine.step():
                    outputs[output.request_id].append(output)
        finally:
            type(scheduler).plan = original
        assert is_idle(engine)
    preempted = {sequence_id for plan in plans for sequence_id in plan.preempted}
    assert any(int(name) % 2 and choice == 0 for name, choice in preempted), "no scored prompt was preempted"
    for i, expected in enumerate(alone):
        mine = outputs[str(i)]
        scores = tuple(entry for output in mine for entry in output.prompt_logprobs)
        assert (None, *scores) == expected.prompt_logprobs if i % 2 else not scores
        assert not any(output.prompt_logprobs for output in mine if output.choice)
        for choice, wanted in enumerate(expected.choices):
            parts = [output for output in mine if output.choice == choice]
            assert tuple(t for o in parts for t in o.token_ids) == wanted.token_ids
            assert tuple(e for o in parts for e in o.logprobs) == wanted.logprobs
            assert "".join(o.text for o in parts) == wanted.text
            assert parts[-1].usage.prompt_tokens == 20 and parts[-1].usage.completion_tokens == 40


def test_a_scored_prompt_shares_nothing_with_the_cache(engine):
    prompt = prompt_of(48)
    plain = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    scored = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=0)
    usages = [engine.generate([prompt], params)[0].usage.cached_tokens for params in (scored, plain, plain, scored)]
    assert usages == [0, 0, 32, 0]
    first, again = (engine.generate([prompt], scored)[0].prompt_logprobs for _ in range(2))
    assert first == again and all(entry.top == () for entry in first[1:])


@pytest.mark.parametrize("length", [1, 5, 63, 64])
def test_max_tokens_0_scores_and_says_nothing(engine, tiny, length):
    prompt = prompt_of(length)
    params = SamplingParams(max_tokens=0, prompt_logprobs=3, logprobs=1, n=2, stop=["x"])
    (found,) = engine.generate([prompt], params)
    assert [(c.text, c.token_ids, c.finish_reason, c.logprobs) for c in found.choices] == [("", (), "length", ())] * 2
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.cached_tokens) == (length, 0, 0)
    check_scores(tiny[1], prompt, found.prompt_logprobs, 3)
    assert is_idle(engine)
    assert engine.generate([[1]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))[0].token_ids


def test_a_prompt_beyond_the_context_cannot_be_scored_either(engine):
    with pytest.raises(InvalidRequestError, match=r"65 tokens are beyond engine.max_model_len = 64; give at most 64"):
        engine.generate([prompt_of(65)], SamplingParams(max_tokens=0, prompt_logprobs=1))
    with pytest.raises(InvalidRequestError, match=r"64 tokens leave no room .* give at most 63"):
        engine.generate([prompt_of(64)], SamplingParams(max_tokens=1, prompt_logprobs=1))


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_max_tokens_that_are_no_number_of_tokens_are_refused(value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(max_tokens=value)
    assert caught.value.field == "sampling.max_tokens" and repr(value) in str(caught.value)


def test_scores_come_as_deltas_that_join(engine, tiny):
    prompt = prompt_of(30)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=2, n=2)
    (whole,) = engine.generate([prompt], params)
    deltas = list(engine.stream(prompt, params))
    assert (None, *(e for d in deltas for e in d.prompt_logprobs)) == whole.prompt_logprobs
    assert {d.choice for d in deltas if d.prompt_logprobs} == {0}


def test_drafts_leave_a_scored_prompt_alone(tiny):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=2, logprobs=2)
    prompt = prompt_of(9)
    with engine_of(tiny[0]) as engine:
        (plain,) = engine.generate([prompt], params)
    guesses = {"use": "scripted", "ids": [*plain.token_ids[:5], 0, 0, 0], "prompt_tokens": 9}
    with engine_of(tiny[0], drafter=guesses, plugins=[scripted]) as engine:
        (drafted,) = engine.generate([prompt], params)
        assert engine.stats()["steps"] < 8
    assert (drafted.prompt_logprobs, drafted.choices) == (plain.prompt_logprobs, plain.choices)


def test_logprobs_larger_than_the_vocabulary_give_all_of_it(engine):
    (found,) = engine.generate(
        [[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=1000, prompt_logprobs=1000)
    )
    for entry in (*found.logprobs, *found.prompt_logprobs[1:]):
        assert sorted(token for token, _ in entry.top) == list(range(257))


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 1.7, "top_p": 0.1},
        {"temperature": 1, "top_k": 1},
        {"temperature": 0, "logit_bias": True},
    ],
)
def test_logprobs_are_of_the_raw_distribution_and_list_the_chosen_token(engine, tiny, how):
    prompt = prompt_of(6)
    with torch.no_grad():
        expected = tiny[1](torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    if "logit_bias" in how:
        how = how | {"logit_bias": {int(expected.argmax()): -100}}
    (found,) = engine.generate([prompt], SamplingParams(max_tokens=1, logprobs=5, ignore_eos=True, **how))
    (entry,) = found.logprobs
    assert [value for _, value in entry.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-4)
    assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
    assert entry.token_id == found.token_ids[0]


# --- min_tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("ends", [[2], [2, 0, 198]])
@pytest.mark.parametrize("guesses", [None, (57, 58, 59, 60, 2), (2,) * 8])
def test_nothing_ends_an_answer_before_min_tokens(saying, min_tokens, ends, guesses):
    bias = {ends[min_tokens % len(ends)]: 200.0}
    params = SamplingParams(
        temperature=0, max_tokens=32, min_tokens=min_tokens, logit_bias=bias, stop_token_ids=ends, logprobs=0
    )
    (found,) = saying((57, 58, 59, 60), guesses).generate([[5]], params)
    assert len(found.token_ids) == min_tokens + 1 == len(found.logprobs) and found.finish_reason == "stop"
    assert found.token_ids[-1] in ends and not set(found.token_ids[:-1]) & set(ends)


@pytest.mark.parametrize("guesses", [None, (ABC, DEF, GH, LETTER_I, LETTER_J)], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "text", "reason", "num_ids"),
    [
        (["BC"], 0, "A", "stop", 1),
        (["BC"], 1, "ABCDEFGHIJ", "length", 5),
        (["CDE"], 1, "AB", "stop", 2),  # begun before, completed after: it counts
        (["CDE"], 2, "ABCDEFGHIJ", "length", 5),
        (["BC", "GH"], 2, "ABCDEF", "stop", 3),
        (["ABC", "C", "FGHI"], 1, "ABCDE", "stop", 4),
        (["J"], 5, "ABCDEFGHIJ", "length", 5),
        (["J"], 4, "ABCDEFGHI", "stop", 5),
    ],
)
def test_stop_texts_completed_within_min_tokens_are_let_pass(saying, guesses, stop, min_tokens, text, reason, num_ids):
    params = SamplingParams(temperature=0, max_tokens=5, min_tokens=min_tokens, stop=stop, ignore_eos=True, logprobs=0)
    engine = saying((ABC, DEF, GH, LETTER_I, LETTER_J), guesses)
    (whole,) = engine.generate([[5]], params)
    deltas = list(engine.stream([5], params))
    assert (whole.text, whole.finish_reason, len(whole.token_ids)) == (text, reason, num_ids)
    assert len(whole.logprobs) == num_ids == whole.usage.completion_tokens
    assert "".join(d.text for d in deltas) == text


# --- stops inside an accepted run (X01) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "params", "ids", "reason"),
    [
        ((10, 11, 57, 20, 21, 22), {"stop_token_ids": [57], "max_tokens": 5}, (10, 11, 57), "stop"),
        ((10, 11, END, 20, 21, 22), {"max_tokens": 5}, (10, 11, END), "stop"),
        ((10, 11, 57, 20, 21, 22), {"stop": ["I"], "max_tokens": 5}, (10, 11, 57), "stop"),
        ((10, 11, 20, 21, 22, 57), {"stop_token_ids": [57], "max_tokens": 5}, (10, 11, 20, 21, 22), "length"),
        ((10, 57, 11, 57, 22, 23), {"stop": ["I"], "min_tokens": 2, "max_tokens": 6}, (10, 57, 11, 57), "stop"),
        ((10, 11, 12, 57), {"stop_token_ids": [57], "min_tokens": 3, "max_tokens": 6}, (10, 11, 12, 57), "stop"),
    ],
)
def test_a_stop_inside_a_run_of_drafts_ends_the_answer_there(saying, script, params, ids, reason):
    engine = saying(script, script)
    before = engine.stats()["steps"]
    (found,) = engine.generate([[5]], SamplingParams(temperature=0, logprobs=1, **params))
    assert engine.stats()["steps"] - before < len(ids)
    assert is_idle(engine)
    assert (found.token_ids, found.finish_reason, found.usage.completion_tokens) == (ids, reason, len(ids))
    assert len(found.logprobs) == len(ids)


# --- text (T03, D01) --------------------------------------------------------------------------------------------------

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


@pytest.mark.parametrize("text", ["\u6f22\u5b57", f"a{FAMILY}b"])
@pytest.mark.parametrize("guesses", [False, True])
def test_deltas_join_to_the_text_and_hold_no_half_character(saying, text, guesses):
    ids = tuple(saying(()).parts.tokenizer.encode(text))
    engine = saying(ids, ids if guesses else None)
    params = SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True)
    deltas = [output.text for output in engine.stream([5], params)]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_stop_text_of_the_prompt_alone_stops_nothing(saying):
    engine = saying((19556, 30, END), prompt_tokens=5)
    assert len(engine.parts.tokenizer.encode("The capital of France is")) == 5
    (found,) = engine.generate(["The capital of France is"], SamplingParams(temperature=0, stop=["France"]))
    assert (found.text, found.finish_reason) == ("Hello.", "stop")
    with pytest.raises(InvalidRequestError, match=r"sampling.stop: ''"):
        SamplingParams(stop=[""])


# --- what depends on the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("stop_token_ids", [257]), ("banned_token_ids", [1, 300]), ("logit_bias", {"999": 1.0})]
)
def test_ids_outside_the_vocabulary_are_refused(engine, name, value):
    with pytest.raises(InvalidRequestError, match=rf"sampling.{name}: \d+ is outside the vocabulary of 257") as caught:
        engine.add(Request(request_id="a", prompt=[1], params=SamplingParams(**{name: value})))
    assert caught.value.field == f"sampling.{name}" and is_idle(engine)


@pytest.mark.parametrize(("name", "instead"), [("stop", "stop_token_ids"), ("banned_words", "banned_token_ids")])
def test_texts_need_a_tokenizer(tmp_path, name, instead):
    path, _ = tiny_llama(tmp_path, vocab=64, layers=1)
    with engine_of(path) as engine:
        with pytest.raises(InvalidRequestError, match=f"sampling.{name}: .* no tokenizer.* give {instead}"):
            engine.generate([[1]], SamplingParams(**{name: ["x"]}))
        params = SamplingParams(max_tokens=2, banned_token_ids=[1], prompt_logprobs=1)
        assert engine.generate([[1, 2]], params)[0].prompt_logprobs[1].token_id == 2


# --- what is no prompt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", [["x" * 1_000_000], [[1], "x" * 1_000_000], b"x" * 1_000_000, [10**5000], [-(10**5000)], [1.5] * 100_000]
)
def test_what_is_no_prompt_is_named_shortly(engine, prompt):
    with pytest.raises(InvalidRequestError, match="prompt: ") as caught:
        engine.add(Request(request_id="odd", prompt=prompt))
    assert len(str(caught.value)) < 250 and caught.value.field == "prompt" and is_idle(engine)


@pytest.mark.parametrize("ids", [5, None, [1, 10**5000], ["x" * 1_000_000], [257]])
def test_what_are_no_ids_have_no_text_and_are_named_shortly(engine, ids):
    with pytest.raises(InvalidRequestError, match="token_ids: ") as caught:
        engine.detokenize(ids)
    assert len(str(caught.value)) < 250


def test_limits_of_thousands_of_digits_are_refused_as_others_are():
    with pytest.raises(InvalidRequestError, match="at most max_tokens"):
        SamplingParams(min_tokens=10**6000, max_tokens=10**5000)


def test_a_text_of_far_more_tokens_than_fit_is_refused_and_one_that_is_a_little_longer_by_its_count(engine):
    with pytest.raises(InvalidRequestError, match=r"the first 1024 of 100000 characters .* give at most 63 tokens"):
        engine.generate("x" * 100_000)
    with pytest.raises(InvalidRequestError, match=r"prompt: 70 tokens leave no room .* give at most 63"):
        engine.generate("x" * 70)
    assert is_idle(engine)
