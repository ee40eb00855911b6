"""The engine's thread: who is let in, what is reported, and that it waits for nothing but work."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from intarsia.errors import ExecutionError, InvalidRequestError, OverloadedError
from intarsia.types import Output, Request, SamplingParams
from intarsia_zmq.admission import Admission, AdmissionLimits
from intarsia_zmq.engine_loop import EngineLoop
from intarsia_zmq.handover import (
    Add,
    Admit,
    Answered,
    Ask,
    Cancel,
    Failed,
    Figures,
    Pause,
    Refused,
    Started,
    Stop,
    Stopped,
)
from serving import FakeEngine, eventually


class Reader:
    """Collects what a loop reports."""

    def __init__(self, engine, **options):
        self.woken = threading.Event()
        start = engine if callable(engine) else lambda: engine
        self.loop = EngineLoop(start_engine=start, wake=self.woken.set, **options)
        self.seen = []
        self.loop.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loop.post(Stop())
        assert self.loop.join(10)

    def all(self):
        while self.loop.reports:
            self.seen.append(self.loop.reports.popleft())
        return self.seen

    def of(self, kind):
        return [report for report in self.all() if isinstance(report, kind)]

    def outputs(self, key):
        return [output for outputs in self.of(list) for output in outputs if output.request_id == key]

    def ended(self, key):
        return any(output.finish_reason for output in self.outputs(key))


def add(key, *, client=1, tokens=3, prompt="x", n=1, priority=0, size=10):
    params = SamplingParams(max_tokens=tokens, n=n)
    request = Request(request_id=key, prompt=prompt, params=params, priority=priority)
    return Add(request, client, tokens * n, size)


def test_a_request_runs_to_its_end_and_the_thread_then_waits_without_spinning():
    engine = FakeEngine()
    with Reader(engine) as reader:
        reader.loop.post(add("a", tokens=5))
        eventually(lambda: reader.ended("a"))
        assert [i for output in reader.outputs("a") for i in output.token_ids] == [0, 1, 2, 3, 4]
        eventually(lambda: reader.loop.step_age_s(reader.loop.clock()) is None)
        used, steps = time.process_time(), reader.loop.steps
        time.sleep(0.3)
        assert time.process_time() - used < 0.1 and reader.loop.steps == steps
        assert isinstance(reader.seen[0], Started) and reader.loop.waiting_bytes == 0
    assert isinstance(reader.all()[-1], Stopped) and engine.closed


def test_the_engines_own_queue_stays_short_and_priority_decides_within_a_client():
    engine = FakeEngine(max_running=1)
    engine.may_step.clear()
    with Reader(engine, ahead=2) as reader:
        for number in range(10):
            reader.loop.post(add(f"low{number}"))
        eventually(lambda: reader.loop.waiting == 8)
        reader.loop.post(add("high", priority=5))
        time.sleep(0.05)
        assert engine.order == ["low0", "low1"]
        engine.may_step.set()
        eventually(lambda: reader.ended("low9"))
        assert engine.order.index("high") <= 3 and len(engine.order) == 11


def test_every_refusal_is_reported_once_with_its_error_and_its_bytes_are_free():
    limits = AdmissionLimits(waiting=100, waiting_of_client=1)
    engine = FakeEngine(max_running=1)
    engine.may_step.clear()
    with Reader(engine, ahead=1, admission=Admission(limits)) as reader:
        reader.loop.post(add("first"))
        eventually(lambda: engine.order == ["first"])
        reader.loop.post(add("waits"))
        reader.loop.post(add("too many"))
        reader.loop.post(add("bad", client=2, prompt="refuse me"))
        reader.loop.post(add("worse", client=3, prompt="break add"))
        engine.may_step.set()
        eventually(lambda: len(reader.of(Refused)) == 3 and reader.ended("waits"))
        refused = {each.key: each.error for each in reader.of(Refused)}
        assert isinstance(refused["too many"], OverloadedError) and isinstance(refused["bad"], InvalidRequestError)
        assert refused["worse"].code == "internal" and "fault in reading" not in str(refused["worse"])
        eventually(lambda: reader.loop.waiting_bytes == 0)
        reader.loop.post(Admit(AdmissionLimits(waiting=1)))
        reader.loop.post(add("after"))
        eventually(lambda: reader.ended("after"))


def test_a_full_engine_is_asked_again_and_an_empty_one_that_refuses_is_believed():
    engine = FakeEngine(max_running=1, max_waiting=1)
    with Reader(engine, ahead=10) as reader:
        for number in range(5):
            reader.loop.post(add(f"r{number}"))
        eventually(lambda: reader.ended("r4"))
        assert engine.order == [f"r{number}" for number in range(5)] and not reader.of(Refused)
        engine.max_waiting = 0
        reader.loop.post(add("never"))
        eventually(lambda: reader.of(Refused))
        assert reader.of(Refused)[0].key == "never"


@pytest.mark.parametrize("paused", [False, True])
def test_a_cancelled_request_ends_once_for_each_choice_waiting_or_running(paused):
    engine = FakeEngine(max_running=1)
    with Reader(engine, ahead=1) as reader:
        for key in ("runs", "queued", "waits"):
            reader.loop.post(add(key, tokens=10**6, n=2))
        eventually(lambda: reader.outputs("runs"))
        reader.loop.post(Pause(paused))
        for key in ("waits", "runs", "queued", "unknown", "waits"):
            reader.loop.post(Cancel(key))
        eventually(lambda: all(reader.ended(key) for key in ("runs", "queued", "waits")))
        time.sleep(0.05)
        for key in ("runs", "queued", "waits"):
            ends = [(output.choice, output.finish_reason) for output in reader.outputs(key) if output.finish_reason]
            assert ends == [(0, "abort"), (1, "abort")]
        assert not engine.has_work and reader.loop.waiting == 0


def test_nothing_steps_in_a_pause_while_questions_are_answered():
    engine = FakeEngine(step_s=0.005)
    with Reader(engine) as reader:
        reader.loop.post(add("a", tokens=10**6))
        eventually(lambda: len(reader.outputs("a")) > 3)
        reader.loop.post(Pause(True))
        reader.loop.post(Ask("tag", lambda engine: engine.tokenize("ab")))
        eventually(lambda: reader.of(Answered))
        assert [(each.tag, each.answer) for each in reader.of(Answered)] == [("tag", [97, 98])]
        steps = engine.steps
        time.sleep(0.1)
        assert engine.steps == steps and reader.loop.step_age_s(reader.loop.clock()) is None
        reader.loop.post(Pause(False))
        eventually(lambda: engine.steps > steps)


def raise_interrupt(engine):
    raise KeyboardInterrupt


def test_a_question_that_fails_is_answered_and_steps_go_on():
    with Reader(FakeEngine()) as reader:
        reader.loop.post(Ask(1, lambda engine: engine.tokenize(5)))
        reader.loop.post(Ask(2, lambda engine: 1 / 0))
        reader.loop.post(Ask(3, lambda engine: sys.exit(3)))
        reader.loop.post(Ask(4, raise_interrupt))
        reader.loop.post(add("a"))
        eventually(lambda: reader.ended("a"))
        errors = {each.tag: each.error.code for each in reader.of(Answered)}
        assert errors == {1: "invalid", 2: "internal", 3: "internal", 4: "internal"}


def test_the_age_of_a_step_counts_from_when_there_was_work_and_from_the_last_end():
    now = [100.0]
    engine = FakeEngine()
    engine.may_step.clear()
    with Reader(engine, clock=lambda: now[0]) as reader:
        eventually(lambda: reader.of(Started))
        assert reader.loop.step_age_s(now[0]) is None
        now[0] = 200.0
        reader.loop.post(add("a", tokens=10**6))
        eventually(lambda: reader.loop.step_age_s(now[0]) is not None)
        now[0] = 207.0
        assert reader.loop.step_age_s(now[0]) == 7.0
        engine.may_step.set()
        eventually(lambda: reader.loop.step_age_s(now[0]) == 0.0)


def test_a_step_that_raises_is_a_failure_and_the_engine_is_closed():
    engine = FakeEngine(step_s=0.01)
    reader = Reader(engine)
    reader.loop.post(add("a", tokens=10**6))
    eventually(lambda: reader.outputs("a"))
    engine.broken = ExecutionError("gone")
    assert reader.loop.join(10)
    kinds = [type(report) for report in reader.all()]
    assert kinds[-2:] == [Failed, Stopped] and engine.closed


def test_an_engine_that_cannot_start_is_a_failure():
    def start():
        raise MemoryError("too large")

    reader = Reader(start)
    assert reader.loop.join(10)
    assert [type(report) for report in reader.all()] == [Failed, Stopped]


def test_figures_of_each_step_are_reported_where_they_are_wanted():
    with Reader(FakeEngine(), figures=True) as reader:
        reader.loop.post(add("a", tokens=3))
        eventually(lambda: len(reader.of(Figures)) == 3)
        assert [figures.num_outputs for figures in reader.of(Figures)] == [1, 1, 1]
        assert [figures.stats["steps"] for figures in reader.of(Figures)] == [1, 2, 3]
    assert all(isinstance(output, Output) for outputs in reader.of(list) for output in outputs)


def test_an_engine_that_fails_while_it_has_nothing_to_do_is_reported():
    """An executor over other processes, one of which ends while nobody asks anything."""
    engine, looked = FakeEngine(), []

    def check():
        looked.append(None)
        if len(looked) > 1:
            raise ExecutionError("rank 1 is gone")

    engine.parts.executor = SimpleNamespace(check=check)
    with Reader(engine) as reader:
        reader.loop.post(add("a"))
        eventually(lambda: reader.ended("a"))
        eventually(lambda: reader.of(Failed), 10)
        assert str(reader.of(Failed)[0].error) == "rank 1 is gone"
        eventually(lambda: reader.of(Stopped))
        assert engine.closed
