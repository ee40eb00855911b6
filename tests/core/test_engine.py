"""The engine: answers, streams, the loop by hand; stops and limits; refusals that leave nothing behind."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import CACHE, engine_of, scripted_engine, smollm2_shaped
from intarsia import Request, SamplingParams
from intarsia.errors import ExecutionError, InvalidRequestError, OverloadedError
from intarsia.testing import scripted
from intarsia.types import BatchPlan
from models import tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(tiny):
    with engine_of(tiny[0]) as engine:
        yield engine


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    return smollm2_shaped(tmp_path_factory.mktemp("smol"))


def greedy_reference(model, prompt, num_tokens):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def is_idle(engine):
    engine.parts.cache.check_integrity()
    stats = engine.stats()
    return (stats["waiting"], stats["running"], stats["cache"]["used"], engine.has_work) == (0, 0, 0, False)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_text_ids_and_messages_are_answered_in_order(engine, tiny):
    prompts = [
        "Once upon",
        [79, 110],
        [{"role": "user", "content": "Hi"}],
        np.array([79, 110]),
        torch.tensor([79, 110]),
    ]
    completions = engine.generate(prompts, GREEDY)
    assert [c.prompt_token_ids for c in completions][1:2] == [(79, 110)]
    for completion in completions:
        assert completion.token_ids == greedy_reference(tiny[1], completion.prompt_token_ids, 12)
        assert completion.finish_reason == "length"
        assert completion.usage.prompt_tokens == len(completion.prompt_token_ids)
        assert completion.usage.completion_tokens == 12
        assert 0 <= completion.timings.queued_s <= completion.timings.first_token_s <= completion.timings.total_s
    assert completions[1].token_ids == completions[3].token_ids == completions[4].token_ids
    assert is_idle(engine)


def test_a_bare_list_of_ints_or_messages_is_one_prompt(engine):
    (one,) = engine.generate([79, 110, 99], GREEDY)
    assert one.prompt_token_ids == (79, 110, 99)
    (chat,) = engine.generate([{"role": "user", "content": "Hi"}], GREEDY)
    (text,) = engine.generate("Once", GREEDY)
    assert len(chat.prompt_token_ids) > len(text.prompt_token_ids)
    assert engine.generate([]) == []


def test_more_prompts_than_a_batch_holds_are_all_answered_as_if_alone(tiny):
    prompts = [list(range(1, 3 + i)) for i in range(11)]
    with engine_of(tiny[0], scheduler={"use": "static", "max_batch": 3}) as engine:
        together = engine.generate(prompts, GREEDY)
        alone = [engine.generate([p], GREEDY)[0] for p in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_params_can_be_one_a_prompt(engine):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 5)]
    assert [len(c.token_ids) for c in engine.generate([[1], [2]], params)] == [1, 5]
    with pytest.raises(InvalidRequestError, match="2 for 1 prompts"):
        engine.generate([[1]], params)


@pytest.fixture(scope="module", params=["eager", "sdpa", "tiled"])
def leveled(tiny, request):
    """An engine at its level: over in-flight batches and pages, prefix hits cut prompts anew, so it must be bitwise."""
    sections = {} if request.param == "tiled" else {"scheduler": "static", "cache": CACHE | {"use": "contiguous"}}
    with engine_of(tiny[0], attention=request.param, **sections) as engine:
        yield engine


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_tokens_and_logprobs_do_not_depend_on_neighbours(leveled, data):
    """In fp32: equal bits, sampled or greedy, whatever shares the batch."""
    request = SamplingParams(temperature=0.9, seed=5, max_tokens=10, ignore_eos=True, logprobs=3)
    ids = st.lists(st.integers(0, 255), min_size=1, max_size=40)
    prompt = data.draw(ids)
    others = data.draw(st.lists(ids, max_size=5))
    place = data.draw(st.integers(0, len(others)))
    noise = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    prompts = [*others[:place], prompt, *others[place:]]
    params = [request if i == place else noise for i in range(len(prompts))]
    assert leveled.explain()["invariance"]["level"] in ("neighbours", "bitwise")
    (alone,) = leveled.generate([prompt], request)
    crowded = leveled.generate(prompts, params)[place]
    assert crowded.token_ids == alone.token_ids
    assert crowded.logprobs == alone.logprobs


def test_numbers_of_numpy_are_numbers(engine):
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0), seed=np.uint64(7), stop_token_ids=np.array([9, 8])
    )
    assert (params.max_tokens, params.seed, params.stop_token_ids) == (3, 7, (9, 8))
    assert all(type(v) in (int, float) for v in (params.max_tokens, params.temperature, *params.stop_token_ids))
    assert engine.generate([[1]], params)
    with pytest.raises(InvalidRequestError, match="nan"):
        SamplingParams(temperature=np.float32("nan"))


def test_unseeded_requests_differ_and_say_their_seed(engine):
    params = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)
    completions = engine.generate([[1, 2]] * 20, params)
    assert len({c.token_ids for c in completions}) > 1
    again = engine.generate(
        [[1, 2]], SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True, seed=completions[3].seed)
    )
    assert again[0].token_ids == completions[3].token_ids


def test_an_engine_seed_makes_unseeded_requests_repeatable(tiny):
    def run():
        with engine_of(tiny[0], engine={"seed": 3}) as engine:
            return [c.token_ids for c in engine.generate([[1], [2]], SamplingParams(max_tokens=8))]

    assert run() == run()


def test_choices_of_one_request_differ_and_repeat(engine):
    params = SamplingParams(n=4, seed=7, max_tokens=16, temperature=1.5, ignore_eos=True)
    first, second = engine.generate([[1, 2, 3]] * 2, params)
    assert [c.token_ids for c in first.choices] == [c.token_ids for c in second.choices]
    assert len({c.token_ids for c in first.choices}) > 1
    assert (first.text, first.token_ids) == (first.choices[0].text, first.choices[0].token_ids)
    assert first.usage.prompt_tokens == 3 and first.usage.completion_tokens == 64


def test_logprobs_come_where_asked_for_and_equal_transformers(engine, tiny):
    asked, plain = engine.generate(
        [[5, 6, 7]] * 2, [SamplingParams(max_tokens=3, temperature=0, logprobs=4, ignore_eos=True), GREEDY]
    )
    assert plain.logprobs is None
    ids = [5, 6, 7, *asked.token_ids]
    with torch.no_grad():
        reference = tiny[1](torch.tensor([ids])).logits[0].log_softmax(-1)
    for i, entry in enumerate(asked.logprobs):
        best = reference[2 + i].topk(4)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert (entry.token_id, entry.logprob) == entry.top[0]


# --- limits and stops -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tiny):
    with engine_of(tiny[0], engine={"max_model_len": 32}) as engine:
        yield engine


@pytest.mark.parametrize(("length", "answered"), [(1, 5), (27, 5), (28, 4), (31, 1)])
def test_an_answer_ends_with_the_context(short, length, answered):
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    (completion,) = short.generate([[7] * length], params)
    assert (len(completion.token_ids), completion.finish_reason) == (answered, "length")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["no tokens"]),
        ("", ["no tokens"]),
        ([7] * 32, ["32 tokens", "31"]),
        ([7] * 33, ["33 tokens", "= 32"]),
        ([300], ["300", "257"]),
        ([-1], ["-1", "257"]),
        ([1, 2.5], ["2.5"]),
        ([1, True], ["True"]),
        ([[1, 2], 5], ["[1, 2]"]),
        ({"role": "user"}, ["role"]),
        (5, ["5"]),
        (None, ["None"]),
        (b"bytes", ["bytes"]),
        (bytearray(b"bytes"), ["bytes"]),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_by_name(short, prompt, words):
    before = short.stats()["steps"]
    with pytest.raises(InvalidRequestError) as caught:
        short.add(Request(request_id="bad", prompt=prompt))
    assert caught.value.field == "prompt"
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert short.stats()["steps"] == before and is_idle(short)
    assert short.generate([[1]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))


def test_what_can_never_fit_is_refused_with_the_numbers(tiny):
    class Small:
        """Books of a cache that holds one page of 16."""

        num_pages = 1

        def capacity(self, max_tokens):
            return int(max_tokens <= 16)

    with engine_of(tiny[0]) as engine:
        engine.parts = attrs.evolve(engine.parts, cache=Small())
        with pytest.raises(InvalidRequestError, match=r"17 tokens.*1 pages of 16 holds 16") as caught:
            engine.add(Request(request_id="a", prompt=[1] * 10, params=SamplingParams(max_tokens=7)))
        assert caught.value.field == "sampling.max_tokens"
        assert not engine.has_work


def test_one_bad_prompt_among_good_ones_runs_none(short):
    before = short.stats()["steps"]
    with pytest.raises(InvalidRequestError, match="999"):
        short.generate([[1], [2], [999]], GREEDY)
    assert short.stats()["steps"] == before and is_idle(short)


def test_without_a_limit_an_answer_goes_on_to_the_end_of_the_context(short):
    (completion,) = short.generate([[7] * 3], SamplingParams(temperature=0, ignore_eos=True))
    assert len(completion.token_ids) == 29
    (huge,) = short.generate([[7] * 3], SamplingParams(temperature=0, ignore_eos=True, max_tokens=10**8))
    assert huge.token_ids == completion.token_ids


ABC, DEF, GH, LETTER_I, LETTER_J = 35542, 33203, 23960, 57, 58
END = 2


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason", "num_ids"),
    [
        (["DEFGHIJ"], False, "ABC", "stop", 5),
        (["CDE"], False, "AB", "stop", 2),
        (["DEFGHIX"], False, "ABCDEFGHIJ", "length", 5),
        (["DEFGHIJ"], True, "ABCDEFGHIJ", "stop", 5),
        (["X", "GH", "HI"], False, "ABCDEF", "stop", 3),
    ],
)
def test_stop_strings_are_found_across_tokens(smol, stop, include, text, reason, num_ids):
    params = SamplingParams(temperature=0, max_tokens=5, stop=stop, include_stop=include, ignore_eos=True)
    with scripted_engine(smol, [ABC, DEF, GH, LETTER_I, LETTER_J]) as engine:
        outputs = list(engine.stream([5], params))
        (whole,) = engine.generate([[5]], params)
    assert "".join(o.text for o in outputs) == whole.text == text
    assert outputs[-1].finish_reason == whole.finish_reason == reason
    assert len(whole.token_ids) == num_ids == outputs[-1].usage.completion_tokens
    if text == "ABC":
        assert not any(set(o.text) & set("DEFGHIJ") for o in outputs)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"stop_token_ids": [END]}, "Hello."),
        ({}, "Hello."),
        ({"include_stop": True}, "Hello."),
        ({"include_stop": True, "skip_special_tokens": False}, "Hello.<|im_end|>"),
        ({"skip_special_tokens": False}, "Hello."),
    ],
)
def test_a_stop_token_ends_the_answer_and_counts(smol, params, text):
    with scripted_engine(smol, [19556, 30, END, 57]) as engine:
        (completion,) = engine.generate([[5]], SamplingParams(temperature=0, max_tokens=9, **params))
    assert (completion.text, completion.finish_reason) == (text, "stop")
    assert completion.token_ids == (19556, 30, END)


def test_a_prompt_never_triggers_a_stop_and_eos_can_be_ignored(smol):
    with scripted_engine(smol, [END, 57, 58], prompt_tokens=2) as engine:
        (completion,) = engine.generate(
            [[57, END]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, stop_token_ids=[58], stop=["X"])
        )
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("I", (END, 57, 58), "stop")


def test_half_a_character_waits_and_is_delivered_at_the_end(smol):
    with scripted_engine(smol, [19556, 40303, 218, 17]) as engine:
        texts = [o.text for o in engine.stream([5], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))]
        (cut,) = engine.generate([[5]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        decoded = engine.parts.tokenizer.decode([19556, 40303])
    assert "".join(texts) == "Hello \U0001f600!"
    assert not any("\ufffd" in text for text in texts)
    assert cut.text == decoded and cut.text.endswith("\ufffd")


def test_stop_ids_outside_the_vocabulary_are_refused(engine):
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids: 257 is outside"):
        engine.generate([[1]], SamplingParams(stop_token_ids=[257]))


def test_a_vocabulary_padded_beyond_the_tokenizer_is_not_sampled(tmp_path):
    path, _ = tiny_llama(tmp_path, vocab=320)
    params = SamplingParams(temperature=100, max_tokens=400, seed=1, logprobs=1000, ignore_eos=True)
    with engine_of(path) as engine:
        (completion,) = engine.generate([[1]], params)
        assert max(completion.token_ids) < 257
        assert {len(e.top) for e in completion.logprobs} == {257}
        with pytest.raises(InvalidRequestError, match="300 is outside the vocabulary of 257"):
            engine.generate([[300]])


# --- the loop by hand -------------------------------------------------------------------------------------------------


def test_an_idle_step_lets_the_executor_forget_who_left(tiny):
    with engine_of(tiny[0]) as engine:
        engine.generate([[1], [2]], GREEDY)
        engine.step()
        assert engine.parts.executor._choosing._sampler._states == {}
        assert engine.stats()["steps"] == 12


def test_the_loop_by_hand_gives_each_request_its_outputs(engine):
    solo = engine.generate([[1, 2], [3]], GREEDY)
    names = [engine.add(Request(request_id=name, prompt=p, params=GREEDY)) for name, p in (("a", [1, 2]), ("b", [3]))]
    found = {name: [] for name in names}
    last = {}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
            last[output.request_id] = output
    assert [tuple(found[n]) for n in names] == [c.token_ids for c in solo]
    assert [last[n].finish_reason for n in names] == ["length"] * 2
    assert last["a"].usage.completion_tokens == 12 and last["a"].timings is not None
    assert engine.step() == []


def test_generate_and_streams_leave_the_outputs_of_other_requests_alone(engine):
    engine.add(Request(request_id="by-hand", prompt=[1, 2], params=GREEDY))
    first = engine.stream([3, 4], GREEDY)
    second = engine.stream([5, 6], GREEDY)
    woven = [[], []]
    for one, other in zip(first, second, strict=True):
        woven[0] += one.token_ids
        woven[1] += other.token_ids
    (whole,) = engine.generate([[3, 4]], GREEDY)
    held = []
    while engine.has_work:
        held += [t for o in engine.step() for t in o.token_ids]
    assert tuple(woven[0]) == whole.token_ids
    assert tuple(held) == engine.generate([[1, 2]], GREEDY)[0].token_ids
    assert tuple(woven[1]) == engine.generate([[5, 6]], GREEDY)[0].token_ids


def test_an_id_in_use_is_refused_and_free_again_afterwards(engine):
    engine.add(Request(request_id="same", prompt=[1], params=GREEDY))
    with pytest.raises(InvalidRequestError, match="'same' is in use"):
        engine.add(Request(request_id="same", prompt=[2], params=GREEDY))
    while engine.has_work:
        last = engine.step()
    assert last[-1].finish_reason == "length"
    engine.add(Request(request_id="same", prompt=[1], params=GREEDY))
    engine.cancel("same")
    assert [o.finish_reason for o in engine.step()] == ["abort"]
    engine.add(Request(request_id="same", prompt=[1], params=GREEDY))
    engine.cancel("same")
    engine.step()
    assert is_idle(engine)


def test_names_of_our_own_keep_clear_of_those_that_clients_chose(tiny):
    with engine_of(tiny[0]) as engine:
        for number in range(3):
            engine.add(Request(request_id=f"local-{number}", prompt=[1, 2], params=GREEDY))
        (answer,) = engine.generate([[5, 6]], GREEDY)
        assert answer.request_id not in ("local-0", "local-1", "local-2")
        assert len(list(engine.stream([5, 6], GREEDY))) == len(answer.token_ids)


@pytest.mark.parametrize("params", [{}, {"max_tokens": 3}, [{}], [None], 5, 0, iter([GREEDY])])
def test_params_of_another_type_are_refused(engine, params):
    with pytest.raises(InvalidRequestError, match="is not SamplingParams"):
        engine.generate([[1]], params)
    with pytest.raises(InvalidRequestError, match="is not SamplingParams"):
        engine.stream([1], params)
    with pytest.raises(InvalidRequestError, match="is not SamplingParams"):
        Request(request_id="a", prompt=[1], params=params)
    assert is_idle(engine)


@pytest.mark.parametrize("name", ["", "x" * 257, "new\nline", 5])
def test_request_ids_are_short_and_printable(name):
    with pytest.raises(InvalidRequestError, match="request_id"):
        Request(request_id=name, prompt=[1])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_request_ends_once_and_its_neighbours_do_not_notice(engine, steps):
    (solo,) = engine.generate([[9, 8, 7]], GREEDY)
    engine.add(Request(request_id="gone", prompt=[1, 2], params=GREEDY))
    engine.add(Request(request_id="stays", prompt=[9, 8, 7], params=GREEDY))
    outputs = [o for _ in range(steps) for o in engine.step()]
    engine.cancel("gone")
    engine.cancel("gone")
    engine.cancel("unknown")
    while engine.has_work:
        outputs += engine.step()
    gone = [o for o in outputs if o.request_id == "gone"]
    assert [o.finish_reason for o in gone if o.finish_reason] == ["abort"]
    assert gone[-1].usage.completion_tokens == steps == sum(len(o.token_ids) for o in gone)
    assert tuple(t for o in outputs if o.request_id == "stays" for t in o.token_ids) == solo.token_ids
    assert is_idle(engine)


def test_leaving_a_stream_cancels_it(engine):
    stream = engine.stream([1, 2], GREEDY)
    next(stream)
    stream.close()
    assert is_idle(engine)
    unstarted = engine.stream([1, 2], GREEDY)
    unstarted.close()
    assert is_idle(engine)
    engine.stream([1, 2], GREEDY)  # nobody holds it
    assert is_idle(engine)
    with engine.stream([1, 2], GREEDY) as stream:
        next(stream)
    assert is_idle(engine) and list(stream) == []


def test_a_stream_of_several_choices_ends_each(engine):
    params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
    outputs = list(engine.stream([1], params))
    assert sorted(o.choice for o in outputs if o.finish_reason) == [0, 1, 2]


def test_a_full_queue_is_an_overload_and_changes_nothing(tiny):
    with engine_of(tiny[0], scheduler={"use": "static", "max_batch": 1, "max_waiting": 2}) as engine:
        for name in "ab":
            engine.add(Request(request_id=name, prompt=[1], params=GREEDY))
        with pytest.raises(OverloadedError) as caught:
            engine.add(Request(request_id="c", prompt=[1], params=GREEDY))
        assert caught.value.retry_after_s > 0
        engine.step()
        with pytest.raises(OverloadedError):
            engine.add(Request(request_id="d", prompt=[1], params=SamplingParams(n=2)))
        engine.add(Request(request_id="e", prompt=[1], params=GREEDY))
        finished = set()
        while engine.has_work:
            finished |= {o.request_id for o in engine.step() if o.finish_reason == "length"}
        assert finished == {"a", "b", "e"}
        assert is_idle(engine)


def test_a_list_longer_than_the_queue_is_answered_as_it_empties(tiny):
    prompts = [[1 + i] for i in range(9)]
    with engine_of(tiny[0], scheduler={"use": "inflight", "max_batch": 2, "max_waiting": 3}) as engine:
        found = engine.generate(prompts, GREEDY)
        assert [c.token_ids for c in found] == [engine.generate([p], GREEDY)[0].token_ids for p in prompts]
        with pytest.raises(OverloadedError):
            engine.generate([[1]], SamplingParams(n=4))
        assert is_idle(engine)


def test_higher_priorities_run_first(tiny):
    with engine_of(tiny[0], scheduler={"use": "static", "max_batch": 1}) as engine:
        for name, priority in (("low", 0), ("high", 5), ("low-2", 0), ("mid", 1)):
            engine.add(Request(request_id=name, prompt=[1], params=GREEDY, priority=priority))
        order = []
        while engine.has_work:
            order += [o.request_id for o in engine.step() if o.finish_reason]
    assert order == ["high", "mid", "low", "low-2"]


# --- speculation ------------------------------------------------------------------------------------------------------

ANSWER = [10, 11, 12, 13, 0, 20, 21, 22]
GUESSES = {
    "right": ANSWER,
    "wrong": [99] * 8,
    "right for a while": [10, 11, 12, 99, 98, 20, 21, 22],
    "outside the vocabulary": [10, 11, 10**6, -5],
    "nothing": [],
}


@pytest.mark.parametrize("guesses", GUESSES.values(), ids=GUESSES)
@pytest.mark.parametrize("stop", [{}, {"stop_token_ids": [12]}, {"stop_token_ids": [0]}, {"max_tokens": 5}])
def test_drafts_never_change_an_answer(smol, guesses, stop):
    params = SamplingParams(**({"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2} | stop))
    with scripted_engine(smol, ANSWER) as engine:
        (plain,) = engine.generate([[5]], params)
        plain_steps = engine.stats()["steps"]
    with scripted_engine(smol, ANSWER, guesses=guesses) as engine:
        (drafted,) = engine.generate([[5]], params)
        outputs = list(engine.stream([5], params))
        steps = engine.stats()["steps"] // 2
        assert is_idle(engine)
    assert drafted.choices == plain.choices
    assert drafted.usage == plain.usage
    assert tuple(t for o in outputs for t in o.token_ids) == plain.token_ids
    assert len(plain.logprobs) == len(plain.token_ids)
    if guesses is ANSWER and not stop:
        assert steps < plain_steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("right", [0, 3, 10])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_drafts_never_change_what_a_real_model_says(engine, tiny, temperature, right, k):
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=10, ignore_eos=True)
    (expected,) = engine.generate([[1, 2]], params)
    guesses = [token if i < right else 99 for i, token in enumerate(expected.token_ids)]
    drafter = {"use": "scripted", "ids": guesses, "prompt_tokens": 2, "k": k}
    with engine_of(tiny[0], drafter=drafter, plugins=[scripted]) as drafting:
        (found,) = drafting.generate([[1, 2]], params)
        steps = drafting.stats()["steps"]
    assert found.token_ids == expected.token_ids
    assert steps < 10 if right else steps == 10


# --- failures ---------------------------------------------------------------------------------------------------------


class FailingStep:
    """An executor that fails at the third step."""

    def __init__(self, inner):
        self.inner, self.steps, self.depth = inner, 0, 1

    def submit(self, plan):
        self.steps += 1
        if self.steps == 3:
            raise MemoryError("no room")
        self.inner.submit(plan)

    def collect(self):
        return self.inner.collect()

    def start(self, progress):
        self.inner.start(progress)

    def stop(self):
        self.inner.stop()


def test_a_failed_step_says_so_and_the_engine_runs_nothing_more(tiny):
    with engine_of(tiny[0]) as engine:
        engine.parts = attrs.evolve(engine.parts, executor=FailingStep(engine.parts.executor))
        for _ in range(2):
            with pytest.raises(ExecutionError, match=r"executor 'local' of plugin 'defaults'.*MemoryError: no room"):
                engine.generate([[1]], GREEDY)


@pytest.mark.parametrize("method", ["plan", "update"])
def test_a_scheduler_that_raises_is_named_and_the_engine_runs_nothing_more(tiny, method):
    class Failing:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            if name == method:
                raise ZeroDivisionError("oops")
            return getattr(self.inner, name)

    with engine_of(tiny[0]) as engine:
        engine.parts = attrs.evolve(engine.parts, scheduler=Failing(engine.parts.scheduler))
        for _ in range(2):
            with pytest.raises(ExecutionError, match=rf"scheduler 'inflight'.*failed in {method}: ZeroDivisionError"):
                engine.generate([[1]], GREEDY)


def test_a_closed_engine_refuses_and_closes_twice(tiny):
    engine = engine_of(tiny[0])
    engine.close()
    engine.close()
    with pytest.raises(ExecutionError, match="closed"):
        engine.generate([[1]])


def test_a_stream_whose_engine_is_closed_says_so(tiny):
    engine = engine_of(tiny[0])
    stream = engine.stream([1, 2], GREEDY)
    next(stream)
    engine.close()
    with pytest.raises(ExecutionError, match="it is closed"):
        next(stream)
    stream.close()


class Idle:
    """A scheduler that takes everything and runs nothing."""

    def add(self, sequence):
        pass

    def remove(self, sequence_id):
        pass

    def plan(self):
        return BatchPlan()


def test_a_scheduler_that_plans_nothing_is_named(tiny):
    with engine_of(tiny[0]) as engine:
        engine.parts = attrs.evolve(engine.parts, scheduler=Idle())
        with pytest.raises(ExecutionError, match="'inflight' planned nothing"):
            engine.generate([[1]], GREEDY)
