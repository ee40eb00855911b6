"""The control socket, and events."""

import time

import msgpack
import pytest
import zmq

from intarsia.errors import ConfigError
from intarsia_zmq.frontend import places_of
from intarsia_zmq.options import Limits, ZmqOptions
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
