"""Two steps in flight: whatever comes, is cancelled, stops or is preempted, answers are those of one step at a time."""

import threading
from collections import deque
from queue import SimpleQueue

import pytest
from attrs import define, field, frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engines import engine_of, smollm2_shaped
from intarsia import Request, SamplingParams
from intarsia.errors import ExecutionError
from intarsia.executor import LocalExecutor
from intarsia.hookspecs import hookimpl
from intarsia.protocols import Kernel
from intarsia.sampling import draw
from intarsia.sampling.settings import Settings
from intarsia.stage import ModelStage
from intarsia.testing import scripted
from intarsia.types import PENDING, Fit, Provider
from models import tiny_llama

TOKEN_BYTES = 2 * 4 * 2 * 16 * 4  # of the tiny model: keys and values, layers, kv heads, head dim, fp32
#: shrinking long loads takes minutes; a failing load is short enough to read as it is
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@frozen(kw_only=True)
class LateOptions:
    """How the executor `late` runs."""

    depth: int = 2
    resolves: bool = True
    #: runs a step in a thread as soon as it is submitted; else when it is collected
    threaded: bool = False
    #: fails at this step
    fails_at: int = 0


@define
class Late:
    """An executor that runs the local one's steps in their order, as late as possible or in a thread."""

    inner: LocalExecutor
    options: LateOptions
    plans: list = field(factory=list)
    _waiting: deque = field(factory=deque)
    _tasks: SimpleQueue = field(factory=SimpleQueue)
    _results: SimpleQueue = field(factory=SimpleQueue)
    _thread: object = None

    @property
    def depth(self):
        return self.options.depth

    @property
    def resolves_pending(self):
        return self.options.resolves

    def start(self, progress):
        self.inner.start(progress)
        if self.options.threaded:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def _work(self):
        while (plan := self._tasks.get()) is not None:
            self._results.put(self._run(plan))

    def _run(self, plan):
        try:
            self.inner.submit(plan)
            return self.inner.collect()
        except Exception as error:
            return error

    def submit(self, plan):
        self.plans.append(plan)
        if len(self.plans) == self.options.fails_at:
            raise MemoryError("no room")
        self._waiting.append(plan)
        assert len(self._waiting) <= self.depth
        if self.options.threaded:
            self._tasks.put(plan)

    def collect(self):
        plan = self._waiting.popleft()
        result = self._results.get(timeout=60) if self.options.threaded else self._run(plan)
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self):
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join()
        self.inner.stop()


def sample_rows(logits_LV, temperatures_L, top_ks_L, top_ps_L, min_ps_L, uniforms_L):
    """The op, by the host's own draws."""
    import torch

    found = []
    numbers = (temperatures_L, top_ks_L, top_ps_L, min_ps_L, uniforms_L)
    for row, (temperature, top_k, top_p, min_p, _) in enumerate(zip(*map(torch.Tensor.tolist, numbers), strict=True)):
        filters = Settings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=1.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )
        finite = bool(logits_LV[row].max().isfinite())
        found += draw(logits_LV[row : row + 1], [filters], uniforms_L[row : row + 1].numpy()) if finite else [-1]
    return torch.tensor(found)


class Plugin:
    """Offers the executor `late`, and kernels that draw."""

    @hookimpl
    def provide_executors(self):
        def build(context):
            return Late(LocalExecutor(context), context.options)

        return [Provider(key="late", summary="runs steps late", options=LateOptions, fit=lambda _: Fit(0), build=build)]

    @hookimpl
    def provide_kernels(self):
        class Drawing:
            def kernels(self):
                return [Kernel(op="sample_rows", call=sample_rows)]

        return [Provider(key="drawing", summary="draws", fit=lambda _: Fit(0), build=lambda _: Drawing())]


