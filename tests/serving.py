"""Servers for tests: the real one in a thread, engines of Python alone, and a client of raw messages."""

import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import zmq

from intarsia.errors import CompositionError, ConfigError, InvalidRequestError, OverloadedError, PluginError
from intarsia.types import Output, Timings, Usage
from intarsia_zmq.frontend import places_of
from intarsia_zmq.limits import CLIENT_LIMITS
from intarsia_zmq.options import ZmqOptions
from intarsia_zmq.server import Server
from intarsia_zmq.wire import Message, decode, encode

#: How long a test waits for what has to come.
PATIENCE_S = 10.0


class FakeEngine:
    """An engine of Python alone: each step, every running request says the next of the numbers from 0 on."""

    def __init__(self, *, step_s=0.0, max_running=64, max_waiting=10**6, max_model_len=1 << 20):
        self.step_s, self.max_running, self.max_waiting = step_s, max_running, max_waiting
        self.running, self.waiting, self.unclaimed = {}, deque(), []
        self.order, self.steps, self.closed, self.broken = [], 0, False, None
        self.scheduler, self.may_swap = "inflight", threading.Event()
        self.may_swap.set()
        self.may_step = threading.Event()
        self.may_step.set()
        spec = SimpleNamespace(chat_template=None)
        self.parts = SimpleNamespace(
            scheduler=self,
            executor=None,
            engine=SimpleNamespace(max_model_len=max_model_len),
            spec=SimpleNamespace(family="fake"),
            num_ids=256,
            tokenizer=SimpleNamespace(spec=spec),
        )

    @property
    def num_waiting(self):
        return len(self.waiting)

    @property
    def num_running(self):
        return len(self.running)

    @property
    def has_work(self):
        return bool(self.running or self.waiting or self.unclaimed)

    def add(self, request):
        if request.prompt == "refuse me":
            raise InvalidRequestError("prompt: refused", field="prompt")
        if request.prompt == "break add":
            raise RuntimeError("a fault in reading")
        if len(self.waiting) >= self.max_waiting:
            raise OverloadedError("full", retry_after_s=0.1)
        self.order.append(request.request_id)
        self.waiting.append(request)
        return request.request_id

    def cancel(self, request_id):
        known = [r for r in self.waiting if r.request_id == request_id]
        if request_id in self.running:
            known.append(self.running.pop(request_id)[0])
        for request in known:
            if request in self.waiting:
                self.waiting.remove(request)
            self.unclaimed += [self._output(request, choice, (), "abort") for choice in range(request.params.n)]

    def _output(self, request, choice, ids, end):
        more = {"usage": Usage(1, request.params.max_tokens or 0), "timings": Timings(0.0, 0.0, 0.0)} if end else {}
        return Output(request_id=request.request_id, choice=choice, token_ids=ids, finish_reason=end, **more)

    def step(self):
        if self.unclaimed:
            outputs, self.unclaimed = self.unclaimed, []
            return outputs
        self.may_step.wait(PATIENCE_S)
        if self.broken is not None:
            raise self.broken
        if self.step_s:
            time.sleep(self.step_s)
        self.steps += 1
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.popleft()
            self.running[request.request_id] = (request, [0])
        outputs = []
        for key, (request, said) in list(self.running.items()):
            number = said[0]
            said[0] += 1
            last = said[0] >= request.params.max_tokens
            end = "error" if request.prompt == "fail midway" and number == 2 else "length" if last else None
            outputs += [self._output(request, choice, (number,), end) for choice in range(request.params.n)]
            if end:
                del self.running[key]
        return outputs

    def tokenize(self, prompt):
        if not isinstance(prompt, str):
            raise InvalidRequestError("prompt: no template", field="prompt")
        return list(prompt.encode())

    def detokenize(self, token_ids, *, skip_special_tokens=True):
        return bytes(token_ids).decode()

    def stats(self):
        return {
            "steps": self.steps,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "cache": {"used": len(self.running)},
        }

    def explain(self):
        part = {"key": self.scheduler, "provider": "fake (- -)", "asked_by": "config", "reason": "it is there"}
        report = {"hash": "abc", "model": {"family": "fake"}}
        return report if self.scheduler == "inflight" else report | {"hash": "def", "parts": {"scheduler": part}}

    def swap(self, slot, choice):
        self.may_swap.wait(PATIENCE_S)
        if slot != "scheduler":
            raise CompositionError(f"{slot}: it cannot be replaced", field=slot)
        if choice.use == "broken":
            raise PluginError("scheduler 'broken' did not take over", field=slot)
        if choice.use == "a bug":
            raise RuntimeError("secret")
        if choice.options:
            raise ConfigError("scheduler.x: unknown option", field="scheduler.x")
        before, self.scheduler = self.scheduler, choice.use
        count = len(self.running) + len(self.waiting)
        return {
            "slot": slot,
            "before": before,
            "after": choice.use,
            "time": 1.5,
            "seconds": 0.25,
            "sequences": count,
            "kept": 0,
        }

    def close(self):
        self.closed = True


