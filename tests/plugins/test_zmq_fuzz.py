"""Random and mutated messages on every socket: a running request's tokens do not change, and memory is bounded."""

import random
import time

import msgpack
import psutil
import pytest
import zmq

from intarsia_zmq.options import Limits
from serving import FakeEngine, Peer, eventually, serving

BODIES = [
    {"kind": "hello", "body": {"versions": [1], "client": {"name": "x"}, "token": b"x" * 32, "received": {"r": 1}}},
    {"kind": "generate", "id": "f", "body": {"prompt": "x", "sampling": {"max_tokens": 3, "n": 2}, "credit": 3}},
    {"kind": "generate", "id": "g", "body": {"prompt": [1, 2], "stream": False, "sampling": {"max_tokens": 2}}},
    {"kind": "generate", "id": "h", "body": {"prompt": {"messages": [{"role": "user"}]}, "deadline_s": 0.1}},
    {"kind": "credit", "id": "f", "body": {"received": 2, "upto": 100}},
    {"kind": "cancel", "id": "f"},
    {"kind": "ping", "body": {"a": [1, {"b": 2.5}]}},
    {"kind": "tokenize", "id": "t", "body": {"text": "abc"}},
    {"kind": "detokenize", "id": "d", "body": {"token_ids": [97, 98]}},
    {"kind": "stats"}, {"kind": "models"}, {"kind": "explain"}, {"kind": "bye"},
    {"kind": "replay", "body": {"from": 1}},
    {"kind": "reload", "body": {"options": {"grace": 1, "limits": {"x": 2}}}}, {"kind": "status"},
]  # fmt: skip
VALUES = [
    None,
    True,
    -1,
    0,
    2**63,
    -(2**63),
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    b"\xff",
    [],
    {},
    [[]],
    "\ud7ff",
]


def mutated(rng):
    """Return the frames of a message that is valid, or nearly, or not at all."""
    message = {"v": 1, **msgpack.unpackb(msgpack.packb(rng.choice(BODIES)))}
    if rng.random() < 0.5:
        place = message if rng.random() < 0.3 or not message.get("body") else message["body"]
        place[rng.choice([*place, "unknown"])] = rng.choice(VALUES)
    data = bytearray(msgpack.packb(message))
    for _ in range(rng.choice([0, 0, 1, 1, 3])):
        what, at = rng.random(), rng.randrange(len(data))
        if what < 0.5:
            data[at] = rng.randrange(256)
        elif what < 0.75:
            del data[at:]
            data += rng.randbytes(rng.randrange(8))
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        data = data or bytearray(b"\0")
    if rng.random() < 0.05:
        data = bytearray(rng.randbytes(rng.randrange(64)))
    return [bytes(data), *(rng.randbytes(4) for _ in range(rng.choice([0] * 20 + [1, 9])))]


def fuzz(address, count, seed, *, hello):
    """Send messages from connections that are given up now and then; return how many answers came."""
    rng, answers = random.Random(seed), 0
    for begin in range(0, count, 500):
        with Peer(address) as peer:
            if hello:
                peer.hello()
            for _ in range(min(500, count - begin)):
                frames = mutated(rng)
                if not hello and b"shutdown" in frames[0]:
                    continue
                peer.send_raw(*frames)
                while peer.socket.poll(0):
                    peer.socket.recv_multipart()
                    answers += 1
            until = time.monotonic() + 0.3
            while time.monotonic() < until and peer.socket.poll(50):
                peer.socket.recv_multipart()
                answers += 1
    return answers


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_fuzz_of_every_socket_leaves_a_running_request_and_memory_alone(tmp_path, count):
    engine = FakeEngine(step_s=0.002)
    options = {"grace_s": 0.3, "events": f"ipc://{tmp_path}/events", "log_level": "warning"}
    with serving(tmp_path, engine, limits=Limits(requests=512), **options) as running:
        process = psutil.Process()
        fuzz(running.address, 1000, 0, hello=True)
        before = process.memory_info().rss
        with Peer(running.address, hello=True) as control:
            control.generate("control", max_tokens=200, stream=False)
            assert fuzz(running.address, count, 1, hello=True) > count / 10
            fuzz(running.address, count // 4, 2, hello=False)
            assert fuzz(running.server.addresses["control"], count // 4, 3, hello=False) > 0
            publisher = zmq.Context.instance().socket(zmq.XSUB)
            publisher.linger = 0
            publisher.connect(running.server.addresses["events"])
            rng = random.Random(4)
            for _ in range(count // 4):
                publisher.send(rng.randbytes(rng.randrange(1, 40)))
            publisher.close()
            running.control("resume")
            _, _, last = control.until_end("control", timeout_s=60)
            assert list(last.body["choices"][0]["token_ids"]) == list(range(200))
        eventually(lambda: running.control("status").body["sessions"] == 0 and not engine.has_work, 20)
        figures = running.control("status").body
        assert figures["in_flight"] == figures["kept_bytes"] == figures["waiting_bytes"] == figures["waiting"] == 0
        assert process.memory_info().rss - before < 200 << 20