PLAIN = {"runner": "eager", "attention": "tiled"}
LOCAL = {"executor": {"use": "local", "depth": 2}}
WAYS = {
    "local": LOCAL,
    "local, drawing on the device": {**LOCAL, "kernels": ["drawing", "torch"]},
    "late": {"executor": {"use": "late"}},
    "threaded": {"executor": {"use": "late", "threaded": True}},
    "deep": {"executor": {"use": "late", "depth": 4}},
    "a step a sequence": {"executor": {"use": "late", "resolves": False}},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))[0]


def engine(model, *, num_tokens=8192, max_model_len=None, scheduler=None, page_size=16, **sections):
    num_bytes = -(-num_tokens // page_size) * page_size * TOKEN_BYTES
    made = {
        "engine": {"max_model_len": max_model_len} if max_model_len else {},
        "cache": {"use": "paged", "page_size": page_size, "memory": str(num_bytes)},
        "scheduler": {"use": "inflight", **(scheduler or {})},
        **PLAIN,
        **sections,
    }
    return engine_of(model, plugins=[Plugin()], **made)


@pytest.fixture(scope="module", params=WAYS)
def ahead(tiny, request):
    """An engine of few pages and short steps with several of them in flight."""
    small = {"num_tokens": 112, "max_model_len": 64, "page_size": 4, "scheduler": {"max_tokens": 12}}
    with engine(tiny, **small, **WAYS[request.param]) as made:
        yield made


@pytest.fixture(scope="module")
def plain(tiny):
    """An engine with one step in flight, and room."""
    with engine(tiny, max_model_len=64, executor={"use": "local"}) as made:
        yield made


def is_idle(e):
    figures = e.stats()
    return not e.has_work and (figures["waiting"], figures["running"], figures["cache"]["used"]) == (0, 0, 0)


def run(e, arrivals, cancels):
    """Step by hand: requests come before steps of their numbers, and go; return outputs and when each was cancelled."""
    outputs, cut, step = [], {}, 0
    while step <= max([0, *arrivals, *cancels]) or e.has_work:
        for request in arrivals.get(step, []):
            e.add(request)
        for name in cancels.get(step, []):
            e.cancel(name)
            if any(request.request_id == name for at, each in arrivals.items() if at <= step for request in each):
                cut.setdefault(name, len(outputs))
        outputs += e.step()
        e.parts.cache.check_integrity()
        step += 1
        assert step < 3000
    return outputs, cut


def told(outputs, name, choice):
    """What a client has of one choice."""
    mine = [o for o in outputs if o.request_id == name and o.choice == choice]
    last = mine[-1]
    assert all(o.finish_reason is None for o in mine[:-1]) and last.finish_reason is not None
    return {
        "ids": [t for o in mine for t in o.token_ids],
        "text": "".join(o.text for o in mine),
        "logprobs": [e for o in mine for e in o.logprobs],
        "prompt_logprobs": [e for o in mine for e in o.prompt_logprobs],
        "reason": last.finish_reason,
        "usage": (last.usage.prompt_tokens, last.usage.completion_tokens),
    }


SAMPLED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.9]),
        "seed": st.integers(0, 5),
        "max_tokens": st.integers(2, 14),
        "ignore_eos": st.just(True),
    },
    optional={
        "top_k": st.integers(1, 40),
        "top_p": st.sampled_from([0.5, 0.9]),
        "typical_p": st.just(0.9),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.7),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.just(1),
        "min_tokens": st.just(2),
        "logit_bias": st.just({7: 5.0}),
        "stop_token_ids": st.integers(3, 9).map(lambda n: list(range(0, 250, n))),
        "stop": st.lists(st.sampled_from(list("aeiou 01")), min_size=1, max_size=3),
        "n": st.just(2),
    },
)
#: Few prompts, so that prefixes meet.
PROMPTS = st.tuples(st.sampled_from([11, 5, 8]), st.integers(1, 30)).map(
    lambda p: [(i * p[0]) % 250 for i in range(p[1])]
)


