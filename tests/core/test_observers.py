"""Observers: asked in order, with what happened; one that fails is logged once and harms nothing."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import types

import pytest

from engines import engine_of
from intarsia import Request, SamplingParams
from intarsia.errors import ConfigError
from intarsia.hookspecs import OBSERVERS, hookimpl
from intarsia.observers import Observers
from intarsia.plugins import Registry
from intarsia.testing import scripted
from intarsia.types import Choice, Output, PluginsOptions, StepResult
from models import tiny_llama

IDS = [10, 11, 12, 13]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=1)[0]


def started(model, **plugins):
    runner = {"use": "scripted", "ids": IDS, "prompt_tokens": 2}
    plugins["scripted"] = scripted
    return engine_of(model, runner=runner, plugins=plugins, engine={"plugins": {"allow": []}})


def recorder(record: list) -> types.SimpleNamespace:
    """A plugin that notes every call of every observing hook, with all its arguments."""

    @hookimpl
    def engine_started(engine, parts):
        record.append(("engine_started", {"engine": engine, "parts": parts}))

    @hookimpl
    def step_finished(result, outputs, seconds):
        record.append(("step_finished", {"result": result, "outputs": outputs, "seconds": seconds}))

    @hookimpl
    def request_finished(output):
        record.append(("request_finished", {"output": output}))

    @hookimpl
    def engine_stopping(engine):
        record.append(("engine_stopping", {"engine": engine, "still": engine.parts.executor}))

    return types.SimpleNamespace(
        engine_started=engine_started,
        step_finished=step_finished,
        request_finished=request_finished,
        engine_stopping=engine_stopping,
    )


def test_a_life_is_told_in_order_with_what_happened(model):
    record: list = []
    engine = started(model, watch=recorder(record))
    assert [name for name, _ in record] == ["engine_started"]
    assert record[0][1] == {"engine": engine, "parts": engine.parts}
    engine.add(Request(request_id="a", prompt=[1, 2], params=SamplingParams(max_tokens=3, temperature=0)))
    engine.add(Request(request_id="b", prompt=[1, 2], params=SamplingParams(max_tokens=2, temperature=0)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.close()
    engine.close()
    steps = ["step_finished", "step_finished", "request_finished", "step_finished", "request_finished"]
    assert [name for name, _ in record] == ["engine_started", *steps, "engine_stopping"]

    told = [facts for name, facts in record if name == "step_finished"]
    assert all(isinstance(facts["result"], StepResult) and 0 < facts["seconds"] < 60 for facts in told)
    assert [[row.token_ids for row in facts["result"].rows] for facts in told] == [
        [(10,), (10,)],
        [(11,), (11,)],
        [(12,)],
    ]
    assert all(isinstance(facts["outputs"], tuple) for facts in told)
    assert [output for facts in told for output in facts["outputs"]] == outputs
    ends = [facts["output"] for name, facts in record if name == "request_finished"]
    assert [(end.request_id, end.finish_reason) for end in ends] == [("b", "length"), ("a", "length")]
    assert all(end.usage is not None and end.timings is not None for end in ends)


def test_a_cancelled_request_and_each_choice_are_told(model):
    record: list = []
    with started(model, watch=recorder(record)) as engine:
        engine.generate([[1, 2]], SamplingParams(max_tokens=1, n=3))
        engine.add(Request(request_id="gone", prompt=[1, 2]))
        engine.cancel("gone")
        engine.step()
    ends = [facts["output"] for name, facts in record if name == "request_finished"]
    reasons = [(end.choice, end.finish_reason) for end in ends]
    assert reasons == [(0, "length"), (1, "length"), (2, "length"), (0, "abort")]


def test_an_engine_that_is_stopping_still_holds_its_executor(model):
    running = []

    @hookimpl
    def engine_stopping(engine):
        running.append(engine.generate([[1, 2]], SamplingParams(max_tokens=1, temperature=0))[0].token_ids)

    started(model, watch=types.SimpleNamespace(engine_stopping=engine_stopping)).close()
    assert running == [(10,)]


def test_an_engine_that_never_started_is_not_told_of(model):
    record: list = []
    with pytest.raises(ConfigError):
        engine_of(model, cache={"memory": "nan"}, plugins={"watch": recorder(record)})
    assert record == []


@pytest.mark.parametrize("hook", OBSERVERS)
def test_one_that_fails_is_logged_once_never_asked_again_and_harms_nothing(model, hook, caplog):
    calls = []

    def fail(*facts):
        calls.append(facts)
        raise LookupError("my bug")

    names = list(inspect.signature(getattr(recorder([]), hook)).parameters)
    scope: dict = {"fail": fail}
    exec(f"def observe({', '.join(names)}): fail({', '.join(names)})", scope)
    record: list = []
    plugins = {"bad": types.SimpleNamespace(**{hook: hookimpl(scope["observe"])}), "good": recorder(record)}
    with caplog.at_level(logging.ERROR, "intarsia"), started(model, **plugins) as engine:
        answers = [engine.generate([[1, 2]], SamplingParams(max_tokens=3, temperature=0))[0] for _ in range(2)]
    assert [answer.token_ids for answer in answers] == [(10, 11, 12)] * 2
    assert len(calls) == 1
    (logged,) = caplog.records
    assert logged.getMessage() == f"plugin 'bad' (- -) failed in {hook} and is not asked again"
    assert logged.exc_info[0] is LookupError
    told = [(each["plugin"], each["disabled"]) for each in engine.stats()["observers"] if each["hook"] == hook]
    assert sorted(told) == [("bad", "LookupError: my bug"), ("good", None)]
    assert engine.explain()["observers"] == engine.stats()["observers"]
    counts = {name: sum(each == name for each, _ in record) for name in OBSERVERS}
    assert counts == {"engine_started": 1, "step_finished": 6, "request_finished": 2, "engine_stopping": 1}


def test_one_that_fails_in_one_hook_is_still_asked_in_the_others(model):
    record: list = []
    plugin = recorder(record)
    plugin.step_finished = hookimpl(lambda result: 1 / 0)
    with started(model, watch=plugin) as engine:
        engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    assert [name for name, _ in record] == ["engine_started", "request_finished", "engine_stopping"]


def observers(**plugins) -> Observers:
    return Observers(Registry.discover(PluginsOptions(allow=()), plugins))


def test_an_observer_is_handed_only_the_arguments_that_it_takes():
    seen = []

    @hookimpl
    def step_finished(seconds):
        seen.append(seconds)

    told = observers(watch=types.SimpleNamespace(step_finished=step_finished))
    told.tell("step_finished", result=StepResult(), outputs=(), seconds=1.5)
    assert seen == [1.5]


def test_a_wrapper_observes_nothing_and_that_is_logged(caplog):
    @hookimpl(wrapper=True)
    def request_finished(output):
        return (yield)

    told = observers(watch=types.SimpleNamespace(request_finished=request_finished))
    for _ in range(2):
        told.tell("request_finished", output=Output(request_id="a"))
    assert len(caplog.records) == 1 and "'watch'" in caplog.records[0].getMessage()


def test_nobody_watching_is_known_beforehand_and_the_engine_then_measures_and_tells_nothing(model, monkeypatch):
    assert not any(observers().watches(hook) for hook in OBSERVERS)
    watched = observers(watch=recorder([]))
    assert all(watched.watches(hook) for hook in OBSERVERS)

    told = []
    monkeypatch.setattr(Observers, "tell", lambda self, hook, **facts: told.append(hook))
    with started(model) as engine:
        engine.generate([[1, 2]], SamplingParams(max_tokens=3))
    assert "step_finished" not in told


def test_an_observer_that_exits_ends_itself_alone(caplog):
    told = observers(watch=types.SimpleNamespace(step_finished=hookimpl(lambda: exit(3))))
    for _ in range(2):
        told.tell("step_finished", result=StepResult(), outputs=(), seconds=0.0)
    assert len(caplog.records) == 1
    assert told.report()[0]["disabled"] == "SystemExit: 3"


class MuteError(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise RuntimeError("and not even this")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MuteError(), "MuteError: (its __str__ raises RuntimeError)"),
        (ValueError(), "ValueError"),
        (asyncio.CancelledError(), "CancelledError"),
        (BaseExceptionGroup("both", [SystemExit(1)]), "BaseExceptionGroup: both (1 sub-exception)"),
    ],
)
@pytest.mark.parametrize("hook", ["step_finished", "request_finished"])
def test_whatever_an_observer_raises_harms_no_request(model, hook, error, says):
    def observe():
        raise error

    with started(model, watch=types.SimpleNamespace(**{hook: hookimpl(observe)})) as engine:
        (answer,) = engine.generate([[1, 2]], SamplingParams(max_tokens=3, temperature=0))
        assert answer.token_ids == (10, 11, 12)
        assert [each["disabled"] for each in engine.stats()["observers"]] == [says]


CALLS_BACK = {
    "cancel": lambda engine: engine.cancel("long"),
    "generate": lambda engine: engine.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=0)),
    "swap": lambda engine: engine.swap("scheduler", Choice("static")),
    "step": lambda engine: engine.step(),
}


@pytest.mark.parametrize("call", CALLS_BACK)
@pytest.mark.parametrize("hook", ["step_finished", "request_finished"])
def test_one_that_calls_the_engine_neither_reorders_nor_takes_outputs(model, hook, call):
    called = []

    def observe():
        if not called:
            called.append(True)
            CALLS_BACK[call](engine)

    with started(model, watch=types.SimpleNamespace(**{hook: hookimpl(observe)})) as engine:
        for name, most in (("long", 4), ("short", 2)):
            params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
            engine.add(Request(request_id=name, prompt=[1, 2], params=params))
        told: dict[str, list] = {"long": [], "short": []}
        while engine.has_work:
            for output in engine.step():
                told[output.request_id].append(output)
        refused = [each["disabled"] for each in engine.stats()["observers"]]
    assert called and (refused != [None]) == (call == "step")
    for name, ids in (("long", IDS), ("short", IDS[:2])):
        *others, last = told[name]
        assert last.finish_reason is not None and all(output.finish_reason is None for output in others)
        said = [token for output in told[name] for token in output.token_ids]
        assert said == ids or (name == "long" and call == "cancel" and said == ids[: len(said)] and said)


def test_an_interrupt_within_an_observer_passes():
    def interrupted():
        raise KeyboardInterrupt

    told = observers(watch=types.SimpleNamespace(step_finished=hookimpl(interrupted)))
    with pytest.raises(KeyboardInterrupt):
        told.tell("step_finished", result=StepResult(), outputs=(), seconds=0.0)


def test_one_that_takes_long_is_told_of_once_and_its_time_is_counted(monkeypatch, caplog):
    monkeypatch.setattr("intarsia.observers._SLOW_S", 0.01)
    told = observers(watch=types.SimpleNamespace(request_finished=hookimpl(lambda: time.sleep(0.02))))
    for _ in range(2):
        told.tell("request_finished", output=Output(request_id="a"))
    (logged,) = caplog.records
    assert "plugin 'watch' (- -) took 0.0 s in request_finished, and all requests wait" in logged.getMessage()
    spent = told.times.table()["observer.watch"]
    assert spent["calls"] == 2 and spent["seconds"] >= 0.04
