"""The server with real sockets: every verb, and clients that do what they should not."""

import os
import pickle
import socket
import stat
import time
from pathlib import Path

import msgpack
import pytest
import zmq

from intarsia.errors import ExecutionError
from intarsia_zmq.router import Router
from intarsia_zmq.wire import Message, encode
from serving import FakeEngine, Peer, eventually, serving


def idle(running):
    """Whether no request, session's text or engine's sequence is left."""
    figures = running.control("status").body
    return figures["in_flight"] == figures["waiting"] == figures["kept_bytes"] == 0 and not running.engine.has_work


# --- what is asked is answered ----------------------------------------------------------------------------------------


def test_a_client_is_welcomed_and_its_request_is_answered_in_numbered_deltas(tmp_path):
    with serving(tmp_path) as running, Peer(running.address) as peer:
        eventually(lambda: running.control("status").body["state"] == "ready")
        welcome = peer.hello()
        assert welcome.body["model"] == {
            "name": "fake",
            "family": "fake",
            "vocab_size": 256,
            "max_model_len": 1 << 20,
            "chat": False,
        }
        assert welcome.body["composition"] == {"hash": "abc"}
        assert len(welcome.body["token"]) == 32 and not welcome.body["resumed"]
        peer.generate(max_tokens=5)
        seqs, ids, last = peer.until_end()
        assert seqs == list(range(1, len(seqs) + 1)) and ids == [0, 1, 2, 3, 4]
        assert last.kind == "done" and last.body["choices"] == [{"index": 0, "finish_reason": "length"}]
        eventually(lambda: idle(running))


def test_every_question_is_answered_under_its_id(tmp_path):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        eventually(lambda: running.control("status").body["state"] == "ready")
        asked = {
            "tokenize": ({"text": "ab"}, "tokens", {"token_ids": [97, 98]}),
            "detokenize": ({"token_ids": [97, 98]}, "text", {"text": "ab"}),
            "explain": ({}, "explained", {"hash": "abc", "model": {"family": "fake"}}),
        }
        for kind, (body, answer, said) in asked.items():
            message = peer.ask(kind, "q-" + kind, **body)
            assert (message.kind, message.id, message.body) == (answer, "q-" + kind, said)
        assert peer.ask("models").body["models"][0]["family"] == "fake"
        figures = peer.ask("stats", "s").body
        assert figures["engine"]["steps"] == 0 and figures["server"]["sessions"] == 1
        pong = peer.ask("ping", n=1, nested={"a": [1]})
        assert pong.body == {"echo": {"n": 1, "nested": {"a": [1]}}, "step_age_s": None, "state": "ready"}
        refused = peer.ask("tokenize", "t", messages=[{"role": "user", "content": "x"}])
        assert (refused.kind, refused.id, refused.body["code"]) == ("error", "t", "invalid")


def test_hello_and_ping_are_answered_while_the_engine_starts_and_requests_wait_for_it(tmp_path):
    import threading

    engine, go = FakeEngine(), threading.Event()

    def start():
        assert go.wait(10)
        return engine

    with serving(tmp_path, start) as running, Peer(running.address) as peer:
        assert peer.hello().body["model"] == {"name": "fake"}
        assert peer.ask("ping").body == {"echo": {}, "step_age_s": None, "state": "starting"}
        assert peer.ask("explain").body["code"] == "overloaded"
        peer.generate()
        assert peer.quiet()
        go.set()
        assert peer.until_end()[1] == [0, 1, 2, 3]


def test_pings_are_answered_in_the_middle_of_a_slow_step_and_say_how_old_it_is(tmp_path):
    engine = FakeEngine(step_s=1.0)
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=2)
        eventually(lambda: peer.ask("ping").body["step_age_s"] is not None)
        begun, slowest, ages = time.monotonic(), 0.0, []
        while time.monotonic() - begun < 0.7:
            at = time.monotonic()
            pong = peer.ask("ping")
            slowest = max(slowest, time.monotonic() - at)
            if pong.kind == "pong":
                ages.append(pong.body["step_age_s"])
            time.sleep(0.02)
        assert slowest < 0.3 and max(ages) > 0.4
        assert peer.until_end()[1] == [0, 1]
        eventually(lambda: peer.ask("ping").body["step_age_s"] is None)


