"""Parts replaced while requests run: no request is lost, answers are those without a swap; what fails does nothing."""

import sys

import pytest
from attrs import define, evolve, field, frozen
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import Engine, Request, SamplingParams
from intarsia.defaults.static import StaticOptions, StaticScheduler
from intarsia.errors import CompositionError, ConfigError, ExecutionError, OverloadedError, PluginError
from intarsia.executor import LocalExecutor
from intarsia.hookspecs import KINDS, hookimpl
from intarsia.protocols import Drafter, HandsOver, HeldSequence
from intarsia.replacing import REPLACEABLE
from intarsia.testing import poison_cache, scripted
from intarsia.types import Choice, Draft, Fit, Provider
from models import tiny_llama

TOKEN_BYTES = 2 * 4 * 2 * 16 * 4  # of the tiny model: keys and values, layers, kv heads, head dim, fp32
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=1)


# --- parts of a third party -------------------------------------------------------------------------------------------


@define(eq=False)
class Plain:
    """A scheduler that keeps the protocol and nothing besides."""

    inner: StaticScheduler

    def add(self, sequence):
        self.inner.add(sequence)

    def plan(self):
        return self.inner.plan()

    def update(self, plan, results):
        self.inner.update(plan, results)

    def remove(self, sequence_id):
        self.inner.remove(sequence_id)

    @property
    def num_waiting(self):
        return self.inner.num_waiting

    @property
    def num_running(self):
        return self.inner.num_running


@frozen(kw_only=True)
class BrokenOptions:
    """What breaks."""

    at: str = ""
    after: int = 0


@define(eq=False)
class Broken(Plain):
    """Fails in one of its methods, at the call after so many."""

    options: BrokenOptions
    calls: int = field(default=0)

    def _fail(self, where):
        if self.options.at == where:
            self.calls += 1
            if self.calls > self.options.after:
                raise MemoryError("broken")

    def add(self, sequence):
        self._fail("add")
        if self.options.at == "loses" and self.inner.num_waiting:
            return
        super().add(sequence)

    def plan(self):
        self._fail("plan")
        plan = super().plan()
        if self.options.at == "bad plan" and plan.rows:
            return evolve(plan, rows=(evolve(plan.rows[0], sequence_id=("nobody", 0)),))
        self._fail("late plan")
        if self.options.at == "exit":
            sys.exit(3)
        if self.options.at == "interrupt":
            raise KeyboardInterrupt
        return None if self.options.at == "no plan" else plan


@define(eq=False)
class BrokenOver(Broken):
    """Takes over, and fails in that or says what is not so."""

    def held(self):
        return self.inner.held()

    def take_over(self, held):
        self._fail("take_over")
        if self.options.at == "keeps too much":
            return {one.sequence.sequence_id for one in held} | {("nobody", 0)}
        if self.options.at == "drops":
            held = held[1:]
        return self.inner.take_over(held)


class BrokenDrafter(Drafter):
    """Fails to start, or needs memory."""

    def __init__(self, options):
        self.options = options

    def num_bytes(self, layout):
        return 4096 if self.options.at == "num_bytes" else 0

    def start(self, target):
        if self.options.at == "start":
            raise MemoryError("broken")
        if self.options.at == "scratch":
            target.take_scratch(1)

    def propose(self, requests):
        return [Draft() for _ in requests]


class Plugin:
    """Offers them."""

    @hookimpl
    def provide_schedulers(self):
        def static(context):
            return StaticScheduler(StaticOptions(max_batch=3), context.parts["cache"])

        requires = {"requires": ("cache",), "fit": lambda _: Fit(0)}
        return [
            Provider(key="plain", summary="no more than the protocol", build=lambda c: Plain(static(c)), **requires),
            *(
                Provider(
                    key=key,
                    summary="fails",
                    options=BrokenOptions,
                    build=lambda c, cls=cls: cls(static(c), c.options),
                    **requires,
                )
                for key, cls in (("broken", Broken), ("broken_over", BrokenOver))
            ),
            Provider(key="exits", summary="fails", build=lambda _: sys.exit(3), **requires),
            Provider(key="unbuilt", summary="fails", build=_no_build, **requires),
        ]

    @hookimpl
    def provide_drafters(self):
        return [
            Provider(key="broken", summary="fails", options=BrokenOptions, build=lambda c: BrokenDrafter(c.options))
        ]


