"""The control socket, and events."""

import asyncio
import threading
import time

import msgpack
import pytest
import zmq

from intarsia import Engine, SamplingParams
from intarsia.errors import CompositionError, ConfigError, PluginError
from intarsia_zmq import AsyncClient, AsyncControlClient, ControlClient
from intarsia_zmq.frontend import places_of
from intarsia_zmq.options import Limits, ZmqOptions
from server_process import tiny_model
from serving import FakeEngine, Peer, eventually, serving


def test_a_pause_stops_steps_and_nothing_else(tmp_path):
    engine = FakeEngine(step_s=0.005)
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=60)
        peer.next()
        assert running.control("pause").body["state"] == "paused"
        time.sleep(0.1)
        steps = engine.steps
        while not peer.quiet(0.1):
            peer.next()
        assert peer.ask("ping").body["state"] == "paused" and peer.ask("tokenize", text="a").kind == "tokens"
        peer.generate("later", max_tokens=2)
        time.sleep(0.1)
        assert engine.steps == steps
        assert running.control("resume").body["state"] == "ready"
        assert peer.until_end("r")[2].kind == "done"


def test_a_drain_takes_nothing_new_and_finishes_what_runs_and_can_be_resumed(tmp_path):
    engine = FakeEngine(step_s=0.01)
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=30)
        peer.next()
        assert running.control("drain").body["state"] == "draining"
        peer.generate("new")
        refused = next(m for m in iter(peer.next, None) if m.kind == "error")
        assert (refused.id, refused.body["code"]) == ("new", "draining")
        assert running.control("pause").body["code"] == "invalid"
        assert peer.until_end()[2].body["choices"][0]["finish_reason"] == "length"
        assert running.control("resume").body["state"] == "ready"
        peer.generate("new", max_tokens=2)
        assert peer.until_end("new")[1] == [0, 1]


def test_a_shutdown_lets_clients_read_to_the_end(tmp_path):
    engine = FakeEngine(step_s=0.005)
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=40, credit=5)
        assert running.control("pause").body["state"] == "paused"
        assert running.control("shutdown").body["state"] == "draining"  # which ends the pause
        eventually(lambda: engine.steps >= 40)
        time.sleep(0.1)
        assert running.thread.is_alive()
        peer.send("credit", "r", received=0, upto=1000)
        assert peer.until_end()[1] == list(range(40))
        assert running.join() is None and engine.closed


def test_a_client_that_does_not_read_keeps_a_shutdown_only_so_long(tmp_path):
    with serving(tmp_path, drain_timeout_s=0.3) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=40, credit=1)
        peer.next()
        running.control("shutdown")
        assert running.join(5) is None


def test_a_shutdown_now_finishes_nothing(tmp_path):
    engine = FakeEngine(step_s=0.01)
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=10**6)
        peer.next()
        assert running.control("shutdown", now="yes").body["code"] == "invalid"
        begun = time.monotonic()
        running.control("shutdown", now=True)
        assert running.join(3) is None and time.monotonic() - begun < 3 and engine.closed


def test_a_reload_applies_what_is_safe_and_names_what_needs_a_restart(tmp_path):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        options = {
            "stall_timeout_s": 5,
            "bind": "tcp://*:1",
            "log_level": "warning",
            "limits": {"requests": 1, "credit": 3},
        }
        reloaded = running.control("reload", options=options)
        assert reloaded.kind == "reloaded"
        assert reloaded.body["applied"] == ["stall_timeout_s", "log_level", "limits.requests"]
        assert reloaded.body["restart"] == ["bind", "limits.credit"]
        running.control("pause")
        for name in ("a", "b"):
            peer.generate(name)
        refused = peer.next()
        assert (refused.id, refused.body["code"]) == ("b", "overloaded")
        bad = running.control("reload", options={"grace_s": 1, "limits": {"requests": 0}})
        assert bad.body["code"] == "invalid" and bad.body["field"] == "options.limits.requests"
        assert running.server._dispatch.sessions.limits.grace_s == 0.5


def swap(running, slot="scheduler", use="static", **more):
    return running.control("swap", slot=slot, use=use, **more)