def test_deltas_of_one_step_to_one_client_travel_together(tmp_path):
    engine = FakeEngine()
    engine.may_step.clear()
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        for number in range(10):
            peer.generate(f"r{number}", max_tokens=1)
        eventually(lambda: running.control("status").body["in_flight"] == 10 and len(engine.order) >= 1)
        time.sleep(0.1)
        engine.may_step.set()
        messages = []
        while sum(m.kind == "done" for m in messages) < 10:
            messages.append(peer.next())
        assert running.engine.steps <= 3 and len(messages) == 20


def test_cancel_ends_a_request_wherever_it_is_and_unknown_ids_are_ignored(tmp_path):
    engine = FakeEngine(max_running=1)
    with serving(tmp_path, engine, engine_queue=1) as running, Peer(running.address, hello=True) as peer:
        engine.may_step.clear()
        for name in "abcd":
            peer.generate(name, max_tokens=10**6)
        eventually(lambda: len(engine.order) >= 1)
        for name in ("d", "b", "nobody", "d"):
            peer.send("cancel", name)
        engine.may_step.set()
        for name in ("d", "b"):
            assert peer.until_end(name)[2].body["choices"][0]["finish_reason"] == "abort"
        for name in ("a", "c"):
            peer.send("cancel", name)
        for name in ("a", "c"):
            peer.until_end(name)
        eventually(lambda: idle(running))


def test_a_request_past_its_deadline_ends_with_what_it_has(tmp_path):
    engine = FakeEngine(step_s=0.02)
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        begun = time.monotonic()
        peer.generate(max_tokens=10**6, deadline_s=0.3)
        _, ids, last = peer.until_end()
        assert last.body["choices"][0]["finish_reason"] == "deadline" and len(ids) > 2
        assert 0.25 < time.monotonic() - begun < 1.5
        eventually(lambda: idle(running))


def test_each_choice_ends_once_with_its_last_delta_and_usage_comes_with_the_end_alone(tmp_path):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=6, sampling={"n": 3})
        said = [peer.next()]
        while said[-1].kind != "done":
            said.append(peer.next())
        *deltas, done = said
        for choice in range(3):
            ends = [delta.body.get("finish_reason") for delta in deltas if delta.body["choice"] == choice]
            assert ends[-1] == "length" and set(ends[:-1]) <= {None}
        assert not any("usage" in delta.body for delta in deltas)
        peer.generate("whole", max_tokens=6, sampling={"n": 3}, stream=False)
        assert done.body["usage"] == peer.until_end("whole")[2].body["usage"]
        assert [each["finish_reason"] for each in done.body["choices"]] == ["length"] * 3


def test_what_is_not_streamed_comes_in_one_message(tmp_path):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=300, stream=False, sampling={"n": 2})
        seqs, _, last = peer.until_end()
        assert seqs == [1] and [list(c["token_ids"]) for c in last.body["choices"]] == [list(range(300))] * 2


