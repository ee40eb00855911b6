"""The threaded client against a live socket: streams, cuts, stopped readers and servers, keys, and what is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from intarsia.errors import ConfigError, InvalidRequestError, OverloadedError
from intarsia.types import SamplingParams, TokenLogprobs
from intarsia_zmq.calls import ConnectionLostError
from intarsia_zmq.client import Client
from intarsia_zmq.errors import SlowReaderError
from intarsia_zmq.keys import read_key_pair, read_public_key, write_keys
from intarsia_zmq.limits import ServerLimits, SessionLimits
from proxy import Proxy
from wire_server import MODEL, WireServer, idle

IDLE = {"running": 0, "in flight": 0, "bytes": 0}


@pytest.fixture
def server():
    with WireServer() as one:
        yield one


@pytest.fixture
def client(server):
    with Client(server.address, timeout_s=10) as one:
        yield one


def wait_for(check, seconds=5.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.005)


def ids(outputs):
    return [i for output in outputs for i in output.token_ids]


def free_address():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:0")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)


# --- asking and generating --------------------------------------------------------------------------------------------


def test_questions_have_their_answers(client):
    assert client.tokenize("abc") == [97, 98, 99]
    assert client.detokenize([104, 105]) == "hi" and client.detokenize(list(range(65, 70)) * 100) == "ABCDE" * 100
    assert client.models() == [MODEL] and client.explain() == {"slots": {}}
    assert client.stats()["server"] == {"sessions": 1}
    pong = client.ping()
    assert (pong.state, pong.step_age_s) == ("ready", None) and 0 < pong.round_trip_s < 5


def test_a_prompt_is_answered_by_a_completion_and_a_list_by_a_list_in_its_order(client):
    one = client.generate([5, 3])
    assert (one.text, one.token_ids, one.finish_reason) == ("<5><6><7>", (5, 6, 7), "length")
    assert one.prompt_token_ids == (5, 3) and one.seed == 7 and one.timings.total_s == 0.3 and one.logprobs is None
    many = client.generate([[i, 40 - i] for i in range(40)], SamplingParams(max_tokens=50))
    assert [c.token_ids for c in many] == [tuple(range(i, 40)) for i in range(40)]
    assert client.generate([]) == []
    assert client.generate("text").token_ids == (0, 1, 2) and client.generate(["a", "b"])[1].token_ids == (0, 1, 2)


def test_what_is_asked_for_arrives_as_it_was_said(client, server):
    params = SamplingParams(max_tokens=9, temperature=0.5, stop=["x"], logit_bias={3: 1.5}, n=2)
    client.generate([5, 2], params, priority=3, cache_salt="salt", deadline_s=60)
    (asked,) = server.double.asked
    assert asked.request.params == params and not asked.stream and asked.deadline_s == 60
    assert (asked.request.priority, asked.request.cache_salt) == (3, "salt")


def test_choices_are_kept_apart_in_completions_and_streams(client):
    made = client.generate([5, 3], SamplingParams(n=3))
    assert [c.text for c in made.choices] == ["<5><6><7>"] * 3
    outputs = list(client.stream([5, 3], SamplingParams(n=3)))
    for choice in range(3):
        own = [o for o in outputs if o.choice == choice]
        assert ids(own) == [5, 6, 7] and [o.finish_reason for o in own] == [None, None, "length"]


def test_the_last_output_of_a_stream_has_usage_timings_and_seed_of_the_whole_request(client):
    outputs = list(client.stream([5, 4]))
    assert ids(outputs) == [5, 6, 7, 8]
    assert [o.usage for o in outputs[:-1]] == [None] * (len(outputs) - 1)
    last = outputs[-1]
    assert (last.finish_reason, last.seed, last.usage.prompt_tokens, last.timings.total_s) == ("length", 7, 2, 0.3)


def test_log_probabilities_arrive_where_they_are_asked_for(server):
    """They travel as a stream, and are put together here."""
    double = server.double
    step = double.step

    def with_logprobs():
        deliver = double.sessions.deliver

        def scored(outputs):
            from attrs import evolve

            made = [evolve(o, logprobs=tuple(TokenLogprobs(i, -float(i)) for i in o.token_ids)) for o in outputs]
            if made and made[0].token_ids[0] == 5:
                made[0] = evolve(made[0], prompt_logprobs=(TokenLogprobs(9, -9.0),))
            return deliver(made)

        double.sessions = type("Scored", (), {"deliver": staticmethod(scored), "abandoned": double.sessions.abandoned})
        try:
            return step()
        finally:
            double.sessions = deliver.__self__

    double.step = with_logprobs
    with Client(server.address, timeout_s=10) as client:
        made = client.generate([5, 3], SamplingParams(logprobs=0, prompt_logprobs=0))
    assert [(e.token_id, e.logprob) for e in made.logprobs] == [(5, -5.0), (6, -6.0), (7, -7.0)]
    assert made.prompt_logprobs == (None, TokenLogprobs(9, -9.0))
    assert server.double.asked[0].stream


def test_many_threads_use_one_client(client, server):
    got = {}

    def run(number):
        got[number] = [ids(client.stream([number * 20, 10])) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == {n: [list(range(n * 20, n * 20 + 10))] * 5 for n in range(16)}
    assert server.do(lambda: len(server.double.sessions)) == 1


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_leaving_the_loop_closing_and_forgetting_a_stream_cancel_its_request(client, server):
    for output in client.stream([5, 0]):
        if output.token_ids[0] > 20:
            break
    with client.stream([5, 0]) as stream:
        next(stream)
    assert list(stream) == []
    closed = client.stream([5, 0])
    next(closed)
    closed.close()
    closed.close()
    forgotten = client.stream([5, 0])
    next(forgotten)
    del forgotten
    never_read = client.stream([5, 0])
    del never_read
    gc.collect()
    wait_for(lambda: server.do(lambda: idle(server.double)) == IDLE)
    wait_for(lambda: client._link.connection.is_idle)
    assert client._inboxes == {} and server.double.heard.count("cancel") >= 4


def test_one_prompt_of_a_list_that_is_refused_cancels_the_others(server):
    with Client(server.address, timeout_s=10) as client:
        with pytest.raises(InvalidRequestError, match=r"sampling\.max_tokens"):
            client.generate([[1, 0], [2, 5]], [SamplingParams(), SamplingParams(max_tokens=1 << 25)])
        wait_for(lambda: server.do(lambda: idle(server.double)) == IDLE)
        assert client.generate([1, 2]).token_ids == (1, 2)


def test_closing_a_client_ends_its_requests_at_the_server_and_its_own_calls(server):
    client = Client(server.address, timeout_s=10)
    stream = client.stream([5, 0])
    next(stream)
    caught = []

    def wait():
        try:
            client.generate([5, 0])
        except ConnectionLostError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: server.do(lambda: len(server.double.running)) == 2)
    client.close()
    client.close()
    thread.join(5)
    assert "closed" in str(caught[0])
    with pytest.raises(ConnectionLostError, match="closed"):
        list(stream)
    with pytest.raises(ConnectionLostError, match="closed"):
        client.ping()
    wait_for(lambda: server.do(lambda: (idle(server.double), len(server.double.sessions))) == (IDLE, 0))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"address": "localhost:5555"}, "address"),
        ({"address": "tcp://nowhere"}, "address"),
        ({"address": "http://127.0.0.1:1"}, "address"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"credit": 0}, "credit"),
        ({"server_key": "short"}, "key"),
        ({"key": "a.key_secret"}, "key"),
    ],
)
def test_wrong_arguments_are_named(options, field):
    threads = threading.active_count()
    with pytest.raises(ConfigError) as caught:
        Client(**{"address": "tcp://127.0.0.1:9", **options})
    assert caught.value.field == field and threading.active_count() == threads


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", [1, "a"], {"role": "user"}, [True], [{"role": "user"}, 5]])
def test_what_is_no_prompt_is_refused_here(client, prompt):
    with pytest.raises(InvalidRequestError, match="prompt"):
        client.stream(prompt)


def test_a_server_that_is_not_there_is_named_after_the_time_limit():
    with Client(free_address(), timeout_s=0.3) as client:
        for call in (client.ping, lambda: client.generate([1, 2]), lambda: next(client.stream([1, 2]))):
            began = time.monotonic()
            with pytest.raises(ConnectionLostError, match=r"no connection to the server within 0\.3 s"):
                call()
            assert 0.25 < time.monotonic() - began < 2
        assert isinstance(ConnectionLostError("x"), ConnectionError)


def test_a_client_that_is_there_first_waits_for_its_server():
    address = free_address()
    with Client(address, timeout_s=10) as client:
        threading.Timer(0.3, lambda: servers.append(WireServer(address))).start()
        servers = []
        assert client.generate([1, 3]).token_ids == (1, 2, 3)
        client.close()
        servers[0].close()


def test_an_overloaded_server_says_when_to_come_again(server):
    with Client(server.address, timeout_s=10) as client:
        server.do(lambda: setattr(server.double, "_answer", _refusing(server.double)))
        with pytest.raises(OverloadedError) as caught:
            client.generate([1, 2])
        assert caught.value.retry_after_s == 1.5


def _refusing(double):
    answer = type(double)._answer

    def refuse(connection, message):
        if message.kind == "generate":
            raise OverloadedError("4 requests wait", retry_after_s=1.5)
        return answer(double, connection, message)

    return refuse


# --- slow readers -----------------------------------------------------------------------------------------------------


def test_a_reader_that_stops_holds_up_itself_alone_within_bounds_and_then_gets_everything(server):
    server.do(lambda: setattr(server.double, "per_step", 1))
    with Client(server.address, timeout_s=10, credit=8) as client:
        slow = client.stream([0, 3000])
        first = next(slow)
        neighbour = ids(client.stream([0, 500]))
        assert neighbour == list(range(500))
        wait_for(lambda: server.do(lambda: len(server.double.running)) == 0)
        inbox = client._inboxes[slow.request_id]
        assert inbox.qsize() <= 8
        assert ids([first, *slow]) == list(range(3000))


def test_a_reader_that_stops_for_too_long_gets_what_was_sent_and_then_the_reason():
    limits = SessionLimits(heartbeat_s=1, grace_s=5, stall_timeout_s=0.2)
    with WireServer(limits=limits) as server, Client(server.address, timeout_s=10, credit=4) as client:
        stream = client.stream([0, 0])
        got = [next(stream)]
        wait_for(lambda: server.do(lambda: len(server.double.running)) == 0)
        with pytest.raises(SlowReaderError, match="stall_timeout_s"):
            for output in stream:
                got.append(output)
        assert ids(got) == list(range(len(ids(got)))) and len(got) >= 4
        assert ids(client.stream([0, 50])) == list(range(50))


# --- cuts -------------------------------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_again_and_again_loses_and_doubles_nothing():
    with (
        WireServer(pace_s=0.002) as server,
        Proxy(server.address) as proxy,
        Client(proxy.address, timeout_s=20, credit=16) as client,
    ):
        got, streams, cuts = [], [client.stream([i * 1000, 500]) for i in range(3)], [10, 150, 300]
        for output in streams[0]:
            got.append(output)
            if cuts and output.token_ids[-1] >= cuts[0]:
                proxy.cut()
                cuts.pop(0)
        assert ids(got) == list(range(500))
        assert [ids(stream) for stream in streams[1:]] == [list(range(1000, 1500)), list(range(2000, 2500))]
        assert proxy.connections == 4
        wait_for(lambda: server.do(lambda: idle(server.double)) == IDLE)
        assert server.do(lambda: len(server.double.sessions)) == 1


@pytest.mark.parametrize("num_bytes", [1, 30, 100, 333, 1000, 5000])
def test_a_connection_that_is_cut_in_the_middle_of_a_message_loses_and_doubles_nothing(server, num_bytes):
    with Proxy(server.address) as proxy, Client(proxy.address, timeout_s=20) as client:
        proxy.bytes_left = num_bytes
        assert ids(client.stream([0, 400])) == list(range(400))
        assert client.generate([5, 300]).token_ids == tuple(range(5, 305))


def test_a_network_that_stands_still_longer_than_heartbeats_is_left_for_a_new_connection():
    limits = SessionLimits(heartbeat_s=0.1, grace_s=10)
    with (
        WireServer(limits=limits, pace_s=0.002) as server,
        Proxy(server.address) as proxy,
        Client(proxy.address, timeout_s=20) as client,
    ):
        stream = client.stream([0, 400])
        got = [next(stream) for _ in range(20)]
        proxy.stopped.set()
        threading.Timer(0.7, proxy.stopped.clear).start()
        got += stream
        assert ids(got) == list(range(400)) and proxy.connections >= 2


def test_connections_that_are_closed_before_they_begin_are_waited_out():
    """As of a proxy whose server is away for a moment."""
    with (
        WireServer(pace_s=0.002, limits=SessionLimits(heartbeat_s=1, grace_s=20)) as server,
        Proxy(server.address) as proxy,
        Client(proxy.address, timeout_s=20, credit=16) as client,
    ):
        stream = client.stream([0, 300])
        got = [next(stream)]
        proxy.accepting = False
        proxy.cut()
        threading.Timer(1.5, lambda: setattr(proxy, "accepting", True)).start()
        got += stream
        assert ids(got) == list(range(300)) and proxy.connections == 2
        proxy.accepting = False
        with (
            Client(proxy.address, timeout_s=0.8) as other,
            pytest.raises(ConnectionLostError, match="does this server want CURVE"),
        ):
            other.ping()


def test_addresses_of_ip_version_6_are_addresses():
    made = WireServer("tcp://[::1]:0", configure=lambda socket: setattr(socket, "ipv6", True))
    with made as server, Client(server.address, timeout_s=5) as client:
        assert client.generate([1, 2]).token_ids == (1, 2)


def test_a_client_that_returns_too_late_is_told_that_its_request_is_lost():
    limits = SessionLimits(heartbeat_s=0.2, grace_s=0.2)
    with (
        WireServer(limits=limits, pace_s=0.005) as server,
        Proxy(server.address) as proxy,
        Client(proxy.address, timeout_s=20) as client,
    ):
        stream = client.stream([0, 0])
        next(stream)
        proxy.accepting = False
        proxy.cut()
        wait_for(lambda: server.do(lambda: len(server.double.sessions)) == 0)
        proxy.accepting = True
        with pytest.raises(ConnectionLostError, match="forgotten"):
            list(stream)
        assert client.generate([1, 2]).token_ids == (1, 2)
        wait_for(lambda: server.do(lambda: idle(server.double)) == IDLE)


def test_a_server_that_is_killed_and_started_anew_loses_what_had_begun_and_runs_what_had_not(server):
    with Client(server.address, timeout_s=20) as client:
        begun = client.stream([0, 0])
        next(begun)
        server.deaf.set()
        waiting = client.stream([50, 5])
        new = server.restart()
        with new:
            with pytest.raises(ConnectionLostError, match="forgotten"):
                list(begun)
            assert ids(waiting) == [50, 51, 52, 53, 54]
            assert client.ping().state == "ready"


def test_a_server_that_is_gone_for_good_ends_every_call(server):
    with Client(server.address, timeout_s=0.5) as client:
        streams = [client.stream([0, 0]) for _ in range(3)]
        for stream in streams:
            next(stream)
        server.close()
        for stream in streams:
            with pytest.raises(ConnectionLostError, match="closed the connection, or is gone"):
                list(stream)
        assert client._inboxes == {}


def test_a_thread_that_dies_takes_no_caller_with_it(server, caplog):
    client = Client(server.address, timeout_s=20)
    stream = client.stream([0, 0])
    next(stream)

    def die():
        raise RuntimeError("a fault of ours")

    client._link.post(die)
    with pytest.raises(ConnectionLostError, match="a fault of ours"):
        list(stream)
    with pytest.raises(ConnectionLostError, match="a fault of ours"):
        client.generate([1, 2])
    client.close()
    assert "thread ends" in caplog.text


# --- processes --------------------------------------------------------------------------------------------------------

_STREAMING = """
import sys
from intarsia_zmq import Client
assert "torch" not in sys.modules and "numpy" not in sys.modules
client = Client(sys.argv[1], timeout_s=20)
for output in client.stream([0, int(sys.argv[2])]):
    print(*output.token_ids, flush=True)