def test_a_swap_is_done_between_steps_and_clients_are_told_of_the_engine_that_runs(tmp_path):
    engine = FakeEngine(step_s=0.005)
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        eventually(lambda: running.control("status").body["state"] == "ready")
        peer.generate(max_tokens=60)
        peer.next()
        done = swap(running)
        assert done.kind == "swapped"
        assert done.body | {"sequences": 1} == {
            "slot": "scheduler",
            "before": "inflight",
            "after": "static",
            "time": 1.5,
            "seconds": 0.25,
            "sequences": 1,
            "kept": 0,
        }
        assert peer.until_end("r")[1][-1] == 59
        explained = peer.ask("explain").body
        assert (explained["hash"], explained["parts"]["scheduler"]["key"]) == ("def", "static")
        with Peer(running.address, hello=True) as later:
            assert later.welcome.body["composition"] == {"hash": "def"}


@pytest.mark.parametrize(
    ("asked", "code", "field"),
    [
        ({"slot": 3}, "invalid", "slot"),
        ({"use": None}, "invalid", "use"),
        ({"options": [1]}, "invalid", "options"),
        ({"slot": "cache"}, "composition", "cache"),
        ({"use": "broken"}, "plugin", "scheduler"),
        ({"options": {"x": 1}}, "config", "scheduler.x"),
        ({"use": "a bug"}, "internal", None),
    ],
)
def test_a_swap_that_is_refused_says_why_and_changes_nothing(tmp_path, asked, code, field):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        eventually(lambda: running.control("status").body["state"] == "ready")
        refused = swap(running, **asked)
        assert (refused.kind, refused.body["code"], refused.body["field"]) == ("error", code, field)
        assert "secret" not in refused.body["message"]
        assert peer.ask("explain").body["hash"] == "abc"
        assert swap(running).kind == "swapped", "the next one is free to come"


def test_one_swap_is_under_way_at_a_time_and_holds_up_no_other_question(tmp_path):
    engine = FakeEngine()
    with serving(tmp_path, engine) as running:
        eventually(lambda: running.control("status").body["state"] == "ready")
        engine.may_swap.clear()
        with Peer(running.server.addresses["control"]) as first:
            first.send("swap", "1", slot="scheduler", use="static")
            eventually(lambda: swap(running).body.get("code") == "overloaded")
            assert running.control("status").kind == "status"
            engine.may_swap.set()
            assert first.next().body["after"] == "static"


def test_a_swap_before_the_engine_is_there_is_told_to_come_again_and_works_in_a_pause(tmp_path):
    may_start = threading.Event()

    def start():
        may_start.wait(10)
        return FakeEngine()

    with serving(tmp_path, start) as running:
        assert swap(running).body["code"] == "overloaded"
        may_start.set()
        eventually(lambda: running.control("status").body["state"] == "ready")
        running.control("pause")
        assert swap(running).kind == "swapped"


def test_whoever_asks_for_a_swap_and_leaves_harms_nobody(tmp_path):
    engine = FakeEngine()
    with serving(tmp_path, engine) as running:
        eventually(lambda: running.control("status").body["state"] == "ready")
        engine.may_swap.clear()
        with Peer(running.server.addresses["control"]) as first:
            first.send("swap", "1", slot="scheduler", use="static")
            eventually(lambda: swap(running).body.get("code") == "overloaded")
        engine.may_swap.set()
        eventually(lambda: engine.scheduler == "static")
        eventually(lambda: swap(running, use="inflight").kind == "swapped")


def test_the_control_clients_ask_and_raise_by_name(tmp_path):
    with serving(tmp_path) as running:
        control = ControlClient(running.server.addresses["control"])
        eventually(lambda: control.status()["state"] == "ready")
        assert control.swap("scheduler", "static")["after"] == "static"
        with pytest.raises(PluginError, match="broken") as raised:
            control.swap("scheduler", "broken")
        assert raised.value.field == "scheduler"
        with pytest.raises(ConfigError, match="unknown option"):
            control.swap("scheduler", "static", {"x": 1})

        async def ask():
            later = AsyncControlClient(control.address)
            with pytest.raises(CompositionError):
                await later.swap("cache", "paged")
            return await later.swap("scheduler", "inflight"), await later.pause(), await later.resume()

        done, paused, resumed = asyncio.run(ask())
        assert (done["after"], paused["state"], resumed["state"]) == ("inflight", "paused", "ready")
        assert control.reload({"grace_s": 2})["applied"] == ["grace_s"]
        assert control.drain()["state"] == "draining" and control.shutdown()["state"] == "draining"
        assert running.join() is None