def _no_build(context):
    raise MemoryError("broken")


# --- engines ----------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "inflight": Choice("inflight", {"max_tokens": 12}),
    "inflight, small": Choice("inflight", {"max_tokens": 7, "max_batch": 2}),
    "static": Choice("static", {"max_batch": 2}),
    "plain": Choice("plain"),
}
DRAFTERS = {"none": Choice("none"), "ngram": Choice("ngram", {"k": 3}), "scripted": Choice("scripted", {"ids": [1, 2]})}
CACHES = {
    "paged": {"use": "paged", "page_size": 4},
    "paged, swapping": {"use": "paged", "page_size": 4, "swap": "1MiB", "swap_when": "always"},
    "paged, no prefixes": {"use": "paged", "page_size": 4, "prefix": False},
    "contiguous": {"use": "contiguous", "page_size": 4},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))[0]


NOBODY: dict = {}


def engine(model, cache="paged", *, num_tokens=112, depth=1, scheduler="inflight", plugins=NOBODY, **sections):
    made = engine_of(
        model,
        engine={"max_model_len": 64, "plugins": {"block": ["cpu"]}},
        attention="tiled",
        runner="eager",
        cache={**CACHES[cache], "memory": str(num_tokens * TOKEN_BYTES)},
        scheduler={"use": SCHEDULERS[scheduler].use, **SCHEDULERS[scheduler].options},
        executor={"use": "local", "depth": depth},
        plugins={"parts": Plugin(), "scripted": scripted} | plugins,
        **sections,
    )
    assert made.explain()["invariance"]["level"] == "bitwise"
    poison_cache(made)
    return made


@pytest.fixture(scope="module")
def oracle(tiny):
    """One that never swaps anything, with room for all."""
    with engine(tiny, num_tokens=4096) as made:
        yield made


def is_idle(e):
    e.parts.cache.check_integrity()
    figures = e.stats()
    swap = figures["preemption"]["swap"]
    host = (0, 0) if swap is None else (swap["used"], swap["swapped"])
    return not e.has_work and (figures["waiting"], figures["running"], figures["cache"]["used"], *host) == (0,) * 5


def run(e, arrivals, swaps, cancels=()):
    """Step by hand; swap parts before the steps of their numbers. Return the outputs of each request's choices."""
    told, step = {}, 0
    while step <= max([0, *arrivals, *swaps]) or e.has_work:
        for request in arrivals.get(step, ()):
            e.add(request)
        for slot, choice in swaps.get(step, ()):
            done = e.swap(slot, choice)
            assert done["sequences"] == e.stats()["waiting"] + e.stats()["running"]
        for name in cancels.get(step, ()) if cancels else ():
            e.cancel(name)
        for output in e.step():
            told.setdefault((output.request_id, output.choice), []).append(output)
        e.parts.cache.check_integrity()
        step += 1
        assert step < 3000
    return told


def answer(outputs):
    last = outputs[-1]
    assert all(o.finish_reason is None for o in outputs[:-1]) and last.finish_reason is not None
    return {
        "ids": [t for o in outputs for t in o.token_ids],
        "text": "".join(o.text for o in outputs),
        "logprobs": [entry for o in outputs for entry in o.logprobs],
        "prompt_logprobs": [entry for o in outputs for entry in o.prompt_logprobs],
        "end": (last.finish_reason, last.error, last.seed),
        "usage": (last.usage.prompt_tokens, last.usage.completion_tokens),
    }


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.9]),
        "seed": st.integers(0, 5),
        "max_tokens": st.integers(2, 20),
        "ignore_eos": st.just(True),
    },
    optional={
        "repetition_penalty": st.just(1.3),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.just(1),
        "stop_token_ids": st.integers(3, 9).map(lambda n: list(range(0, 250, n))),
        "n": st.just(2),
    },
)
PROMPTS = st.tuples(st.sampled_from([11, 5, 8]), st.integers(1, 30)).map(
    lambda p: [(i * p[0]) % 250 for i in range(p[1])]
)


