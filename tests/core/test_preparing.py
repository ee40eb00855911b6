"""Logits processors that are asked when a request comes, and requests that wait for their work."""

import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
from attrs import Factory, define, frozen

from engines import engine_of
from intarsia import Provider, Request, SamplingParams, hookimpl
from intarsia.errors import ExecutionError, InvalidRequestError, OverloadedError
from intarsia.protocols import LogitsProcessor
from models import tiny_llama

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
ASKING = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logits_processors={"slow": {}})


@frozen
class Forces:
    """Lets nothing but id 7 come."""

    def process(self, token_ids, logits_V):
        logits_V[:7] = float("-inf")
        logits_V[8:] = float("-inf")


@define
class Slow(LogitsProcessor):
    """Its work is done when a test says so."""

    futures: list = Factory(list)
    reply: object = None

    def applies(self, params):
        asked = params.logits_processors.get("slow")
        if isinstance(asked, Exception):
            raise asked
        return asked is not None

    def prepare(self, params):
        if callable(self.reply):
            return self.reply()
        self.futures.append(Future())
        return self.futures[-1]

    def open(self, params, num_prompt):
        return Forces()


class Plugin:
    def __init__(self, *parts):
        self.parts = parts

    @hookimpl
    def provide_logits_processors(self):
        keys = ["slow", "slower"]
        return [
            Provider(key=key, summary="waits", build=lambda _, part=part: part)
            for key, part in zip(keys, self.parts, strict=False)
        ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"), layers=1)


@pytest.fixture
def slow():
    return Slow()


@pytest.fixture
def engine(tiny, slow):
    with engine_of(tiny[0], logits_processors=["slow"], plugins={"waiting": Plugin(slow)}) as engine:
        yield engine


def ask(engine, name="a", params=ASKING, **more):
    return engine.add(Request(request_id=name, prompt=[1], params=params, **more))


def run(engine):
    """Step to the end; return the outputs of each request."""
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def is_idle(engine):
    stats = engine.stats()
    return (stats["preparing"], stats["waiting"], stats["running"], engine.has_work) == (0, 0, 0, False)


def test_a_request_waits_for_its_processor_while_the_others_run(engine, slow):
    ask(engine)
    ask(engine, "plain", GREEDY)
    assert (engine.stats()["preparing"], engine.stats()["waiting"]) == (1, 1)
    said = [output for _ in range(4) for output in engine.step()]
    assert {output.request_id for output in said} == {"plain"} and said[-1].finish_reason == "length"
    assert engine.has_work and engine.stats()["preparing"] == 1
    slow.futures[0].set_result(None)
    (outputs,) = run(engine).values()
    assert [token for output in outputs for token in output.token_ids] == [7, 7, 7, 7]
    assert is_idle(engine)


def test_one_request_prepares_once_for_all_its_choices(engine, slow):
    ask(engine, params=SamplingParams(max_tokens=2, n=3, ignore_eos=True, logits_processors={"slow": {}}))
    assert len(slow.futures) == 1 and engine.stats()["preparing"] == 3
    slow.futures[0].set_result(None)
    outputs = run(engine)["a"]
    assert sorted(output.choice for output in outputs if output.finish_reason == "length") == [0, 1, 2]


def test_a_step_with_nothing_to_run_waits_a_little_and_does_not_spin(engine, slow):
    ask(engine)
    begun = time.perf_counter()
    assert engine.step() == [] and engine.step() == []
    assert 0.05 < time.perf_counter() - begun < 2
    assert engine.stats()["steps"] == 0


def test_generate_does_not_spin_while_it_waits_beside_outputs_of_others(engine, slow, monkeypatch):
    ask(engine, "other", SamplingParams(max_tokens=1, ignore_eos=True))
    plans, plan = [], type(engine.parts.scheduler).plan
    monkeypatch.setattr(type(engine.parts.scheduler), "plan", lambda self: plans.append(plan(self)) or plans[-1])
    with ThreadPoolExecutor(1) as pool:
        slow.reply = lambda: pool.submit(time.sleep, 0.3)
        assert engine.generate([[1]], ASKING)[0].token_ids == (7, 7, 7, 7)
    assert len(plans) < 20
    assert run(engine)["other"][-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InvalidRequestError("the grammar has no end"), ["the grammar has no end"]),
        (ValueError("oops"), ["'slow'", "'waiting'", "prepare", "ValueError: oops"]),
        (CancelledError(), ["'slow'", "prepare", "CancelledError"]),
    ],
)
def test_work_that_fails_ends_its_request_alone_with_the_message(engine, slow, error, words):
    ask(engine)
    ask(engine, "plain", GREEDY)
    slow.futures[0].set_exception(error)
    outputs = run(engine)
    (failed,) = outputs["a"]
    assert failed.finish_reason == "error" and failed.token_ids == () and failed.usage.completion_tokens == 0
    assert all(word in failed.error for word in words), failed.error
    if isinstance(error, InvalidRequestError):
        assert failed.error == str(error)
    assert outputs["plain"][-1].finish_reason == "length"
    assert is_idle(engine) and engine.stats()["failed"] == 1


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize(
    "error", [Panic("at the disco"), SystemExit("at the disco"), KeyboardInterrupt("at the disco")]
)
def test_work_that_panics_or_exits_on_its_thread_ends_its_request_alone(engine, slow, error):
    ask(engine)
    ask(engine, "plain", GREEDY)
    slow.futures[0].set_exception(error)
    outputs = run(engine)
    assert (
        outputs["a"][-1].finish_reason == "error" and f"{type(error).__name__}: at the disco" in outputs["a"][-1].error
    )
    assert outputs["plain"][-1].finish_reason == "length" and is_idle(engine)