def test_a_real_engine_swaps_while_clients_stream(tmp_path):
    model = tiny_model(tmp_path)

    def start():
        engine = {"threads": 1, "dtype": "float32", "plugins": {"block": ["cpu"]}}
        parts = {"attention": "tiled", "runner": "eager", "cache": {"memory": "64MiB"}}
        return Engine.from_config({"model": str(model), "engine": engine, **parts})

    async def stream(address, control):
        params = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
        async with AsyncClient(address) as client:
            tasks = [asyncio.create_task(client.generate([5, 6 + i], params)) for i in range(4)]
            while (await client.stats())["engine"]["running"] < 4:
                await asyncio.sleep(0.001)
            choices = [("scheduler", "static"), ("drafter", "ngram"), ("scheduler", "inflight"), ("drafter", "none")]
            done = [await control.swap(slot, use) for slot, use in choices]
            answers = await asyncio.gather(*tasks)
            return done, [answer.token_ids for answer in answers], await client.explain()

    with serving(tmp_path, start) as running:
        control = AsyncControlClient(running.server.addresses["control"])
        eventually(lambda: running.control("status").body["state"] == "ready")
        done, answers, explained = asyncio.run(stream(running.address, control))
        assert done[0]["sequences"] == done[0]["kept"] == 4
        assert [one["after"] for one in done] == ["static", "ngram", "inflight", "none"]
        assert [one["after"] for one in explained["swaps"]] == ["static", "ngram", "inflight", "none"]
        assert [len(ids) for ids in answers] == [600] * 4
        with start() as alone:
            for number, ids in enumerate(answers):
                params = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
                assert alone.generate([[5, 6 + number]], params)[0].token_ids == ids


def test_status_says_whether_steps_end(tmp_path):
    engine = FakeEngine()
    engine.may_step.clear()
    with serving(tmp_path, engine, alive_timeout_s=0.2) as running, Peer(running.address, hello=True) as peer:
        assert running.control("status").body["alive"]
        peer.generate()
        eventually(lambda: not running.control("status").body["alive"])
        engine.may_step.set()
        peer.until_end()
        assert running.control("status").body["alive"]


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5556", "tcp://*:5556", "tcp://192.168.1.1:5556", "tcp://eth0:5556"])
def test_control_beyond_this_machine_is_refused_even_where_insecure_is_said(address):
    with pytest.raises(ConfigError, match=r"frontend\.control"):
        places_of(ZmqOptions(control=address, insecure=True))


# --- events -----------------------------------------------------------------------------------------------------------


def test_events_are_numbered_and_those_that_are_missed_can_be_asked_for(tmp_path):
    with serving(tmp_path, events=f"ipc://{tmp_path}/events", kept_events=50) as running:
        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(running.server.addresses["events"])
        time.sleep(0.2)
        with Peer(running.address, hello=True) as peer:
            peer.generate(max_tokens=5)
            peer.until_end()
            seen = []
            while subscriber.poll(300):
                topic, data = subscriber.recv_multipart()
                message = msgpack.unpackb(data)
                assert message["kind"] == "event" and message["body"]["topic"] == topic.decode()
                seen.append((message["seq"], message["body"]))
            assert [number for number, _ in seen] == list(range(1, len(seen) + 1))
            topics = [body["topic"] for _, body in seen]
            assert topics.count("step") == 5 and topics.count("request") == 2 and topics.count("cache") == 2
            (ended,) = [body for _, body in seen if body.get("event") == "ended"]
            assert ended["finish_reason"] == "length" and "r" not in ended.values()
            replayed = peer.ask("replay", "q", **{"from": 3}).body
            assert replayed["first"] == 1 and replayed["events"] == [body for number, body in seen if number >= 3]
        subscriber.close()


def test_a_subscriber_that_reads_nothing_never_slows_the_engine_and_can_tell_what_it_missed(tmp_path):
    with serving(tmp_path, events=f"ipc://{tmp_path}/events", limits=Limits(output_tokens=10**6)) as running:
        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.linger, subscriber.rcvhwm = 0, 1
        subscriber.subscribe(b"step")
        subscriber.connect(running.server.addresses["events"])
        time.sleep(0.2)
        with Peer(running.address, hello=True) as peer:
            peer.generate(max_tokens=8000, stream=False)
            peer.until_end(timeout_s=20)
            numbers = []
            while subscriber.poll(300):
                numbers.append(msgpack.unpackb(subscriber.recv_multipart()[1])["seq"])
            peer.generate("more", max_tokens=3, stream=False)
            peer.until_end("more")
            assert subscriber.poll(2000)
            assert msgpack.unpackb(subscriber.recv_multipart()[1])["seq"] > 8000 and numbers
        subscriber.close()


def test_replay_without_events_says_so(tmp_path):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        assert peer.ask("replay", "q", **{"from": 1}).body["code"] == "unsupported"