@st.composite
def loads(draw):
    """Requests by the step before which they come, and swaps likewise."""
    arrivals, swaps = {}, {}
    for number in range(draw(st.integers(1, 7))):
        request = Request(
            request_id=f"r{number}",
            prompt=draw(PROMPTS),
            params=SamplingParams(**draw(PARAMS)),
            priority=draw(st.sampled_from([0, 0, 3])),
        )
        arrivals.setdefault(draw(st.integers(0, 12)), []).append(request)
    for _ in range(draw(st.integers(1, 4))):
        slot = draw(st.sampled_from(["scheduler", "scheduler", "scheduler", "drafter"]))
        choices = SCHEDULERS if slot == "scheduler" else DRAFTERS
        swaps.setdefault(draw(st.integers(0, 30)), []).append((slot, choices[draw(st.sampled_from([*choices]))]))
    return arrivals, swaps


def check(e, oracle, arrivals, swaps):
    told = run(e, arrivals, swaps)
    expected = run(oracle, arrivals, {})
    assert told.keys() == expected.keys(), "a request is lost"
    for name, outputs in expected.items():
        assert answer(told[name]) == answer(outputs), name
    assert is_idle(e)


FAST = [("paged", 2), ("paged, swapping", 1), ("contiguous", 1)]
SLOW = [(cache, depth) for cache in CACHES for depth in (1, 2) if (cache, depth) not in FAST]


@pytest.mark.parametrize(("cache", "depth"), [*FAST, *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW)])
def test_no_swap_changes_an_answer_or_loses_one_whenever_it_comes(tiny, oracle, cache, depth):
    with engine(tiny, cache, depth=depth, num_tokens=128) as made:

        @settings(deadline=None, max_examples=10, phases=PHASES, suppress_health_check=list(HealthCheck))
        @example(({0: requests(7)}, {12: [("scheduler", SCHEDULERS["inflight"])]}))  # for which there are too few pages
        @given(loads())
        def tried(load):
            check(made, oracle, *load)

        tried()
        assert made.stats()["preemption"]["preempted"] or cache == "contiguous"


def requests(count=5, num_prompt=9, num_tokens=14, **more):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=1, **more)
    return [
        Request(request_id=f"r{i}", prompt=[(7 * i + j) % 250 for j in range(num_prompt + i)], params=params)
        for i in range(count)
    ]


def swapped(e, oracle, *swaps, step=8, arrivals=None):
    """Run requests with swaps before a step, check them against the oracle; return what the swaps say of themselves."""
    arrivals = arrivals or {0: requests()}
    said = len(e.explain()["swaps"])
    check(e, oracle, arrivals, {step: list(swaps)})
    return e.explain()["swaps"][said:]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_schedulers_that_hand_over_leave_sequences_their_pages_and_nothing_is_run_twice(tiny, oracle):
    with engine(tiny, num_tokens=1024, scheduler="inflight") as made:
        ran, submit = [], LocalExecutor.submit
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                LocalExecutor,
                "submit",
                lambda e, plan: (ran.append(plan) if e is made.parts.executor else 0, submit(e, plan)),
            )
            (there,) = swapped(made, oracle, ("scheduler", Choice("static", {"max_batch": 8})))
            (back,) = swapped(made, oracle, ("scheduler", SCHEDULERS["inflight"]))
        assert (there["before"], there["after"], there["sequences"], there["kept"]) == ("inflight", "static", 5, 5)
        assert (back["before"], back["after"], back["sequences"], back["kept"]) == ("static", "inflight", 5, 5)
        # The second time the cache has the prompts.
        total = sum(len(request.prompt) + 14 - 1 for request in requests())
        assert total < sum(plan.num_tokens for plan in ran) <= 2 * total
        assert made.stats()["preemption"]["recomputed_tokens"] == 0


def test_a_scheduler_that_only_keeps_the_protocol_takes_over_and_what_the_cache_has_is_not_run_again(tiny, oracle):
    for cache, most in (("paged", 5 * 4), ("paged, no prefixes", 5 * 26)):
        with engine(tiny, cache, num_tokens=1024) as made:
            (done,) = swapped(made, oracle, ("scheduler", Choice("plain")))
            assert (done["sequences"], done["kept"]) == (5, 0)
            assert 0 < made.stats()["preemption"]["recomputed_tokens"] <= most, cache


