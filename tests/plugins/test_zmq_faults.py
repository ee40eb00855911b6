"""Faults, each with a request in flight, on a real server process with a real engine.

Whatever happens to one client: no page, request or session is left behind, no token is lost or doubled, and a
neighbour's tokens are those of an engine of its own.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from engines import engine_of
from intarsia import SamplingParams
from intarsia_zmq import Client
from intarsia_zmq.calls import ConnectionLostError
from proxy import Proxy
from server_process import figures, left_behind, process, ready, tiny_model
from serving import Peer, eventually

HEARTBEAT_S = 0.3
FRONTEND = ("-o", "frontend=zmq", "-o", f"frontend.heartbeat_s={HEARTBEAT_S}", "-o", "frontend.grace_s=20")
PROMPT = [5, 6, 7]
#: Sampled: an answer that repeated itself would hide what is lost or doubled.
LONG = SamplingParams(max_tokens=1500, temperature=1.0, seed=11, ignore_eos=True)
SHORT = SamplingParams(max_tokens=150, temperature=1.0, seed=12, ignore_eos=True)
TWO = SamplingParams(max_tokens=400, temperature=1.0, seed=13, ignore_eos=True, n=2, logprobs=1)
ENDLESS = {"max_tokens": 3900, "temperature": 1, "seed": 1, "ignore_eos": True}

#: Prints the ids of each output, and at the end what became of the stream.
_CLIENT = """
import json, sys
from intarsia import SamplingParams
from intarsia_zmq import Client
client = Client(sys.argv[1], timeout_s=20)
try:
    for output in client.stream([5, 6, 7], SamplingParams(**json.loads(sys.argv[2]))):
        print(json.dumps(output.token_ids), flush=True)
    print('"ended"', flush=True)
except Exception as error:
    print(json.dumps(type(error).__name__), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model):
    """What an engine of one's own answers to `LONG`, `SHORT` and `TWO`: the ids of each choice."""
    with engine_of(model) as engine:
        return [
            [list(choice.token_ids) for choice in engine.generate([PROMPT], params)[0].choices]
            for params in (LONG, SHORT, TWO)
        ]


@pytest.fixture(scope="module")
def running(tmp_path_factory, model):
    with process(tmp_path_factory.mktemp("server"), model, *FRONTEND) as running:
        with Peer(running.address, hello=True) as peer:
            ready(peer)
            peer.send("bye")
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """After each fault the server is as it was."""
    yield
    if "running" in request.fixturenames:
        running = request.getfixturevalue("running")
        grace(running, 0.2)
        eventually(lambda: not left_behind(running), 20)
        grace(running, 20)


def grace(running, seconds):
    with Peer(running.control) as control:
        assert control.ask("reload", options={"grace_s": seconds}).body["applied"] == ["grace_s"]


@contextmanager
def neighbour(running, expected):
    """Someone who has the same answer again and again, at least once within the block, and each time the right one."""
    answers, failures, stop = [], [], threading.Event()

    def ask():
        try:
            with Client(running.address, timeout_s=20) as client:
                while not (stop.is_set() and answers):
                    answers.append([i for output in client.stream(PROMPT, SHORT) for i in output.token_ids])
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive() and not failures, failures
    assert all(answer == expected[1][0] for answer in answers)