# --- what goes wrong stays with its request ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", v) for v in (-1, float("nan"), float("inf"))]
    + [("top_p", v) for v in (-1, 2, float("nan"))]
    + [("min_p", 1.5), ("repetition_penalty", 0), ("repetition_penalty", -1), ("presence_penalty", 3), ("top_k", -2)]
    + [("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5)],
)
def test_a_number_out_of_range_is_refused_by_name_before_any_step(tmp_path, field, value):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        peer.send("generate", "bad", prompt="x", sampling={"max_tokens": 4, field: value})
        error = peer.next()
        assert (error.kind, error.id, error.seq) == ("error", "bad", 0)
        assert error.body["code"] == "invalid" and error.body["field"] == f"sampling.{field}"
        assert running.engine.steps == 0
        peer.generate()
        assert peer.until_end()[1] == [0, 1, 2, 3]


def test_what_the_engine_refuses_is_refused_and_its_id_is_free_again(tmp_path):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        for prompt, code in (("refuse me", "invalid"), ("break add", "internal")):
            peer.generate(prompt=prompt)
            error = peer.next()
            assert (error.kind, error.id, error.seq, error.body["code"]) == ("error", "r", 0, code)
            assert "fault in reading" not in error.body["message"]
        peer.generate()
        assert peer.until_end()[1] == [0, 1, 2, 3]
        peer.generate("m", prompt="fail midway")
        _, ids, last = peer.until_end("m")
        assert ids == [0, 1, 2] and last.kind == "done" and last.body["choices"][0]["finish_reason"] == "error"
        eventually(lambda: idle(running))


def test_an_id_in_flight_is_refused_without_harm_and_is_free_after_the_end(tmp_path):
    engine = FakeEngine(step_s=0.02)
    with (
        serving(tmp_path, engine) as running,
        Peer(running.address, hello=True) as one,
        Peer(running.address, hello=True) as other,
    ):
        one.generate("same", max_tokens=20)
        one.generate("same", max_tokens=3)
        one.send("generate", "same", prompt="x", sampling={"temperature": -1})
        other.generate("same", max_tokens=15)
        other.send("cancel", "nothing")
        errors, ids = [], []
        while True:
            message = one.next()
            if message.kind == "error":
                errors.append((message.id, message.body["code"], message.body["field"]))
            ids += message.body.get("token_ids", [])
            if message.kind == "done":
                break
        assert errors == [("", "invalid", "id")] * 2 and ids == list(range(20))
        assert other.until_end("same")[1] == list(range(15))
        one.generate("same", max_tokens=10**6)
        other.send("cancel", "same")  # another client's
        time.sleep(0.2)
        assert running.control("status").body["in_flight"] == 1
        one.send("cancel", "same")
        one.until_end("same")
        one.generate("same", max_tokens=2)
        assert one.until_end("same")[1] == [0, 1]
        for name in ("", "x" * 10_000, "a\nb"):
            one.send("generate", name, prompt="x", sampling={"max_tokens": 1})
            error = one.next()
            assert (error.kind, error.id) == ("error", "") and error.body["code"] in ("invalid", "malformed")
        eventually(lambda: idle(running))


def test_limits_of_one_client_leave_the_others_alone(tmp_path):
    engine = FakeEngine(step_s=0.02)
    limits = {"requests_of_client": 3}
    from intarsia_zmq.options import Limits

    with serving(tmp_path, engine, limits=Limits(**limits)) as running, Peer(running.address, hello=True) as greedy:
        assert greedy.welcome.body["limits"]["requests"] == 3
        for number in range(5):
            greedy.generate(f"r{number}", max_tokens=10)
        refused = {}
        while len(refused) < 2:
            message = greedy.next()
            if message.kind == "error":
                refused[message.id] = message.body
        assert set(refused) == {"r3", "r4"} and all(
            e["code"] == "overloaded" and e["retry_after_s"] > 0 for e in refused.values()
        )
        with Peer(running.address, hello=True) as other:
            other.generate(max_tokens=2)
            assert other.until_end()[1] == [0, 1]


def test_admission_is_fair_between_clients_not_between_requests(tmp_path):
    engine = FakeEngine(max_running=1)
    engine.may_step.clear()
    with (
        serving(tmp_path, engine, engine_queue=1) as running,
        Peer(running.address, hello=True) as crowd,
        Peer(running.address, hello=True) as single,
    ):
        for number in range(40):
            crowd.generate(f"r{number}", max_tokens=400)
        eventually(lambda: running.control("status").body["in_flight"] == 40)
        for number in range(3):
            single.generate(f"s{number}", max_tokens=400)
        eventually(lambda: running.control("status").body["in_flight"] == 43)
        engine.may_step.set()
        for number in range(3):
            single.until_end(f"s{number}", timeout_s=20)
        owners = [key.split("/")[0] for key in engine.order]
        assert max(i for i, owner in enumerate(owners) if owner == "2") <= 10
        for number in range(40):
            crowd.send("cancel", f"r{number}")


# --- slow, lost and returning clients ---------------------------------------------------------------------------------


def test_a_stream_without_credit_waits_alone_and_ends_when_it_waits_too_long(tmp_path):
    with serving(tmp_path, stall_timeout_s=0.6) as running, Peer(running.address, hello=True) as slow:
        slow.generate("slow", max_tokens=10**6, credit=2)
        with Peer(running.address, hello=True) as quick:
            quick.generate(max_tokens=50)
            assert quick.until_end()[1] == list(range(50))
        seqs, _, last = slow.until_end("slow", timeout_s=15)
        assert seqs == [1, 2, 3] and (last.kind, last.body["code"]) == ("error", "slow_reader")
        eventually(lambda: idle(running))


def test_a_client_that_returns_gets_the_rest_once_and_one_that_does_not_is_forgotten(tmp_path):
    engine = FakeEngine(step_s=0.003)
    with serving(tmp_path, engine, grace_s=1.0, heartbeat_s=20.0) as running:
        peer = Peer(running.address, hello=True)
        token = peer.welcome.body["token"]
        peer.generate(max_tokens=300)
        seen, ids = 0, []
        while seen < 10:
            message = peer.next()
            seen = message.seq
            ids += message.body["token_ids"]
        peer.close()
        time.sleep(0.3)
        with Peer(running.address) as again:
            assert again.hello(token=token, received={"r": seen}).body["resumed"]
            assert again.welcome.body["requests"] == ["r"]
            again.send("credit", "r", received=seen, upto=1000)
            seqs, rest, _ = again.until_end()
            assert seqs == list(range(seen + 1, seen + 1 + len(seqs))) and ids + rest == list(range(300))
        gone = Peer(running.address, hello=True)
        gone.generate(max_tokens=10**6, credit=20)
        gone.next()
        while not gone.quiet(0.1):  # it has no credit left: nothing that is sent tells that it is gone
            gone.next()
        gone.close()
        eventually(lambda: running.control("status").body["in_flight"] == 0, 3)
        eventually(lambda: running.control("status").body["sessions"] == 0 and not engine.has_work)
        steps = engine.steps
        time.sleep(0.2)
        assert engine.steps == steps


def test_many_clients_that_come_and_go_leave_nothing_behind(tmp_path):
    engine = FakeEngine(step_s=0.001)
    with serving(tmp_path, engine, grace_s=0.2, heartbeat_s=0.3) as running:
        for number in range(60):
            peer = Peer(running.address)
            peer.send("hello", versions=[1])
            for request in range(3):
                peer.generate(f"r{request}", max_tokens=10**5, sampling={"n": 1 + request}, stream=bool(number % 2))
            if number % 3:
                peer.next()
            if number % 5 == 0:
                peer.send("bye")
            peer.close()
        eventually(lambda: running.control("status").body["sessions"] == 0, 10)
        eventually(lambda: idle(running))
        assert not engine.running and not engine.waiting


def test_an_older_connection_of_a_session_and_what_says_no_hello_have_no_session(tmp_path):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as old, Peer(running.address) as new:
        new.hello(token=old.welcome.body["token"], received={})
        assert new.welcome.body["resumed"]
        assert old.ask("ping").body["code"] == "no_session"
        with Peer(running.address) as silent:
            assert silent.ask("generate", "r", prompt="x").body["code"] == "no_session"
        with Peer(running.address, routing_id=b"mine") as named:
            assert named.ask("hello", versions=[1]).body["code"] == "invalid"
        new.send("bye")
        assert new.ask("ping").body["code"] == "no_session"


def test_a_client_that_reads_nothing_costs_bounded_memory_and_harms_nobody(tmp_path):
    with (
        serving(tmp_path, grace_s=0.3, heartbeat_s=1.0) as running,
        Peer(running.address, hello=True, rcvhwm=1) as deaf,
    ):
        for _ in range(20_000):
            try:
                deaf.socket.send_multipart(encode(Message("ping", "", 0, {"pad": "x" * 2000})), zmq.NOBLOCK)
            except zmq.Again:
                break
        with Peer(running.address, hello=True) as other:
            other.generate()
            assert other.until_end()[1] == [0, 1, 2, 3]


# --- garbage ----------------------------------------------------------------------------------------------------------


def _deep(levels):
    return b"\x81\xa1a" * levels + b"\xc0"


class _Marker:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def garbage(marker):
    good = {"v": 1, "kind": "generate", "id": "x", "body": {"prompt": "x"}}
    pack = msgpack.packb
    return [
        [b""],
        [b"\x45"],
        [pack([1, 2])],
        [pack(good | {"v": 99})],
        [pack(good) + b"trailing"],
        [pack(good)] * 9,
        [b"\xdf" + (10**6).to_bytes(4, "big") + b"".join(pack(f"k{i}") + b"\xc0" for i in range(10**6 // 8))],
        [b"\xdf" + (10**6).to_bytes(4, "big")],
        [_deep(10**5)],
        [b"\x81\xa4kind\xa3\xff\xfe\xfd"],
        [pack({"v": 1, "kind": msgpack.ExtType(1, b"x")})],
        [b"\xc6" + (600 << 20).to_bytes(4, "big") + b"x"],
        [b"\xdb" + (600 << 20).to_bytes(4, "big") + b"x"],
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
        [pickle.dumps(_Marker(marker))],
        [pack({"v": 1, "kind": "no such verb", "id": "control"})],
        [pack({"v": 1, "kind": "done", "id": "control"})],
        [pack({"v": 1, "kind": "generate", "id": "y", "body": {"prompt": 5}})],
        [pack({"v": 1, "kind": "credit", "id": "control", "body": {"received": 10**9, "upto": 10**10}})],
        [pack({"v": 1, "kind": "hello", "body": {"versions": [7]}})],
        [pack({"v": 1, "kind": "hello", "body": {"versions": [1], "token": b"x" * 32}})],
        [pack({"v": 1, "kind": "ping", "body": {"prompt": {"blob": 0, "dtype": "<i4", "n": 1}}}), b"1234", b"12"],
    ]


def test_garbage_on_every_socket_changes_nothing_for_a_running_request(tmp_path):
    engine, marker = FakeEngine(step_s=0.005), str(tmp_path / "marker")
    with serving(tmp_path, engine, bind="tcp://127.0.0.1:*") as running, Peer(running.address, hello=True) as control:
        control.generate("control", max_tokens=200)
        addresses = list(running.server.addresses.values())
        for address in addresses:
            with Peer(address) as silent, Peer(address) as known:
                if address == running.address:
                    known.hello()
                for frames in garbage(marker):
                    silent.send_raw(*frames)
                    known.send_raw(*frames)
                time.sleep(0.2)
        host, port = running.address.removeprefix("tcp://").split(":")
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b"", b"\xff" + b"\0" * 8 + b"\x7f", os.urandom(4096)):
            with socket.create_connection((host, int(port))) as plain:
                plain.sendall(data)
        assert control.until_end("control")[1] == list(range(200))
        with Peer(running.address, hello=True) as after:
            after.generate()
            assert after.until_end()[1] == [0, 1, 2, 3]
        assert not Path(marker).exists()


def test_an_unknown_kind_is_answered_and_a_message_too_large_closes_that_connection_alone(tmp_path):
    from intarsia_zmq.options import Limits

    with serving(tmp_path, limits=Limits(message_bytes=1000)) as running, Peer(running.address, hello=True) as peer:
        error = peer.ask("sing", "s")
        assert (error.kind, error.id, error.body["code"]) == ("error", "s", "unsupported")
        several = encode(Message("ping", "", 0, {}))[0]
        peer.send_raw(several, b"x" * 600, b"x" * 600)  # small frames, and together too much
        assert peer.next().body["code"] == "malformed"
        with Peer(running.address, hello=True) as large:
            large.send_raw(b"x" * 2000)
            assert large.quiet()
        assert peer.ask("ping").kind == "pong"


# --- ends -------------------------------------------------------------------------------------------------------------


def test_an_engine_that_fails_ends_what_is_in_flight_and_the_server_raises(tmp_path):
    engine = FakeEngine(step_s=0.01)
    with serving(tmp_path, engine) as running, Peer(running.address, hello=True) as peer:
        peer.generate(max_tokens=10**6)
        peer.next()
        engine.broken = ExecutionError("the device is gone")
        _, _, last = peer.until_end()
        assert (last.kind, last.body["code"]) == ("error", "execution")
        error = running.join()
        assert isinstance(error, ExecutionError) and "device is gone" in str(error)
        assert engine.closed


def test_an_engine_that_does_not_start_ends_the_server_with_its_reason(tmp_path):
    from intarsia.errors import CheckpointError

    def start():
        raise CheckpointError("the file is cut short")

    with serving(tmp_path, start) as running:
        assert isinstance(running.join(), CheckpointError)


def test_sockets_of_a_default_start_are_local_and_files_are_their_owners(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with serving(tmp_path, bind="tcp://127.0.0.1:*", control="auto") as running:
        assert running.address.startswith("tcp://127.0.0.1:")
        control = running.server.addresses["control"].removeprefix("ipc://")
        assert control.startswith(str(tmp_path)) and stat.S_IMODE(Path(control).stat().st_mode) == 0o600
        assert set(running.server.addresses) == {"data", "control"}
    assert not Path(control).exists()


@pytest.mark.parametrize("place", ["ipc://{}/data", "tcp://127.0.0.1:*"])
def test_a_client_that_floods_and_is_gone_before_it_is_read_harms_nobody(tmp_path, place):
    with zmq.Context() as serving, zmq.Context() as gone:
        router = Router.open(serving, lambda connection: None, message_bytes=1 << 20, heartbeat_s=0.05)
        router.socket.bind(place.format(tmp_path))
        with gone.socket(zmq.DEALER) as socket:
            socket.linger, socket.sndtimeo = 0, 300
            socket.connect(router.socket.last_endpoint)
            with pytest.raises(zmq.Again):  # more than anything on the way has room for
                while True:
                    socket.send(b"x" * 50_000)
        time.sleep(0.3)  # some heartbeats, in the middle of what the server does otherwise
        read = 0
        while router.receive() is not None:
            read += 1
        assert read > 100
        router.socket.close(0)