def test_sequences_in_host_memory_stay_there_or_are_run_again(tiny, oracle):
    load = {0: requests(6, 12, 30)}
    for choice, stays in (
        (SCHEDULERS["inflight, small"], True),
        (Choice("plain"), False),
        (SCHEDULERS["static"], False),
    ):
        with engine(tiny, "paged, swapping", num_tokens=112) as made:
            seen, swap = [], Engine.swap

            def watched(self, slot, choice, seen=seen, swap=swap):
                books = self.parts.cache.swap_stats
                before = books().swapped
                done = swap(self, slot, choice)
                seen.append((before, books().swapped))
                return done

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Engine, "swap", watched)
                check(made, oracle, load, {step: [("scheduler", choice)] for step in (18, 19, 20, 21)})
            assert any(before for before, _ in seen), "nothing is in host memory when it is swapped"
            assert any(after for before, after in seen[:1]) == stays


def test_a_swap_while_steps_are_in_flight_collects_them_first(tiny, oracle):
    with engine(tiny, num_tokens=1024, depth=2) as made:
        for request in requests():
            made.add(request)
        outputs = [output for _ in range(3) for output in made.step()]
        assert len(made._loop._flight) > 0
        made.swap("scheduler", Choice("plain"))
        assert len(made._loop._flight) == 0 and made.explain()["steps"]["in_flight"] == 1
        outputs += [output for _ in range(2) for output in made.step()]
        made.swap("scheduler", SCHEDULERS["inflight"])
        assert made.explain()["steps"]["in_flight"] == 2
        while made.has_work:
            outputs += made.step()
        expected = run(oracle, {0: requests()}, {})
        for name, said in expected.items():
            assert answer([o for o in outputs if (o.request_id, o.choice) == name]) == answer(said)
        assert is_idle(made)


def test_an_observer_that_swaps_while_a_swap_collects_has_its_part_too(tiny, oracle):
    class Swapper:
        @hookimpl
        def step_finished(self):
            if swapping:
                swapping.clear()
                made.swap("drafter", DRAFTERS["ngram"])

    swapping = []
    with engine(tiny, num_tokens=1024, depth=2, plugins={"swapper": Swapper()}) as made:
        for request in requests():
            made.add(request)
        outputs = [output for _ in range(3) for output in made.step()]
        assert len(made._loop._flight) > 0
        swapping.append(True)
        made.swap("scheduler", SCHEDULERS["static"])
        assert not swapping
        assert (made.config.scheduler.use, made.config.drafter.use) == ("static", "ngram")
        parts = made.explain()["parts"]
        assert (parts["scheduler"]["key"], parts["drafter"]["key"]) == ("static", "ngram")
        while made.has_work:
            outputs += made.step()
        for name, said in run(oracle, {0: requests()}, {}).items():
            assert answer([o for o in outputs if (o.request_id, o.choice) == name]) == answer(said)


def test_a_request_can_be_cancelled_between_a_swap_and_the_next_step(tiny, oracle):
    for choice in SCHEDULERS.values():
        for depth in (1, 2):
            with engine(tiny, depth=depth) as made:
                for request in requests():
                    made.add(request)
                outputs = [output for _ in range(4) for output in made.step()]
                made.swap("scheduler", choice)
                for name in ("r0", "r3", "r4"):
                    made.cancel(name)
                made.add(Request(request_id="r3", prompt=[5, 6], params=GREEDY))
                while made.has_work:
                    outputs += made.step()
                assert is_idle(made)
                expected = run(oracle, {0: requests()}, {})
                for name in (("r1", 0), ("r2", 0)):
                    assert answer([o for o in outputs if (o.request_id, o.choice) == name]) == answer(expected[name])
                assert {o.finish_reason for o in outputs if o.request_id in ("r0", "r4")} <= {None, "abort"}


def test_all_requests_can_be_cancelled_right_after_a_swap(tiny):
    with engine(tiny) as made:
        for request in requests():
            made.add(request)
        made.step()
        made.swap("scheduler", Choice("plain"))
        for request in requests():
            made.cancel(request.request_id)
        while made.has_work:
            made.step()
        assert is_idle(made)