@settings(deadline=None, max_examples=12, phases=PHASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    load=st.lists(st.tuples(PROMPTS, SAMPLED, st.integers(0, 12), st.integers(-1, 1)), min_size=1, max_size=7),
    cancels=st.dictionaries(
        st.integers(0, 20), st.lists(st.integers(0, 6).map(str), min_size=1, max_size=2), max_size=3
    ),
)
def test_answers_are_those_of_one_step_at_a_time(ahead, plain, load, cancels):
    requests = [
        (at, Request(request_id=str(i), prompt=prompt, params=SamplingParams(**params), priority=priority))
        for i, (prompt, params, at, priority) in enumerate(load)
    ]
    arrivals = {}
    for at, request in requests:
        arrivals.setdefault(at, []).append(request)
    outputs, cut = run(ahead, arrivals, cancels)
    assert is_idle(ahead)
    for _, request in requests:
        expected, _ = run(plain, {0: [request]}, {})
        for choice in range(request.params.n):
            found = [o for o in outputs if (o.request_id, o.choice) == (request.request_id, choice)]
            if found[-1].finish_reason == "abort":
                assert request.request_id in cut, "only what was cancelled ends so"
                ids = told(expected, request.request_id, choice)["ids"]
                said = [t for o in found for t in o.token_ids]
                assert said == ids[: len(said)]
                later = [o for o in outputs[cut[request.request_id] :] if o in found]
                assert not any(o.token_ids or o.text for o in later), "a token after the abort was acknowledged"
            else:
                assert told(outputs, request.request_id, choice) == told(expected, request.request_id, choice)


def test_the_next_step_is_submitted_before_the_one_in_front_of_it_is_collected(tiny):
    with engine(tiny, executor={"use": "late"}) as e:
        e.add(
            Request(request_id="a", prompt=[1, 2], params=SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        )
        (first,) = e.step()
        assert [[row.token_ids for row in plan.rows] for plan in e.parts.executor.plans] == [[(1, 2)], [(PENDING,)]]
        assert len(first.token_ids) == 1
        while e.has_work:
            e.step()
        assert sum(bool(plan.rows) for plan in e.parts.executor.plans) == 3, "nothing runs beyond a known limit"
        assert e.stats()["discarded_rows"] == 0 and is_idle(e)


@pytest.mark.parametrize("way", ["local", "late", "threaded", "deep"])
def test_what_ran_beyond_a_stop_is_dropped_and_counted(tiny, plain, way):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (said,) = plain.generate([[1, 2]], params)
    stop = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[said.token_ids[4]])
    with engine(tiny, **WAYS[way]) as e:
        (found,) = e.generate([[1, 2]], stop)
        figures = e.stats()
        assert is_idle(e)
    assert found.token_ids == said.token_ids[: said.token_ids.index(said.token_ids[4]) + 1]
    assert found.finish_reason == "stop" and found.usage.completion_tokens == len(found.token_ids)
    assert figures["discarded_rows"] == (3 if way == "deep" else 1)
    assert figures["generated_tokens"] == len(found.token_ids)