@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize("error", [InvalidRequestError("no"), KeyError("no")])
def test_generate_and_stream_wait_and_raise_instead(engine, slow, way, error):
    slow.reply = lambda: failing(error)
    ask(engine, "other", GREEDY)
    with pytest.raises(InvalidRequestError, match="no"):
        getattr(engine, way)([1], ASKING)
    assert engine.stats()["prompt_tokens"] == 1, "nothing of it has run"
    assert run(engine)["other"][-1].finish_reason == "length"
    assert is_idle(engine)


def failing(error):
    future = Future()
    future.set_exception(error)
    return future


class Later(Future):
    """Done when it was asked often enough: as if a thread had done it meanwhile."""

    def __init__(self, asks, error=None):
        super().__init__()
        self.asks, self.error = asks, error

    def done(self):
        self.asks -= 1
        if self.asks == 0:
            self.set_exception(self.error) if self.error else self.set_result(None)
        return super().done()


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_generate_and_stream_let_others_run_while_they_wait(engine, slow, way):
    ask(engine, "other", GREEDY)
    slow.reply = lambda: Later(40)
    answered = getattr(engine, way)([1], ASKING)
    assert engine.stats()["finished"] >= 1
    ids = answered[0].token_ids if way == "generate" else tuple(t for o in answered for t in o.token_ids)
    assert ids == (7, 7, 7, 7)
    assert run(engine)["other"][-1].finish_reason == "length"


def test_one_failure_among_many_prompts_comes_before_any_runs(engine, slow):
    replies = iter([Later(5), Later(5, InvalidRequestError("bad grammar")), Later(5)])
    slow.reply = lambda: next(replies)
    with pytest.raises(InvalidRequestError, match="bad grammar"):
        engine.generate([[1], [2], [3]], ASKING)
    assert engine.stats()["steps"] == 0 and is_idle(engine)


def test_cancelling_while_it_prepares_aborts_and_frees_the_id(engine, slow):
    ask(engine)
    ask(engine, "b")
    with pytest.raises(InvalidRequestError, match="in use"):
        ask(engine)
    engine.cancel("a")
    engine.cancel("a")
    outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "abort")]
    ask(engine)
    for future in slow.futures:
        future.set_result(None)
    assert {name: out[-1].finish_reason for name, out in run(engine).items()} == {"a": "length", "b": "length"}
    assert engine.stats()["aborted"] == 1


def test_closing_drops_what_prepares(tiny, slow):
    engine = engine_of(tiny[0], logits_processors=["slow"], plugins={"waiting": Plugin(slow)})
    ask(engine)
    engine.close()
    assert not engine.has_work
    with pytest.raises(ExecutionError, match="closed"):
        engine.step()