class Running:
    """A server in a thread."""

    def __init__(self, server, engine=None):
        self.server, self.engine, self.error = server, engine, None
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self):
        try:
            self.server.serve()
        except BaseException as error:
            self.error = error

    @property
    def address(self):
        return self.server.addresses["data"]

    def join(self, timeout_s=PATIENCE_S):
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the server did not end"
        return self.error

    def control(self, kind, **body):
        with Peer(self.server.addresses["control"]) as peer:
            return peer.ask(kind, **body)


@contextmanager
def serving(tmp_path, start_engine=None, **options):
    """Serve an engine, the fake one where none is given, on ipc sockets in a folder unless options say otherwise."""
    engine = FakeEngine() if start_engine is None else start_engine
    start = engine if callable(engine) else lambda: engine
    places = {
        "bind": f"ipc://{tmp_path}/data",
        "control": f"ipc://{tmp_path}/control",
        "heartbeat_s": 2.0,
        "grace_s": 0.5,
    }
    made = ZmqOptions(**(places | {"log_level": "debug"} | options))
    running = Running(Server.open(made, places_of(made), "fake", start), None if callable(engine) else engine)
    running.thread.start()
    try:
        yield running
    finally:
        if running.thread.is_alive():
            running.control("shutdown", now=True)
        running.join()


class Peer:
    """A client of raw messages."""

    def __init__(self, address, *, hello=False, **sockopts):
        self.context = zmq.Context.instance()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndtimeo = int(PATIENCE_S * 1000)
        for name, value in sockopts.items():
            setattr(self.socket, name, value)
        self.socket.connect(address)
        self.inbox, self.passed = deque(), []
        self.welcome = self.hello() if hello else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()

    def send(self, kind, request_id="", /, **body):
        self.socket.send_multipart(encode(Message(kind, request_id, 0, body)))

    def is_refused(self):
        """Say hello, and return whether nothing comes of it. After a refusal libzmq has nowhere left to send to."""
        with suppress(zmq.Again):
            self.socket.send_multipart(encode(Message("hello", "", 0, {"versions": [1]})), zmq.NOBLOCK)
        return self.quiet()

    def send_raw(self, *frames):
        self.socket.send_multipart(list(frames))

    def next(self, timeout_s=PATIENCE_S):
        """Return the next message; batches come apart."""
        if not self.inbox:
            if not self.socket.poll(int(timeout_s * 1000)):
                raise TimeoutError(f"nothing came in {timeout_s} s")
            self.inbox.extend(decode(self.socket.recv_multipart(), CLIENT_LIMITS))
        return self.inbox.popleft()

    def quiet(self, timeout_s=0.3):
        """Whether nothing comes."""
        return not self.inbox and not self.socket.poll(int(timeout_s * 1000))

    def ask(self, kind, request_id="", /, **body):
        self.send(kind, request_id, **body)
        return self.next()

    def hello(self, **body):
        self.welcome = self.ask("hello", versions=[1], client={"name": "test"}, **body)
        return self.welcome

    def generate(self, request_id="r", *, max_tokens=4, prompt="x", sampling=None, **body):
        self.send(
            "generate", request_id, prompt=prompt, sampling={"max_tokens": max_tokens, **(sampling or {})}, **body
        )

    def until_end(self, request_id="r", *, confirm=True, timeout_s=PATIENCE_S):
        """Return (numbers of its messages, ids of its deltas, its last message)."""
        seqs, ids = [], []
        waiting, self.passed = self.passed, []
        while True:
            message = waiting.pop(0) if waiting else self.next(timeout_s)
            if message.id != request_id:
                self.passed.append(message)  # for who asks for another
                continue
            seqs.append(message.seq)
            ids += message.body.get("token_ids", [])
            if message.kind in ("done", "error"):
                if confirm and message.seq:
                    self.send("credit", request_id, received=message.seq, upto=0)
                self.passed += waiting
                return seqs, ids, message


def eventually(check, timeout_s=PATIENCE_S):
    """Wait until something is true."""
    until = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.01)