@pytest.mark.parametrize("way", WAYS)
def test_what_runs_beyond_an_end_is_no_ones_prefix(tiny, plain, way):
    """Pages of 1 are full at once: a token that was dropped would have a name by the next request."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (said,) = plain.generate([[3, 4]], params)
    stop = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[said.token_ids[3]])
    with engine(tiny, page_size=1, **WAYS[way]) as e:
        (found,) = e.generate([[3, 4]], stop)
        whole = [3, 4, *found.token_ids]
        assert e.parts.cache.lookup([3, 4, *said.token_ids]) == len(whole) - 1
        (again,) = e.generate([whole], params)
        assert again.usage.cached_tokens == len(whole) - 1
        e.parts.cache.check_integrity()
    (expected,) = plain.generate([whole], params)
    assert again.token_ids == expected.token_ids


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_can_be_left_and_its_id_taken_anew(tiny, plain, way):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    expected = [c.token_ids for c in plain.generate([[1], [2]], params)]
    with engine(tiny, **WAYS[way]) as e:
        for stay in (0, 1, 3):
            stream = e.stream([1], params)
            outputs = [next(stream) for _ in range(stay)]
            stream.close()
            assert is_idle(e) and tuple(t for o in outputs for t in o.token_ids) == expected[0][:stay]
        for prompt, wanted in zip(([1], [2]), expected, strict=True):
            e.add(Request(request_id="same", prompt=[9, 9], params=params))
            e.step()
            e.cancel("same")
            e.add(Request(request_id="same", prompt=prompt, params=params))
            outputs, _ = run(e, {}, {})
            assert outputs[0].finish_reason == "abort" and not outputs[0].token_ids
            assert told(outputs[1:], "same", 0)["ids"] == list(wanted)
        assert is_idle(e)


@pytest.mark.parametrize("way", ["local", "late"])
def test_a_row_that_fails_ends_with_its_error_and_the_others_go_on(tiny, plain, way):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (expected,) = plain.generate([[1, 2]], params)
    with engine(tiny, **WAYS[way]) as e:
        everything = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, banned_token_ids=list(range(257)))
        bad, good = e.generate([[5], [1, 2]], [everything, params])
        assert bad.finish_reason == "error" and "no token is allowed" in bad.choices[0].error
        assert good.token_ids == expected.token_ids
        assert e.stats()["discarded_rows"] == 1 and is_idle(e)


def test_what_is_not_finite_on_the_device_is_the_error_of_its_row(tiny, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    logits = ModelStage.logits

    def spoiled(stage, hidden_TE, rows_L):
        found = logits(stage, hidden_TE, rows_L)
        if len(found) == 2:
            found[0] = float("nan")
        return found

    monkeypatch.setattr(ModelStage, "logits", spoiled)
    with engine(tiny, **LOCAL) as e:
        bad, good = e.generate([[5], [1, 2]], params)
        assert bad.finish_reason == "error" and "NaN" in bad.choices[0].error and good.finish_reason == "length"
        assert e.stats()["discarded_rows"] == 1 and is_idle(e)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_failing_step_names_its_part_and_ends_all(tiny, threaded):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with engine(tiny, executor={"use": "late", "fails_at": 3, "threaded": threaded}) as e:
        for _ in range(2):
            with pytest.raises(ExecutionError, match=r"executor 'late'.*failed in a step: MemoryError: no room"):
                e.generate([[1]], params)


def test_text_and_stop_strings_come_as_with_one_step_in_flight(tmp_path_factory):
    model = smollm2_shaped(tmp_path_factory.mktemp("smol"))
    said = [35542, 33203, 23960, 57, 58]  # ABC, DEF, GH, I, J
    runner = {"use": "scripted", "ids": said, "prompt_tokens": 1}
    found = []
    for executor in ({"use": "local"}, {"use": "local", "depth": 2}):
        with engine_of(model, runner=runner, plugins=[scripted], executor=executor) as e:
            outputs = list(e.stream([5], SamplingParams(temperature=0, max_tokens=12, stop=["DEFGHIJ"])))
            found.append(["".join(o.text for o in outputs), [o.text for o in outputs], outputs[-1].finish_reason])
            assert is_idle(e)
    assert found[0] == found[1] and found[1][0] == "ABC"


# --- who plans ahead --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "depth", "reason"),
    [
        ({"executor": {"use": "local"}}, 1, "executor 'local' runs one step at a time"),
        (LOCAL, 2, "overlap the device"),
        ({**LOCAL, "scheduler": {"use": "static"}}, 1, "scheduler 'static' plans a step from the results"),
        ({"executor": {"use": "late", "resolves": False}}, 2, "has a sequence in one of its steps at a time"),
        ({**LOCAL, "drafter": {"use": "ngram"}}, 1, "how many drafts a row has"),
    ],
)
def test_explain_says_how_many_steps_are_in_flight_and_why(tiny, sections, depth, reason):
    with engine_of(tiny, plugins=[Plugin()], **sections) as e:
        steps = e.explain()["steps"]
        assert steps["in_flight"] == depth and reason in steps["reason"]
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert len(e.generate([[1, 2, 1, 2, 1]], params)[0].token_ids) == 4
        assert is_idle(e)
