"""Faults have owners: whatever raises in a part, the part, its plugin, distribution and version are named.

`tests/faulty.py` is installed as the distribution `fake-broken` 9.8, with a part `broken` for every slot.
"""

from __future__ import annotations

import asyncio
import sys

import pytest

import faulty
from intarsia import Engine, Request, SamplingParams
from intarsia.cli import run
from intarsia.errors import ExecutionError, IntarsiaError, InvalidRequestError, OverloadedError, PluginError
from intarsia.executor import LocalExecutor
from models import tiny_llama

OF = "of plugin 'broken' (fake-broken 9.8)"
PARAMS = SamplingParams(max_tokens=4, temperature=0, seed=13, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=1)[0]


@pytest.fixture(autouse=True, scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    info = folder / "fake_broken-9.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-broken\nVersion: 9.8\n")
    (info / "entry_points.txt").write_text("[intarsia]\nbroken = faulty\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faulty.ARMED.clear()


def arm(slot: str, method: str, error: BaseException | None = None) -> None:
    faulty.ARMED[slot, method] = LookupError("my bug") if error is None else error


def made(model, *slots: str) -> Engine:
    """Make an engine with the broken parts of these slots."""
    sections: dict = {}
    source: dict = {"use": str(model)}
    for slot in slots:
        if slot in ("loader", "family"):
            source[slot] = "broken"
        elif slot == "kernels":
            sections[slot] = ["broken", "torch"]
        else:
            sections[slot] = ["broken"] if slot in ("quantizer", "logits_processors") else "broken"
    engine = {"dtype": "float32", "threads": 1, "plugins": {"allow": ["broken", "inflight", "paged"]}}
    cache = {"use": sections.pop("cache", "auto"), "memory": "64MiB"}
    return Engine.from_config({"model": source, "engine": engine, "cache": cache, "runner": "eager"} | sections)


def asked(engine: Engine, *names: str) -> dict[str, list]:
    """Run requests by hand; return their outputs."""
    outputs: dict[str, list] = {}
    for name in names:
        engine.add(Request(request_id=name, prompt=[1, 2, 3], params=PARAMS))
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


# --- what closes the engine -------------------------------------------------------------------------------------------

IN_A_STEP = [
    ("scheduler", "plan", "plan"),
    ("scheduler", "update", "update"),
    ("scheduler", "remove", "remove of request 'a'"),
    ("cache", "reserve", "reserve"),
    ("cache", "commit", "commit of request 'a'"),
    ("cache", "take_moves", "take_moves"),
    ("cache", "release", "release"),
    ("executor", "submit", "a step"),
    ("executor", "collect", "a step"),
    ("attention", "prepare", "prepare"),
    ("attention", "attend", "attend"),
    ("runner", "run", "run"),
    ("runner", "logits", "logits"),
    ("kernels", "silu_mul", "silu_mul"),
]


@pytest.mark.parametrize(("slot", "method", "doing"), IN_A_STEP)
def test_what_fails_in_a_step_is_named_and_closes_the_engine(model, slot, method, doing):
    with made(model, slot) as engine:
        asked(engine, "before")
        arm(slot, method)
        for _ in range(2):
            with pytest.raises(ExecutionError) as caught:
                asked(engine, "a")
            assert f"{slot} 'broken' {OF} failed in {doing}" in str(caught.value)
            assert str(caught.value).endswith("LookupError: my bug")
        faulty.ARMED.clear()
        with pytest.raises(ExecutionError, match="can run nothing more: "):
            asked(engine, "again")


@pytest.mark.parametrize(("slot", "method"), [("scheduler", "plan"), ("cache", "reserve"), ("runner", "run")])
def test_the_first_error_says_whose_it_is_to_programs_too(model, slot, method):
    with made(model, slot) as engine:
        arm(slot, method)
        with pytest.raises(ExecutionError) as caught:
            asked(engine, "a")
        assert caught.value.owner == f"{slot} 'broken' {OF}"
        cause = caught.value
        while cause.__cause__ is not None:
            cause = cause.__cause__
        assert isinstance(cause, LookupError)


def test_of_two_parts_the_inner_one_is_named(model):
    """The allocator fails in a scheduler's plan, and both are of one module."""
    with made(model, "scheduler", "cache", "executor") as engine:
        arm("cache", "reserve")
        with pytest.raises(ExecutionError, match=r"^cache 'broken' .*failed in reserve: LookupError"):
            asked(engine, "a")


def test_an_error_of_intarsias_own_passes_as_it_is_with_its_owner(model):
    error = ExecutionError("the device fell off the bus")
    with made(model, "executor") as engine:
        arm("executor", "collect", error)
        with pytest.raises(ExecutionError) as caught:
            asked(engine, "a")
        assert caught.value is error and str(error) == "the device fell off the bus"
        assert error.owner == f"executor 'broken' {OF}"
        with pytest.raises(ExecutionError, match=r"nothing more: executor 'broken' .*fell off the bus"):
            asked(engine, "b")


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("and not even this")


class PanicException(BaseException):
    """As libraries in Rust have it."""


ODD = [
    (MuteError(), "MuteError: (its __str__ raises RuntimeError)"),
    (ValueError(), "ValueError"),
    (StopIteration(), "StopIteration"),
    (RecursionError("deep"), "RecursionError: deep"),
    (ExceptionGroup("two", [LookupError("x")]), "ExceptionGroup: two (1 sub-exception)"),
    (asyncio.CancelledError(), "CancelledError"),
    (PanicException("in Rust"), "PanicException: in Rust"),
]


@pytest.mark.parametrize(("error", "says"), ODD, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(("slot", "method"), [("scheduler", "plan"), ("runner", "run"), ("cache", "commit")])
def test_whatever_is_raised_in_a_step_is_named(model, slot, method, error, says):
    with made(model, slot) as engine:
        arm(slot, method, error)
        with pytest.raises(ExecutionError) as caught:
            asked(engine, "a")
        assert f"{slot} 'broken' {OF} failed in {method}" in str(caught.value) and str(caught.value).endswith(says)
        with pytest.raises(ExecutionError, match="nothing more"):
            asked(engine, "b")


def test_an_interrupted_wait_for_a_step_loses_none(model, monkeypatch):
    collect, calls = LocalExecutor.collect, []

    def interrupted(executor):
        calls.append(executor)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return collect(executor)

    with made(model) as engine:
        expected = [token for output in asked(engine, "before")["before"] for token in output.token_ids]
        monkeypatch.setattr(LocalExecutor, "collect", interrupted)
        engine.add(Request(request_id="a", prompt=[1, 2, 3], params=PARAMS))
        outputs = engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while engine.has_work:
            outputs += engine.step()
        assert [token for output in outputs for token in output.token_ids] == expected


@pytest.mark.parametrize("slot, method", [("scheduler", "plan"), ("cache", "commit"), ("runner", "run")])
def test_an_interrupt_passes_untouched(model, slot, method):
    with made(model, slot) as engine:
        arm(slot, method, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            asked(engine, "a")


# --- what ends one request --------------------------------------------------------------------------------------------

FOR_A_REQUEST = [
    ("scheduler", "add", PluginError, f"scheduler 'broken' {OF} failed in add of request 'a': LookupError: my bug"),
    ("cache", "capacity", PluginError, f"cache 'broken' {OF} failed in capacity of request 'a': LookupError: my bug"),
    ("logits_processors", "applies", InvalidRequestError, f"'broken' {OF} failed in applies: LookupError: my bug"),
    ("logits_processors", "prepare", InvalidRequestError, f"'broken' {OF} failed in prepare: LookupError: my bug"),
]


@pytest.mark.parametrize(("slot", "method", "error_class", "says"), FOR_A_REQUEST)
def test_what_fails_for_a_request_is_named_and_ends_that_alone(model, slot, method, error_class, says):
    with made(model, slot) as engine:
        expected = [output.token_ids for output in asked(engine, "before")["before"]]
        arm(slot, method)
        with pytest.raises(error_class) as caught:
            asked(engine, "a")
        assert says in str(caught.value)
        faulty.ARMED.clear()
        assert [output.token_ids for output in asked(engine, "a")["a"]] == expected
        assert engine.stats()["waiting"] == engine.stats()["running"] == 0


@pytest.mark.parametrize("method", ["open", "process"])
def test_a_logits_processor_that_fails_ends_its_request_and_no_other(model, method):
    with made(model, "logits_processors") as engine:
        engine.add(Request(request_id="other", prompt=[1, 2, 3], params=SamplingParams(max_tokens=4, temperature=0)))
        if method == "process":
            asked_for = asked(engine, "first")
            assert asked_for["first"][-1].finish_reason == "length"
        arm("logits_processors", method)
        (output,) = asked(engine, "a")["a"]
        assert output.finish_reason == "error"
        assert output.error == f"logits_processors 'broken' {OF} failed in {method}: LookupError: my bug"
        faulty.ARMED.clear()
        assert asked(engine, "a")["a"][-1].finish_reason == "length"


@pytest.mark.parametrize("error", [PanicException("in Rust"), asyncio.CancelledError(), MuteError()])
def test_whatever_a_processor_or_a_drafter_raises_ends_no_other_request(model, error):
    with made(model, "logits_processors", "drafter") as engine:
        for method in ("open", "process"):
            faulty.ARMED.clear()
            arm("logits_processors", method, error)
            arm("drafter", "propose", error)
            other = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            engine.add(Request(request_id="other", prompt=[1, 2, 3], params=other))
            outputs = asked(engine, "a")
            assert outputs["a"][-1].error.startswith(f"logits_processors 'broken' {OF} failed in {method}: ")
            assert outputs["other"][-1].finish_reason == "length"
        assert type(error).__name__ in engine.stats()["speculation"]["last_failure"]
        arm("logits_processors", "applies", error)
        with pytest.raises(InvalidRequestError, match=f"failed in applies: {type(error).__name__}"):
            asked(engine, "b")


def test_a_drafter_that_fails_is_named_and_ends_nothing(model, caplog):
    with made(model, "drafter") as engine:
        arm("drafter", "propose")
        assert asked(engine, "a")["a"][-1].finish_reason == "length"
        says = f"drafter 'broken' {OF} failed in propose: LookupError: my bug"
        assert engine.stats()["speculation"]["last_failure"] == says
    assert says in caplog.text


def test_a_full_queue_is_no_fault(model):
    error = OverloadedError("full", retry_after_s=2.0)
    with made(model, "scheduler") as engine:
        arm("scheduler", "add", error)
        with pytest.raises(OverloadedError) as caught:
            asked(engine, "a")
        assert caught.value is error


@pytest.mark.parametrize(
    ("slot", "method", "doing"),
    [("scheduler", "num_waiting", "num_waiting or num_running"), ("cache", "stats", "stats")],
)
def test_figures_that_fail_are_named_and_the_engine_goes_on(model, slot, method, doing):
    with made(model, slot) as engine:
        arm(slot, method)
        with pytest.raises(PluginError, match="my bug") as caught:
            engine.stats()
        assert f"{slot} 'broken' {OF} failed in {doing}" in str(caught.value)
        faulty.ARMED.clear()
        assert asked(engine, "a")["a"][-1].finish_reason == "length"


# --- what ends a start ------------------------------------------------------------------------------------------------

AT_THE_START = [
    ("loader", "open", "open"),
    ("loader", "read", "read"),
    ("family", "spec", "spec"),
    ("quantizer", "quantize", "quantize"),
    ("kernels", "kernels", "kernels"),
    ("attention", "invariance", "invariance"),
    ("cache", "capacity", "capacity"),
    ("runner", "run", "run"),
    ("drafter", "start", "start"),
    ("executor", "start", "start"),
]


@pytest.mark.parametrize(("slot", "method", "doing"), AT_THE_START)
def test_what_fails_at_the_start_is_named(model, slot, method, doing):
    arm(slot, method)
    with pytest.raises(IntarsiaError) as caught:
        made(model, slot)
    said = str(caught.value)
    assert "'broken' (fake-broken 9.8)" in said and f"{slot} 'broken'" in said
    assert "failed in " in said and doing in said and "LookupError: my bug" in said


def test_a_start_that_fails_is_told_even_where_the_stop_fails_too(model):
    arm("executor", "start")
    arm("executor", "stop", RuntimeError("and this"))
    with pytest.raises(PluginError, match="failed in start: LookupError: my bug"):
        made(model, "executor")


def test_an_executor_that_does_not_stop_is_named(model):
    engine = made(model, "executor")
    arm("executor", "stop")
    with pytest.raises(PluginError, match=r"executor 'broken' .*failed in stop: LookupError: my bug"):
        engine.close()
    faulty.ARMED.clear()
    engine.close()


# --- ways in ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "method", "command"),
    [("frontend", "serve", ["serve", "-m", "MODEL", "-o", "frontend=broken"]), ("commands", "run", ["broken"])],
)
def test_a_way_in_that_fails_is_named(model, slot, method, command, capsys):
    assert run([str(model) if word == "MODEL" else word for word in command]) == 0
    arm(slot, method)
    assert run([str(model) if word == "MODEL" else word for word in command]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"{slot} 'broken' {OF} failed in {method}: LookupError: my bug" in said


def test_every_slot_is_tried():
    cases = [*IN_A_STEP, *FOR_A_REQUEST, *AT_THE_START, ("drafter",), ("frontend",), ("commands",)]
    assert {case[0] for case in cases} == set(faulty.OFFERS)