def test_waiting_streams_and_generate_go_on(tiny, oracle):
    with engine(tiny) as made:
        stream = made.stream([1, 2, 3], GREEDY)
        first = [next(stream), next(stream)]
        made.swap("scheduler", SCHEDULERS["static"])
        (other,) = made.generate([[4, 5]], GREEDY)
        made.swap("drafter", DRAFTERS["ngram"])
        ids = [t for output in [*first, *stream] for t in output.token_ids]
        assert tuple(ids) == oracle.generate([[1, 2, 3]], GREEDY)[0].token_ids
        assert other.token_ids == oracle.generate([[4, 5]], GREEDY)[0].token_ids


# --- what is said -----------------------------------------------------------------------------------------------------


def test_config_explain_and_stats_show_the_part_that_runs_and_what_ran_before(tiny):
    with engine(tiny) as made:
        assert made.explain()["swaps"] == [] and made.stats()["swaps"] == 0
        done = made.swap("scheduler", Choice("static", {"max_batch": 3}))
        made.swap("drafter", DRAFTERS["ngram"])
        report = made.explain()
        part = report["parts"]["scheduler"]
        assert (part["key"], part["asked_by"], part["options"]["max_batch"]) == ("static", "config", 3)
        assert part["reason"].endswith("swapped in for 'inflight'")
        assert list(report["parts"]) == [kind.slot for kind in KINDS if kind.slot in report["parts"]]
        assert made.config.scheduler == Choice("static", {"max_batch": 3}) and made.config.drafter.use == "ngram"
        assert report["swaps"][0] == done and made.stats()["swaps"] == 2
        assert [(s["slot"], s["before"], s["after"]) for s in report["swaps"]][1] == ("drafter", "none", "ngram")
        assert made.stats()["speculation"]["drafter"] == "ngram"
        with engine_from(made) as fresh:
            assert fresh.explain()["hash"] == report["hash"], "an engine of this config from the start"
        made.swap("drafter", DRAFTERS["none"])
        assert "drafter" not in made.explain()["parts"] and "speculation" not in made.stats()


def engine_from(made):
    return Engine.from_config(made.config, plugins={"parts": Plugin(), "scripted": scripted})


def test_figures_of_speculation_begin_anew_with_each_drafter(tiny):
    with engine(tiny, num_tokens=1024, drafter={"use": "scripted", "ids": [1, 2, 3, 4, 5]}) as made:
        made.generate([[7]], GREEDY)
        assert made.stats()["speculation"]["drafted"] > 0
        made.swap("drafter", DRAFTERS["scripted"])
        assert made.stats()["speculation"]["drafted"] == 0


def test_a_drafter_that_comes_while_requests_run_drafts_for_them(tiny, oracle):
    (answered,) = oracle.generate([[1, 2, 3]], GREEDY)
    right = Choice("scripted", {"ids": list(answered.token_ids), "prompt_tokens": 3})
    load = {0: [Request(request_id="a", prompt=[1, 2, 3], params=GREEDY)]}
    with engine(tiny, num_tokens=1024) as made:
        check(made, oracle, load, {4: [("drafter", right)]})
        assert made.stats()["speculation"]["accepted"] > 3


# --- what is refused --------------------------------------------------------------------------------------------------


def refused_with(e, oracle, slot, choice, error, match):
    """A swap in the middle of requests that is refused: all of these end as if it had not been tried."""
    outputs = {}
    for request in requests():
        e.add(request)
    for _ in range(4):
        for output in e.step():
            outputs.setdefault((output.request_id, output.choice), []).append(output)
    config, before = e.config, e.explain()["parts"]
    with pytest.raises(error, match=match) as raised:
        e.swap(slot, choice)
    assert e.explain()["swaps"] == [] and e.explain()["parts"] == before and e.config == config
    while e.has_work:
        for output in e.step():
            outputs.setdefault((output.request_id, output.choice), []).append(output)
        e.parts.cache.check_integrity()
    expected = run(oracle, {0: requests()}, {})
    assert {name: answer(said) for name, said in outputs.items()} == {n: answer(said) for n, said in expected.items()}
    assert is_idle(e)
    return raised.value


