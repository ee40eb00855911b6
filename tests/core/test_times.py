"""Time by part: each its own, nothing counted twice, and cheap."""

from __future__ import annotations

import time
import types

import attrs
import pytest

from engines import engine_of
from intarsia import SamplingParams
from intarsia.hookspecs import hookimpl
from intarsia.protocols import Drafter, LogitsProcessor
from intarsia.times import Times
from intarsia.types import Draft, Fit, Provider
from models import tiny_llama

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=1)[0]


# --- the sums ---------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that stands still until it is told."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("intarsia.times.perf_counter", made)
    return made


def test_a_span_within_another_counts_for_itself_alone(clock):
    times = Times()
    with times.at("outer"):
        clock.now += 1
        with times.at("inner"):
            clock.now += 2
            with times.at("innermost"):
                clock.now += 4
        with times.at("inner"):
            clock.now += 8
        clock.now += 16
    assert times.take() == {"outer": (17.0, 1), "inner": (10.0, 2), "innermost": (4.0, 1)}
    assert times.take() == {}


def test_a_span_within_one_of_its_own_name_is_counted_once(clock):
    times = Times()
    with times.at("a"):
        clock.now += 1
        with times.at("a"):
            clock.now += 2
    assert times.take() == {"a": (3.0, 2)}


def test_a_block_that_fails_is_counted(clock):
    times = Times()
    with pytest.raises(KeyError), times.at("outer"), times.at("inner"):
        clock.now += 1
        raise KeyError
    with times.at("next"):
        clock.now += 2
    assert times.take() == {"inner": (1.0, 1), "outer": (0.0, 1), "next": (2.0, 1)}


def test_what_others_measured_is_taken_from_who_waited_for_them(clock):
    times = Times()
    with times.at("executor"):
        clock.now += 10
    times.merge({"runner": (6.0, 3), "sampler": (1.0, 1)}, within="executor")
    table = times.table()
    assert {name: (row["seconds"], row["calls"]) for name, row in table.items()} == {
        "runner": (6.0, 3),
        "executor": (3.0, 1),
        "sampler": (1.0, 1),
    }
    assert [row["share"] for row in table.values()] == [0.6, 0.3, 0.1]


def test_what_ran_beside_makes_nobodys_time_negative(clock):
    times = Times()
    with times.at("executor"):
        clock.now += 1
    times.merge({"runner": (5.0, 1)}, within="executor")
    assert times.table()["executor"]["seconds"] == 0.0
    assert Times().table() == {}


# --- an engine's ------------------------------------------------------------------------------------------------------


class Guesses(Drafter):
    def propose(self, requests):
        time.sleep(0.002)
        return [Draft((7,)) for _ in requests]


class Slow(LogitsProcessor):
    def open(self, params, num_prompt):
        return self

    def process(self, token_ids, logits_V):
        time.sleep(0.003)


def slow_plugin():
    def offers(cls):
        return hookimpl(
            lambda: [Provider(key="slow", summary="s", build=lambda context: cls(), fit=lambda context: Fit(0))]
        )

    watch = hookimpl(lambda seconds: time.sleep(0.001))
    return types.SimpleNamespace(
        provide_drafters=offers(Guesses), provide_logits_processors=offers(Slow), step_finished=watch
    )


def test_every_part_that_a_step_calls_has_its_own_row_and_the_shares_are_the_whole(model):
    sections = {"drafter": "slow", "logits_processors": ["slow"], "attention": "sdpa", "runner": "eager"}
    with engine_of(model, plugins={"slow": slow_plugin()}, **sections) as engine:
        begun = time.perf_counter()
        engine.generate([[1, 2, 3]], PARAMS)
        took = time.perf_counter() - begun
        stats = engine.stats()
    table, steps = stats["time"], stats["steps"]
    keys = {
        "scheduler.inflight",
        "cache.paged",
        "executor.local",
        "runner.eager",
        "attention.sdpa",
        "drafter.slow",
        "logits_processors.slow",
        "core.sampler",
        "core.loop",
        "observer.slow",
    }
    assert set(table) == keys
    assert all(set(row) == {"seconds", "calls", "share"} and row["seconds"] >= 0 for row in table.values())
    assert sum(row["share"] for row in table.values()) == pytest.approx(1)
    whole = sum(row["seconds"] for row in table.values())
    # Nothing is counted twice, and little is not counted; other processes may take the core anywhere.
    assert 0.5 * took < whole < took + 0.05
    # Each sleeps a known time a step, and none of it is another's.
    assert table["observer.slow"]["seconds"] >= 0.001 * steps and table["observer.slow"]["calls"] == steps
    # The last steps want no drafts.
    assert table["drafter.slow"]["seconds"] >= 0.002 * (steps - 3)
    assert table["logits_processors.slow"]["seconds"] >= 0.003 * steps
    assert list(table.values()) == sorted(table.values(), key=lambda row: -row["seconds"])


def test_an_executor_that_says_nothing_of_its_parts_has_all_the_time_itself(model):
    class Silent:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def collect(self):
            return attrs.evolve(self.inner.collect(), spent={})

    with engine_of(model) as engine:
        engine.parts = attrs.evolve(engine.parts, executor=Silent(engine.parts.executor))
        engine.generate([[1, 2, 3]], PARAMS)
        stats = engine.stats()
    assert not any(name.startswith(("runner.", "core.sampler")) for name in stats["time"])
    assert stats["time"]["executor.local"]["calls"] >= 2 * stats["steps"]


def test_loading_and_warming_up_are_no_part_of_it(model):
    with engine_of(model) as engine:
        assert not any(name.startswith(("executor.", "runner.", "core.")) for name in engine.stats()["time"])


def test_a_span_costs_a_few_microseconds_at_most():
    times = Times()
    best = float("inf")
    for _ in range(20):
        begun = time.thread_time()
        for _ in range(500):
            with times.at("a"):
                pass
        best = min(best, (time.thread_time() - begun) / 500)
    # About a dozen of them are in a step; idle cores take half a microsecond for one.
    assert best < 5e-6
