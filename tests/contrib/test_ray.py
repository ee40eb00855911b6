"""Replicas on a Ray cluster: what is placed, what the router is told, and that clients see nothing of a restart."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from intarsia.errors import ConfigError, ExecutionError
from intarsia.types import SamplingParams
from intarsia_ray.plan import Plan
from intarsia_ray.watch import Watch
from intarsia_zmq import Client
from intarsia_zmq.calls import ConnectionLostError
from intarsia_zmq.options import RouteOptions, ZmqOptions
from routing import listed
from server_process import tiny_model
from serving import Running, eventually

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason='RAY IS NOT INSTALLED: pip install "intarsia[ray]"')

# --- without Ray ------------------------------------------------------------------------------------------------------


def test_a_plan_sets_aside_what_all_ranks_of_a_replica_take():
    plan = Plan(config={"model": "x", "frontend": [{"use": "zmq"}]}, replicas=2, tp=4, cpus=1.5, gpus=1)
    assert plan.resources == {"CPU": 6.0, "GPU": 4}
    assert plan.engine_config == {"model": "x", "executor": {"use": "parallel", "tp": 4}}
    assert Plan(config={"model": "x"}).resources == {"CPU": 1}
    staged = Plan(config={"model": "x", "executor": {"use": "parallel", "pp": 2}}, tp=2)
    assert staged.engine_config["executor"] == {"use": "parallel", "pp": 2, "tp": 2}
    assert staged.resources == {"CPU": 4}


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"replicas": 0}, "replicas"),
        ({"tp": -1}, "tp"),
        ({"cpus": 0}, "cpus"),
        ({"cpus": float("nan")}, "cpus"),
        ({"gpus": -1}, "gpus"),
        ({"tp": 2, "config": {"executor": {"use": "parallel", "tp": 3}}}, "tp"),
        ({"tp": 2, "config": {"executor": {"use": "local"}}}, "tp"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(said, field):
    with pytest.raises(ConfigError) as caught:
        Plan(**{"config": {}} | said)
    assert caught.value.field == field


class Scripted:
    """An actor that says what it is told."""

    def __init__(self, *states):
        self.states, self.restarts = list(states), 0

    def poll(self):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def restart(self):
        self.restarts += 1


def at(address, error=None, started=True):
    return {"address": address, "error": error, "started": started and error is None}


@contextmanager
def watched(*actors):
    told, stopped, now = [], [], [0.0]
    watch = Watch(
        actors=actors,
        tell=lambda kind, address: told.append((kind, address)),
        stop=lambda: stopped.append(True),
        clock=lambda: now[0],
    )
    yield watch, told, stopped, now


def test_replicas_are_added_as_they_come_and_moved_as_they_return_elsewhere():
    with watched(Scripted(None, at("a"), at("a"), None, at("c")), Scripted(at("b"))) as (watch, told, _, _):
        for _ in range(6):
            watch.look()
        assert told == [
            ("add_replica", "b"),
            ("add_replica", "a"),
            ("add_replica", "c"),
            ("remove_replica", "a"),
        ]


def test_what_the_router_did_not_take_is_told_again():
    with watched(Scripted(at("a"))) as (watch, told, _, _):
        tell, watch.tell = watch.tell, lambda kind, address: (_ for _ in ()).throw(ConnectionLostError("no answer"))
        watch.look()
        watch.tell = tell
        watch.look()
        watch.look()
        assert told == [("add_replica", "a")]


def test_where_no_replica_ever_serves_the_router_ends_with_the_reason():
    wrong = at("a", "ConfigError: model: none is named")
    loading = at("a", started=False)
    with watched(Scripted(None, loading, wrong), Scripted(wrong)) as (watch, _, stopped, _):
        watch.look()
        watch.look()
        assert not stopped
        watch.look()
        assert stopped and isinstance(watch.failure, ExecutionError) and "none is named" in str(watch.failure)


def test_a_replica_that_fails_later_is_begun_anew_after_a_while():
    actor = Scripted(at("a"), at("a", "it broke"))
    with watched(actor) as (watch, _, stopped, now):
        watch.look()
        for second in (0, 5, 9):
            now[0] = second
            watch.look()
        assert actor.restarts == 0
        now[0] = 10.0
        watch.look()
        assert actor.restarts == 1 and not stopped


def test_without_ray_the_command_says_what_to_install(monkeypatch, capsys, tmp_path):
    from intarsia.cli import run
    from intarsia_ray import cluster

    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert run(["ray", "-m", str(tmp_path)]) == 2
    assert "intarsia[ray]" in capsys.readouterr().err


# --- with Ray ---------------------------------------------------------------------------------------------------------

SAMPLED = SamplingParams(max_tokens=600, temperature=1.0, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def local_ray():
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    yield ray
    ray.shutdown()


@contextmanager
def cluster(tmp_path, model, **said):
    """Serve on the local Ray; yield the router in a thread, and the actors."""
    from intarsia_ray.cluster import Cluster

    config = {
        "model": str(model),
        "engine": {"dtype": "float32", "threads": 1},
        "cache": {"memory": "64MiB"},
    }
    options = ZmqOptions(bind=f"ipc://{tmp_path}/front", control=f"ipc://{tmp_path}/control")
    route = RouteOptions(lost_after_s=2.0, wait_s=60.0)
    made = Cluster.open(Plan(config=config, **said), options, route, name="tiny")
    made.watch.start()
    running = Running(made.server)
    running.thread.start()
    try:
        eventually(lambda: len(usable(running)) == len(made.actors), 120)
        yield running, made.actors
    finally:
        running.control("shutdown", now=True)
        running.join()
        made.close()


def usable(running):
    return [address for address, line in listed(running).items() if line["state"] == "ready"]


def expected(model, prompt):
    from engines import engine_of

    with engine_of(model) as engine:
        (made,) = engine.generate([prompt], SAMPLED)
    return made.token_ids


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_replica_is_restarted_by_ray_and_its_streams_go_on_meanwhile(tmp_path, model, local_ray):
    answer = expected(model, [5, 6, 7])
    with cluster(tmp_path, model, replicas=2, cpus=0.5) as (router, actors), Client(router.address) as client:
        before = set(usable(router))
        streams = [client.stream([5, 6, 7], SAMPLED) for _ in range(4)]
        got = [list(next(stream).token_ids) for stream in streams]
        pids = local_ray.get([actor.handle.pid.remote() for actor in actors])
        addresses = [actor.poll_until()["address"] for actor in map(Patiently, actors)]
        busiest = max(listed(router).values(), key=lambda line: line["in_flight"])["replica"]
        os.kill(pids[addresses.index(busiest)], signal.SIGKILL)
        for each, stream in zip(got, streams, strict=True):
            each += [token for output in stream for token in output.token_ids]
        assert [tuple(each) for each in got] == [answer] * 4
        eventually(lambda: len(usable(router)) == 2 and set(usable(router)) != before, 120)
        assert busiest not in usable(router) and len(listed(router)) == 2
        assert client.generate([5, 6, 7], SAMPLED).token_ids == answer


class Patiently:
    """Asks an actor until it answers."""

    def __init__(self, actor):
        self.actor = actor

    def poll_until(self):
        found = []
        eventually(lambda: found.append(self.actor.poll()) or found[-1], 30)
        return found[-1]


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_of_two_ranks_takes_a_placement_group_and_answers_as_one(tmp_path, model, local_ray):
    answer = expected(model, [5, 6, 7])
    with cluster(tmp_path, model, tp=2, cpus=1) as (router, actors), Client(router.address) as client:
        assert actors[0].group is not None
        assert client.generate([5, 6, 7], SAMPLED).token_ids == answer


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_config_that_no_engine_can_be_made_of_ends_the_command_with_its_reason(tmp_path, local_ray):
    from intarsia_ray.cluster import Cluster

    options = ZmqOptions(bind=f"ipc://{tmp_path}/front", control="")
    made = Cluster.open(Plan(config={"model": str(tmp_path / "nothing")}, cpus=0.5), options, name="nothing")
    with pytest.raises(ExecutionError, match="no replica can serve"):
        made.serve()