GOES_ON = "'inflight' goes on"


def broken(at, key="broken", **more):
    return Choice(key, {"at": at, **more})


FAULTS = {
    "no such part": ("scheduler", Choice("statik"), ConfigError, r"Did you mean 'static'"),
    "no such option": ("scheduler", Choice("static", {"max_bach": 1}), ConfigError, r"scheduler\.max_bach.*max_batch"),
    "a wrong option": ("scheduler", Choice("static", {"max_batch": 0}), ConfigError, r"scheduler\.max_batch"),
    "none": ("scheduler", Choice("none"), ConfigError, r"every engine has this part"),
    "no room": ("scheduler", Choice("static", {"max_batch": 1, "max_waiting": 2}), OverloadedError, r"allows 2"),
    "fails to build": ("scheduler", Choice("unbuilt"), PluginError, r"'parts' .*'unbuilt'.*build.*MemoryError"),
    "fails to add": ("scheduler", broken("add", after=2), PluginError, rf"'parts'.*{GOES_ON}.*MemoryError"),
    "loses some": ("scheduler", broken("loses"), PluginError, r"1 sequences, and was given 5"),
    "fails to plan": ("scheduler", broken("plan"), PluginError, rf"'broken'.*{GOES_ON}.*MemoryError"),
    "fails as it ends its plan": ("scheduler", broken("late plan"), PluginError, rf"{GOES_ON}.*MemoryError"),
    "plans nonsense": ("scheduler", broken("bad plan"), PluginError, r"KeyError.*nobody"),
    "plans nothing at all": ("scheduler", broken("no plan"), PluginError, rf"{GOES_ON}.*returned None, not a Batch"),
    "exits as it plans": ("scheduler", broken("exit"), PluginError, rf"{GOES_ON}.*SystemExit: 3"),
    "exits as it is built": ("scheduler", Choice("exits"), PluginError, r"'parts' .*'exits' failed in build: SystemEx"),
    "is interrupted as it plans": ("scheduler", broken("interrupt"), KeyboardInterrupt, None),
    "fails to take over": ("scheduler", broken("take_over", "broken_over"), PluginError, r"MemoryError"),
    "keeps what is nobody's": ("scheduler", broken("keeps too much", "broken_over"), PluginError, r"keeps pages"),
    "drops one": ("scheduler", broken("drops", "broken_over"), PluginError, r"4 sequences, and was given 5"),
    "a drafter that fails to start": ("drafter", broken("start"), PluginError, r"'broken'.*'none' goes on.*MemoryErr"),
    "a drafter that takes pages": ("drafter", broken("scratch"), PluginError, r"cache is made already"),
    "a drafter that takes memory": ("drafter", broken("num_bytes"), CompositionError, r"4096 bytes"),
    "a drafter with a model": (
        "drafter",
        Choice("draft_model", {"model": "smollm2"}),
        CompositionError,
        r"start another",
    ),
    "no slot": ("schedule", Choice("static"), ConfigError, r"Did you mean 'scheduler'"),
}


@pytest.fixture(scope="module", params=["paged", "contiguous"])
def steady(tiny, request):
    """An engine that outlives whatever was to replace its parts."""
    with engine(tiny, request.param, num_tokens=512) as made:
        yield made


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_leaves_the_part_before_with_every_request(steady, oracle, fault):
    refused_with(steady, oracle, *FAULTS[fault])


def test_a_swap_that_failed_is_no_reason_against_the_next(tiny, oracle):
    with engine(tiny) as made:
        refused_with(made, oracle, *FAULTS["fails to plan"])
        assert made.swap("scheduler", SCHEDULERS["static"])["after"] == "static"
        assert made.generate([[1, 2]], GREEDY)[0].token_ids == oracle.generate([[1, 2]], GREEDY)[0].token_ids