def test_what_is_prepared_waits_on_where_the_queue_is_full(tiny, slow):
    scheduler = {"use": "static", "max_batch": 1, "max_waiting": 1}
    plugins = {"waiting": Plugin(slow)}
    with engine_of(tiny[0], scheduler=scheduler, logits_processors=["slow"], plugins=plugins) as engine:
        ask(engine, "running", GREEDY)
        engine.step()
        ask(engine, "waiting", GREEDY)
        with pytest.raises(OverloadedError):
            ask(engine, "refused", GREEDY)
        ask(engine)
        ask(engine, "hopeless", SamplingParams(n=2, logits_processors={"slow": {}}))
        for future in slow.futures:
            future.set_result(None)
        engine.step()
        assert (engine.stats()["preparing"], engine.stats()["waiting"]) == (3, 1)
        outputs = run(engine)
        assert [outputs[name][-1].finish_reason for name in ("running", "waiting", "a")] == ["length"] * 3
        (hopeless,) = {output.error for output in outputs["hopeless"]}
        assert "scheduler.max_waiting" in hopeless
        assert is_idle(engine)


def test_waiting_requests_are_bounded(engine, slow, monkeypatch):
    monkeypatch.setattr("intarsia.preparing._MAX_PREPARING", 2)
    ask(engine, "a")
    ask(engine, "b")
    with pytest.raises(OverloadedError, match="2 sequences wait"):
        ask(engine, "c")
    assert engine.stats()["preparing"] == 2


# --- asked when a request comes ---------------------------------------------------------------------------------------


def test_a_request_that_does_not_ask_is_not_prepared(engine, slow):
    (found,) = engine.generate([[1]], GREEDY)
    assert slow.futures == [] and set(found.token_ids) != {7}


def test_what_a_processor_refuses_is_refused_in_its_words(engine, slow):
    refusal = InvalidRequestError("slow: no such mode", field="sampling.logits_processors.slow.mode")
    with pytest.raises(InvalidRequestError) as caught:
        ask(engine, params=SamplingParams(logits_processors={"slow": refusal}))
    assert caught.value is refusal and is_idle(engine)


@pytest.mark.parametrize("where", ["applies", "prepare", "no future"])
def test_a_processor_that_fails_refuses_the_request_and_is_named(engine, slow, where):
    params = ASKING
    if where == "applies":
        params = SamplingParams(logits_processors={"slow": ZeroDivisionError("oops")})
    elif where == "prepare":
        slow.reply = lambda: 1 // 0
    else:
        slow.reply = lambda: "soon"
    with pytest.raises(InvalidRequestError) as caught:
        ask(engine, params=params)
    doing = "applies" if where == "applies" else "prepare"
    assert all(word in str(caught.value) for word in ("'slow'", "'waiting'", f"failed in {doing}"))
    assert caught.value.field == "sampling.logits_processors" and is_idle(engine)
    assert engine.generate([[1]], GREEDY)


def test_options_for_a_processor_that_is_not_there_are_refused(engine, tiny):
    with pytest.raises(InvalidRequestError, match=r"logits_processors.slw: .*Did you mean 'slow'") as caught:
        ask(engine, params=SamplingParams(logits_processors={"slw": {}}))
    assert caught.value.field == "sampling.logits_processors"
    with (
        engine_of(tiny[0]) as bare,
        pytest.raises(InvalidRequestError, match=r'has none; a config adds it: logits_processors = \["grammar"\]'),
    ):
        bare.generate([[1]], SamplingParams(logits_processors={"grammar": {}}))


def test_a_request_waits_for_the_slowest_of_its_processors_and_fails_with_the_first(tiny):
    first, second = Slow(), Slow()
    plugins = {"waiting": Plugin(first, second)}
    with engine_of(tiny[0], logits_processors=["slow", "slower"], plugins=plugins) as engine:
        ask(engine, "a")
        ask(engine, "b")
        first.futures[0].set_result(None)
        second.futures[1].set_exception(InvalidRequestError("no"))
        outputs = engine.step()
        assert [(o.request_id, o.error) for o in outputs] == [("b", "no")]
        assert engine.stats()["preparing"] == 1
        second.futures[0].set_result(None)
        assert run(engine)["a"][-1].finish_reason == "length"
