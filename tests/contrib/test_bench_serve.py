"""`intarsia bench serve`: what is measured is what is said. Nothing here asks how fast it is."""

import asyncio
import json
import time

import pytest

from engines import engine_of
from intarsia.cli import run as cli
from intarsia.errors import ExecutionError
from intarsia_bench.peers import workloads
from intarsia_bench.served import ServedEngine
from intarsia_bench.serving import Neighbour, Served, Sizes, _check, _stream, first_tokens, neighbour_rates, spread
from intarsia_zmq import Client
from serving import FakeEngine, eventually, serving

SMALL = ["-o", "cache.memory='256MiB'", "-o", "engine.dtype=float32", "-o", "engine.threads=1"]


def quiet(*_):
    pass


def test_streams_are_all_read_at_once_and_to_the_last_token(tmp_path):
    engine = FakeEngine(step_s=0.001)
    with serving(tmp_path, engine, bind="tcp://127.0.0.1:*") as running:
        begun = time.perf_counter()
        assert 0 < asyncio.run(_stream(running.address, 7, 20)) < time.perf_counter() - begun
        assert 20 <= engine.steps < 7 * 20
    with pytest.raises(ExecutionError, match="5 tokens came, and 7 were asked for"):
        _check([2, 3], [2, 5])


def test_a_served_composition_is_measured_as_its_client_sees_it(tmp_path):
    with serving(tmp_path, FakeEngine(), bind="tcp://127.0.0.1:*") as running:
        server = ServedEngine(None, running.address)
        measured = Served("server", server).measure("mixed", 1)
        work = workloads.work("mixed", 1)
        assert len(measured.latencies.ttft) == len(measured.latencies.e2e) == len(work)
        assert len(measured.latencies.itl) == sum(n - 1 for _, n in work)
        assert max(measured.latencies.e2e) <= measured.seconds


def test_first_tokens_are_those_of_prompts_that_no_cache_has(tmp_path, model):
    prompts = []
    asked = FakeEngine(step_s=0.3)
    add = asked.add
    asked.add = lambda request: (prompts.append(tuple(request.prompt)), add(request))[1]
    with (
        engine_of(model) as engine,
        serving(tmp_path, asked, bind="tcp://127.0.0.1:*") as running,
    ):
        here, there = first_tokens(engine, running.address, 3, quiet)
        assert len({prompt[0] for prompt in prompts}) == len(prompts) == 3
        assert {len(prompt) for prompt in prompts} == {64} and not engine.has_work
    assert (here["engine"], here["over_s"]) == ("in-process", 0)
    # One step comes before the first token, and two more after it.
    assert 0.3 <= there["ttft_s"] < 0.6
    assert there["over_s"] == pytest.approx(there["ttft_s"] - here["ttft_s"], abs=1e-5)


def test_a_neighbours_rate_is_of_the_time_that_it_is_watched(tmp_path):
    engine = FakeEngine(step_s=0.005)
    with (
        serving(tmp_path, engine, bind="tcp://127.0.0.1:*") as running,
        Client(running.address, timeout_s=10) as client,
    ):
        neighbour = Neighbour(client)
        eventually(lambda: neighbour.count > 0)
        assert 20 < neighbour.rate(lambda: time.sleep(0.5)) <= 210
        engine.may_step.clear()
        time.sleep(0.3)
        assert neighbour.rate(lambda: time.sleep(0.2)) == 0
        engine.may_step.set()
        neighbour.close()
        eventually(lambda: not engine.has_work)


def test_the_figure_is_the_median():
    assert spread([3, 1, 2]) == {"tokens_per_s": 2, "min_tokens_per_s": 1, "max_tokens_per_s": 3}


def test_a_server_that_does_not_start_is_named_by_its_last_words():
    with pytest.raises(ExecutionError, match=r"exit code 2.*no-such-model"):
        ServedEngine.of(["-m", "no-such-model"])


def test_neighbours_are_watched_in_every_repeat():
    alone, stopped, crowd = neighbour_rates(Sizes(repeats=2, seconds=0.3, visits=3, step_s=0.005), quiet)
    assert [row["beside"] for row in (alone, stopped, crowd)] == ["alone", "a client is stopped", "clients come and go"]
    assert alone["ratio"] == alone["worst_ratio"] == 1
    for row in (alone, stopped, crowd):
        assert 0 < row["min_tokens_per_s"] <= row["tokens_per_s"] <= row["max_tokens_per_s"] <= 220
        assert 0 < row["worst_ratio"] <= row["ratio"]


@pytest.mark.slow
def test_the_command_prints_json_and_tables(model, capsys):
    asked = ["bench", "serve", "-m", model, "--streams", "1", "--streams", "3", "--repeat", "1", "--tokens", "60"]
    asked += ["--seconds", "0.2", "--visits", "2", *SMALL]
    assert cli([*asked, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert list(measured) == ["streams", "mixed", "ttft", "neighbour"]
    assert [row["streams"] for row in measured["streams"]] == [1, 3]
    assert [row["engine"] for row in measured["mixed"]] == ["in-process", "server"]
    server = measured["mixed"][1]
    assert server["ratio"] == pytest.approx(server["tokens_per_s"] / measured["mixed"][0]["tokens_per_s"], abs=0.01)
    assert cli(asked) == 0
    shown = capsys.readouterr().out
    assert "over in-process" in shown and "clients come and go" in shown and "medians of 1 repeats" in shown