"""


def _process(address, count):
    command = [sys.executable, "-c", _STREAMING, address, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_client_needs_no_torch_and_a_program_that_never_closes_it_ends():
    with WireServer() as server:
        process = _process(server.address, 5)
        assert process.communicate(timeout=20)[0].split() == list("01234") and process.returncode == 0


def test_a_client_that_is_killed_leaves_nothing_behind():
    with WireServer(limits=SessionLimits(heartbeat_s=0.2, grace_s=0.3)) as server:
        process = _process(server.address, 0)
        assert process.stdout.readline() == "0\n"
        process.kill()
        process.communicate()
        wait_for(lambda: server.do(lambda: (idle(server.double), len(server.double.sessions))) == (IDLE, 0))


def test_a_client_that_is_stopped_and_goes_on_misses_nothing():
    with WireServer(limits=SessionLimits(heartbeat_s=0.2, grace_s=20), pace_s=0.002) as server:
        process = _process(server.address, 600)
        assert process.stdout.readline() == "0\n"
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: server.do(lambda: all(s.gone_at for s in server.double.sessions._by_token.values())))
        os.kill(process.pid, signal.SIGCONT)
        rest = process.stdout.read()  # `communicate` would miss what is buffered here
        assert process.wait(20) == 0 and [int(word) for word in rest.split()] == list(range(1, 600))


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def secured(tmp_path):
    """A server with keys that lets the client `friend` in and nobody else."""
    for name in ("server", "friend", "stranger"):
        write_keys(tmp_path / name, name)
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "friend.key").write_text((tmp_path / "friend" / "friend.key").read_text())
    pair = read_key_pair(tmp_path / "server" / "server.key_secret")

    def configure(socket):
        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=str(allowed))
        made.append(authenticator)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret

    made = []
    with WireServer(configure=configure) as server:
        yield server, tmp_path
        made[0].stop()


def test_with_the_right_keys_everything_goes_as_without(secured):
    server, folder = secured
    public = folder / "server" / "server.key"
    for server_key in (public, str(public), read_public_key(public).decode()):
        key = folder / "friend" / "friend.key_secret"
        with Client(server.address, server_key=server_key, key=key, timeout_s=10) as client:
            assert client.generate([1, 3]).token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("server_key", "key", "text"),
    [
        ("server", "stranger", "does not let this client's key in"),
        ("server", None, "does not let this client's key in"),
        ("stranger", "friend", "is the server_key that of this server"),
        (None, None, "does this server want CURVE keys"),
    ],
)
def test_with_wrong_keys_a_call_fails_soon_with_what_is_wrong(secured, server_key, key, text):
    server, folder = secured
    options = {
        "server_key": None if server_key is None else folder / server_key / f"{server_key}.key",
        "key": None if key is None else folder / key / f"{key}.key_secret",
    }
    began = time.monotonic()
    options["timeout_s"] = 20 if server_key else 2
    # Without keys it can look like a connection that is cut, which is waited out.
    with (
        Client(server.address, **options) as client,
        pytest.raises(ConnectionLostError, match=text),
    ):
        client.ping()
    assert time.monotonic() - began < 10


def test_keys_in_files_are_those_that_zeromqs_own_tools_read_and_write(tmp_path):
    public, secret = write_keys(tmp_path, "one")
    assert secret.stat().st_mode & 0o777 == 0o600
    pair = read_key_pair(secret)
    assert zmq.auth.load_certificate(secret) == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(public) == (pair.public, None)
    assert zmq.curve_public(pair.secret) == pair.public and pair.secret.decode() not in repr(pair)
    theirs, theirs_secret = zmq.auth.create_certificates(tmp_path, "two")
    assert read_public_key(theirs) == read_key_pair(theirs_secret).public if hasattr(theirs, "exists") else True
    with pytest.raises(ConfigError, match="is there already"):
        write_keys(tmp_path, "one")
    assert read_key_pair(secret) == pair
    with pytest.raises(ConfigError, match="no secret key"):
        read_key_pair(public)
    for name in ("../up", "", "a/b", ".hidden"):
        with pytest.raises(ConfigError, match="name"):
            write_keys(tmp_path, name)


def test_limits_of_the_server_hold_for_many_prompts_at_once():
    with WireServer(offered=ServerLimits(requests=4)) as server, Client(server.address, timeout_s=10) as client:
        made = client.generate([[i, 3] for i in range(100)])
        assert [c.token_ids for c in made] == [(i, i + 1, i + 2) for i in range(100)]
