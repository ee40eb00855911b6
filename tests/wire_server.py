"""A server that says what it is told, for tests of clients: real sessions behind a real socket, and no engine."""

from __future__ import annotations

import threading
import time
from collections import deque

import zmq

from intarsia.errors import IntarsiaError
from intarsia.types import Output, Timings, Usage
from intarsia_zmq.errors import MalformedError, UnsupportedError, write_error
from intarsia_zmq.limits import ServerLimits, SessionLimits, WireLimits
from intarsia_zmq.messages import Served, Welcome, error_message, read_credit, read_hello, write_welcome
from intarsia_zmq.requests import read_generate
from intarsia_zmq.sessions import Sessions
from intarsia_zmq.wire import Message, decode, encode

MODEL = {"name": "canned", "family": "llama", "vocab_size": 1000, "max_model_len": 4096, "chat": True}


class Double:
    """The server's half without a socket.

    A request of ids [first, count] is answered with the ids first, first + 1, ...: `per_step` a step, text `<id>`.
    A count of 0 never ends.
    """

    def __init__(self, clock=time.monotonic, limits=None, offered=None, per_step=1):
        self.limits = limits or SessionLimits(heartbeat_s=1, grace_s=5)
        self.offered = offered or ServerLimits()
        self.sessions = Sessions(clock=clock, limits=self.limits, offered=self.offered)
        self.running = {}  # the engine's id -> [n, next id, last id]
        self.per_step = per_step
        self.asked = []  # every `generate`
        self.heard = []  # every kind
        self.max_pending = 0

    def hear(self, connection, frames):
        """Return [(connection, frames)] that answer."""
        sent = []
        for message in self._decoded(connection, frames, sent):
            self.heard.append(message.kind)
            try:
                sent += self._answer(connection, message)
            except IntarsiaError as error:
                unnamed = getattr(error, "field", None) in ("id", "received", "upto")
                sent.append((connection, encode(error_message(error, "" if unnamed else message.id))))
        return sent

    def _decoded(self, connection, frames, sent):
        try:
            return decode(frames, WireLimits())
        except (MalformedError, UnsupportedError) as error:
            sent.append((connection, encode(error_message(error))))
            return []

    def _answer(self, connection, message):
        kind, sessions = message.kind, self.sessions
        if kind == "hello":
            return self._welcome(connection, message)
        session = sessions.hear(connection)
        if kind == "generate":
            asked = read_generate(message, self.offered)
            self.asked.append(asked)
            stream = sessions.start(session, asked)
            first, count = asked.request.prompt[:2] if not isinstance(asked.request.prompt, str) else (0, 3)
            last = first + count if count else 10**9
            self.running[stream.key] = [asked.request.params.n, first, last]
            return []
        if kind == "cancel":
            stream = session.streams.get(message.id)
            if stream is not None and self.running.pop(stream.key, None):
                stream.abort()
                return sessions.deliver([Output(request_id=stream.key, finish_reason="abort")])
            return []
        if kind == "credit":
            return [(connection, f) for f in sessions.credit(session, message.id, *read_credit(message))]
        if kind == "bye":
            sessions.end(session)
            return []
        return [(connection, encode(self._told(message)))]

    def _welcome(self, connection, message):
        opened = self.sessions.open(connection, read_hello(message))
        alive = tuple(opened.session.streams)
        served = Served(
            server={"name": "double"},
            model=MODEL,
            composition={"hash": "0"},
            limits=self.offered,
            heartbeat_s=self.limits.heartbeat_s,
            grace_s=self.limits.grace_s,
            credit=self.limits.credit,
        )
        welcome = Welcome(served=served, token=opened.session.token, resumed=opened.resumed, requests=alive)
        return [(connection, encode(write_welcome(welcome)))] + [(connection, f) for f in opened.again]

    def _told(self, message):
        body, kind = message.body, message.kind
        if kind == "ping":
            return Message("pong", message.id, 0, {"echo": dict(body), "step_age_s": None, "state": "ready"})
        if kind == "tokenize":
            return Message("tokens", message.id, 0, {"token_ids": [ord(c) for c in body["text"]]})
        if kind == "detokenize":
            return Message("text", message.id, 0, {"text": "".join(map(chr, body["token_ids"]))})
        if kind == "models":
            return Message("models", message.id, 0, {"models": [MODEL]})
        if kind == "explain":
            return Message("explained", message.id, 0, {"slots": {}})
        if kind == "stats":
            return Message("figures", message.id, 0, {"engine": {}, "server": {"sessions": len(self.sessions)}})
        return Message("error", message.id, 0, write_error(UnsupportedError(f"kind: {kind!r}")))

    def step(self):
        """Let every request that runs say its next ids; return [(connection, frames)]."""
        for key in self.sessions.abandoned():
            self.running.pop(key, None)
        outputs = []
        for key, state in list(self.running.items()):
            n, now, last = state
            ids = tuple(range(now, min(now + self.per_step, last)))
            state[1] += len(ids)
            end = {}
            if state[1] >= last:
                del self.running[key]
                end = {
                    "finish_reason": "length",
                    "usage": Usage(2, len(ids), 0),
                    "timings": Timings(0.1, 0.2, 0.3),
                    "seed": 7,
                }
            text = "".join(f"<{i}>" for i in ids)
            outputs += [Output(request_id=key, choice=c, text=text, token_ids=ids, **end) for c in range(n)]
        return self.sessions.deliver(outputs)


class WireServer:
    """The double behind a ROUTER in a thread."""

    def __init__(self, address="tcp://127.0.0.1:0", pace_s=0.0005, configure=None, **options):
        self.double = Double(**options)
        self.pace_s = pace_s
        self.paused = threading.Event()
        self.deaf = threading.Event()
        self._todo = deque()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = 1
        if configure is not None:
            configure(self._socket)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._socket.close()
            self._context.term()

    def restart(self, **options):
        """Kill this server and return another on the same address that knows nothing."""
        self.close()
        return WireServer(self.address, **options)

    def do(self, work):
        """Run something in the server's thread, and return what it returns."""
        done, box = threading.Event(), []
        self._todo.append((work, box, done))
        assert done.wait(10)
        return box[0]

    def _run(self):
        while not self._stop.is_set():
            busy = self.double.running and not self.paused.is_set()
            self._socket.poll(self.pace_s * 1000 if busy else 10)
            while self._todo:
                work, box, done = self._todo.popleft()
                box.append(work())
                done.set()
            if self.deaf.is_set():
                continue
            for _ in range(100):
                try:
                    connection, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._send(self.double.hear(connection, frames))
            if not self.paused.is_set():
                self._send(self.double.step())
            self._send(self.double.sessions.sweep().send)

    def _send(self, sent):
        for connection, frames in sent:
            try:
                self._socket.send_multipart([connection, *frames], zmq.NOBLOCK)
            except zmq.ZMQError:
                self.double.sessions.lost(connection)


def idle(double):
    """What is left when nobody waits for anything any more: all 0."""
    return {
        "running": len(double.running),
        "in flight": double.sessions.in_flight,
        "bytes": double.sessions.num_bytes,
    }


__all__ = ["MODEL", "Double", "WireServer", "idle"]