@pytest.mark.parametrize("slot", [kind.slot for kind in KINDS if kind.slot not in REPLACEABLE] + ["model", "engine"])
def test_every_other_slot_is_refused_with_the_reason(tiny, slot):
    with engine(tiny) as made, pytest.raises(CompositionError, match=rf"^{slot}: .*cannot be replaced.*: .+") as raised:
        made.swap(slot, Choice("auto"))
    assert raised.value.field == slot and "scheduler, drafter" in str(raised.value)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_queue_that_is_too_short_to_take_all_back_loses_none(tiny, oracle, depth):
    """More run and wait than the scheduler before lets wait at once: the rest enters as it has room."""
    options = {"max_tokens": 40, "max_batch": 3, "max_waiting": 3}
    with engine(tiny, num_tokens=512, depth=depth) as made:
        made.swap("scheduler", Choice("inflight", options))
        outputs = []
        for request in requests()[:3]:
            made.add(request)
        for _ in range(3):
            outputs += made.step()
        for request in requests()[3:]:
            made.add(request)
        outputs += made.step()
        assert (made.stats()["waiting"], made.stats()["running"]) == (2, 3)
        for _ in range(2):
            with pytest.raises(PluginError, match=GOES_ON):
                made.swap("scheduler", broken("bad plan"))
            assert (made.stats()["waiting"], made.stats()["running"]) == (5, 0)
            with pytest.raises(OverloadedError, match="2 sequences wait for room"):
                made.add(Request(request_id="new", prompt=[1, 2]))
        made.cancel("r4")
        while made.has_work:
            outputs += made.step()
        expected = run(oracle, {0: requests()}, {})
        for name in (("r0", 0), ("r1", 0), ("r2", 0), ("r3", 0)):
            assert answer([o for o in outputs if (o.request_id, o.choice) == name]) == answer(expected[name])
        assert [o.finish_reason for o in outputs if o.request_id == "r4"][-1] == "abort"
        assert is_idle(made)


def test_a_check_of_the_composition_can_refuse_a_swap(tiny):
    class Judge:
        @hookimpl
        def check_composition(self, config, parts):
            if config.scheduler.use == "static":
                raise CompositionError("scheduler: static is not for this house; inflight is", field="scheduler")

    with engine_of(tiny, plugins={"judge": Judge()}, scheduler="inflight") as made:
        with pytest.raises(CompositionError, match="not for this house"):
            made.swap("scheduler", Choice("static"))
        assert made.explain()["parts"]["scheduler"]["key"] == "inflight"


def test_a_part_that_others_were_built_around_stays(tiny):
    class Wrapping:
        @hookimpl
        def provide_executors(self):
            return [
                Provider(key="around", summary="", requires=("scheduler",), fit=lambda _: Fit(0), build=LocalExecutor)
            ]

    with engine_of(tiny, plugins={"wrapping": Wrapping()}, executor="around") as made:
        with pytest.raises(CompositionError, match="executor 'around' was built around it"):
            made.swap("scheduler", Choice("static"))
        made.swap("drafter", Choice("ngram"))


def test_an_executor_that_cannot_take_another_drafter_is_named(tiny):
    class Narrow:
        """The local executor, and no more than the protocol."""

        def __init__(self, context):
            inner = LocalExecutor(context)
            self.start, self.submit, self.collect, self.stop = inner.start, inner.submit, inner.collect, inner.stop
            self.depth = 1

    class Offer:
        @hookimpl
        def provide_executors(self):
            return [Provider(key="narrow", summary="", fit=lambda _: Fit(0), build=Narrow)]

    with engine_of(tiny, plugins={"narrow": Offer()}, executor="narrow") as made:
        with pytest.raises(CompositionError, match="executor 'narrow' cannot take another"):
            made.swap("drafter", Choice("ngram"))
        made.swap("scheduler", Choice("static"))


def test_a_closed_engine_swaps_nothing(tiny):
    made = engine(tiny)
    made.close()
    with pytest.raises(ExecutionError, match="closed"):
        made.swap("scheduler", Choice("static"))


def test_the_first_party_schedulers_hand_over(tiny):
    for key in ("inflight", "static"):
        with engine_of(tiny, scheduler=key) as made:
            assert isinstance(made.parts.scheduler, HandsOver)
            made.add(requests(1)[0])
            (one,) = made.parts.scheduler.held()
            assert isinstance(one, HeldSequence) and one.pages == "none"