@contextmanager
def client_process(running, **sampling):
    command = [sys.executable, "-c", _CLIENT, running.address, json.dumps(sampling)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(started.stdout.readline())
        yield started
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def test_a_client_that_is_killed_leaves_nothing_behind(running, expected):
    grace(running, 0.3)
    aborted = figures(running)[1]["aborted"]
    with neighbour(running, expected), client_process(running, n=4, **ENDLESS) as client:
        client.kill()
        client.wait()
        eventually(lambda: figures(running)[1]["aborted"] == aborted + 4, 20)


def test_a_client_that_is_stopped_for_less_than_the_grace_time_misses_nothing(running, expected):
    sampling = {"max_tokens": LONG.max_tokens, "temperature": 1.0, "seed": LONG.seed, "ignore_eos": True}
    with neighbour(running, expected) as answers, client_process(running, n=2, **sampling) as client:
        client.send_signal(signal.SIGSTOP)
        time.sleep(5 * HEARTBEAT_S)
        before = len(answers)
        eventually(lambda: len(answers) > before)  # it holds up nobody
        client.send_signal(signal.SIGCONT)
        *said, end = [json.loads(line) for line in client.stdout]
        assert end == "ended" and sum(map(len, said)) >= 2 * LONG.max_tokens - 20
    with client_process(running, **sampling) as client:
        client.send_signal(signal.SIGSTOP)
        time.sleep(5 * HEARTBEAT_S)
        client.send_signal(signal.SIGCONT)
        *said, end = [json.loads(line) for line in client.stdout]
        rest = [token for ids in said for token in ids]
        assert end == "ended" and rest == expected[0][0][-len(rest) :] and len(rest) > LONG.max_tokens // 2


def test_a_client_that_is_stopped_for_longer_is_forgotten_and_told_so(running, expected):
    grace(running, 0.3)
    with neighbour(running, expected), client_process(running, n=4, **ENDLESS) as client:
        client.send_signal(signal.SIGSTOP)
        eventually(lambda: figures(running)[0]["sessions"] == 1, 20)
        client.send_signal(signal.SIGCONT)
        *_, end = [json.loads(line) for line in client.stdout]
        assert end == "ConnectionLostError"


def test_a_connection_that_is_cut_again_and_again_loses_and_doubles_nothing(running, expected):
    rng = random.Random(5)
    with (
        neighbour(running, expected),
        Proxy(running.address) as proxy,
        Client(proxy.address, timeout_s=20, credit=32) as client,
    ):
        for _ in range(4):
            proxy.bytes_left = rng.randrange(500, 20_000)
            outputs = list(client.stream(PROMPT, TWO))
            for choice in range(2):
                own = [output for output in outputs if output.choice == choice]
                assert [token for output in own for token in output.token_ids] == expected[2][choice]
                assert [entry.token_id for output in own for entry in output.logprobs] == expected[2][choice]
        assert proxy.connections >= 4


def test_a_server_that_is_killed_loses_what_had_begun_and_its_successor_runs_the_rest(tmp_path, model, expected):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with process(first, model, *FRONTEND) as running, Client(running.address, timeout_s=60) as client:
        stream = client.stream(PROMPT, SamplingParams(**ENDLESS))
        next(stream)
        running.process.kill()
        running.process.wait()
        later = client.stream(PROMPT, SHORT)
        with process(second, model, *FRONTEND, "--bind", running.address) as successor:
            with pytest.raises(ConnectionLostError, match="forgotten"):
                list(stream)
            assert [token for output in later for token in output.token_ids] == expected[1][0]
            eventually(lambda: not left_behind(successor, sessions=1))


def test_200_clients_that_come_and_go_leave_nothing_behind(running, expected):
    grace(running, 0.3)
    rng = random.Random(9)
    crowd = []
    with neighbour(running, expected) as answers:
        for number in range(200):
            crowd.append(_visitor(running, rng, number))
            while len(crowd) > 20:
                crowd.pop(rng.randrange(len(crowd))).close()
        before = len(answers)
        eventually(lambda: len(answers) > before, 30)
        for visitor in crowd:
            visitor.close()


def _visitor(running, rng, number):
    """Come, ask for something, and wait for a bit of it or not; return what is to be closed."""
    if number % 10 == 9:  # no client at all, or half of one
        host, port = running.address.removeprefix("tcp://").split(":")
        plain = socket.create_connection((host, int(port)))
        plain.sendall(rng.choice([b"\xff" + b"\0" * 8 + b"\x7f\x03", b"GET / HTTP/1.1\r\n\r\n"]))
        plain.shutdown(socket.SHUT_WR)
        return plain
    peer = Peer(running.address, hello=True)
    prompt = rng.choice([PROMPT, [number % 250] * rng.randrange(500, 3000)])  # the long ones leave during prefill
    for name in "ab"[: rng.randrange(1, 3)]:
        sampling = ENDLESS | {"n": rng.choice([1, 1, 4]), "max_tokens": rng.choice([3, 900])}
        peer.send("generate", name, prompt=prompt, sampling=sampling, stream=rng.random() < 0.7)
    for _ in range(rng.randrange(3)):
        if peer.socket.poll(100):
            peer.socket.recv_multipart()
    leaves = rng.random()
    if leaves < 0.3:
        peer.send("bye")
    elif leaves < 0.5:
        peer.send("cancel", "a")
    return peer
