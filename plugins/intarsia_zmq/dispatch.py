"""What clients say on the data socket, and what becomes of it. It knows no socket; one thread calls it."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from attrs import define, evolve, field

from intarsia.errors import ExecutionError, IntarsiaError, InvalidRequestError, OverloadedError
from intarsia.types import Output
from intarsia_zmq.admission import AdmissionLimits
from intarsia_zmq.errors import DrainingError, InternalError, UnsupportedError
from intarsia_zmq.events import Events
from intarsia_zmq.handover import Add, Answered, Cancel, Refused
from intarsia_zmq.lifecycle import Lifecycle
from intarsia_zmq.limits import WireLimits
from intarsia_zmq.messages import Served, Welcome, error_message, read_credit, read_hello, write_welcome
from intarsia_zmq.questions import RETRY_S, Asked, Question, Questions, ask_stats, read_detokenize, read_tokenize
from intarsia_zmq.requests import Generate, read_generate
from intarsia_zmq.router import chose_its_name
from intarsia_zmq.sessions import Session, Sessions
from intarsia_zmq.verbs import checked, says, wrong
from intarsia_zmq.wire import Frames, Message, batched, decode, encode

log = logging.getLogger("intarsia.zmq")

#: Takes a message of a client, and its size in bytes.
_Handler: TypeAlias = Callable[[Session, Message, int], None]


@define(eq=False, kw_only=True)
class Dispatch:
    """Answers messages, and hands what takes the engine to its thread.

    Attributes:
        sessions: the clients.
        lifecycle: what the server is at.
        events: told of requests.
        questions: those that wait for the engine.
        served: what the server says that it is.
        send: gives frames to a connection: (connection, frames, keep).
        allowed: whether the client of this key may speak still.
        wire: how large messages may be.
        admission: what the engine's thread was told of who may wait.
        max_requests: in flight, of all clients.
    """

    sessions: Sessions
    lifecycle: Lifecycle
    events: Events
    questions: Questions
    served: Served
    send: Callable[..., None]
    allowed: Callable[[str], bool] = lambda _: True
    wire: WireLimits = field(factory=WireLimits)
    admission: AdmissionLimits = field(factory=AdmissionLimits)
    max_requests: int = 4096
    explained: Mapping[str, Any] | None = field(default=None, init=False)
    #: what the server counts
    counts: Counter[str] = field(factory=Counter, init=False)
    #: (when, whose) of requests that have to end
    _deadlines: list[tuple[float, str]] = field(factory=list, init=False)
    #: kind -> what takes it
    _handlers: Mapping[str, _Handler] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._handlers = {
            "generate": self._generate,
            "cancel": self._cancel,
            "credit": self._credit,
            "ping": self._ping,
            "bye": self._bye,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "models": self._models,
            "explain": self._explain,
            "stats": self._stats,
            "replay": self._replay,
        }

    # --- messages -----------------------------------------------------------------------------------------------------

    def receive(self, connection: bytes, frames: Frames, user: str) -> None:
        """Take a message. Nothing that it holds raises: what is wrong is answered to its sender, or dropped."""
        if not self.allowed(user):
            self.counts["refused"] += 1
            return
        try:
            (message,) = decode(frames, self.wire)
        except IntarsiaError as error:
            self.counts["malformed"] += 1
            if self.sessions.at(connection) is not None:
                self._say(connection, error_message(error))
            return
        try:
            if message.kind == "hello":
                self._hello(connection, message, user)
                return
            session = self.sessions.hear(connection)
        except IntarsiaError as error:
            self._say(connection, error_message(error), keep=False)
            return
        try:
            self._handle(session, message, sum(map(len, frames)))
        except IntarsiaError as error:
            self._blame(session, message, error)
        except Exception as error:
            log.exception("a message of kind %.64r could not be handled", message.kind)
            self._blame(session, message, error)

    def _handle(self, session: Session, message: Message, num_bytes: int) -> None:
        kind = message.kind
        handler = self._handlers.get(kind)
        if handler is None or not says(kind, "client"):
            raise UnsupportedError(f"kind: {kind!r} is nothing that a client says in this version", field="kind")
        handler(session, message, num_bytes)

    def _blame(self, session: Session, message: Message, error: BaseException) -> None:
        """Answer with an error; with the message's id only where it cannot be taken for the end of a request."""
        running = session.streams.get(message.id)
        about = message.id if running is None and message.kind not in ("cancel", "credit", "ping", "bye") else ""
        self._reply(session, error_message(error, about))

    def _hello(self, connection: bytes, message: Message, user: str) -> None:
        if chose_its_name(connection):
            raise InvalidRequestError("routing id: leave it to ZeroMQ; one that a client chose could be another's")
        opened = self.sessions.open(connection, read_hello(message), user)
        session = opened.session
        welcome = Welcome(
            served=evolve(self.served, limits=self.sessions.offered),
            token=session.token,
            resumed=opened.resumed,
            requests=tuple(session.streams),
        )
        self._say(connection, write_welcome(welcome))
        for frames in opened.again:
            self.send(connection, frames)
        self.tidy()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _generate(self, session: Session, message: Message, num_bytes: int) -> None:
        earlier = session.streams.get(message.id)
        if earlier is not None and not earlier.ended:
            raise InvalidRequestError(f"id: {message.id!r} is a request of yours that has not ended", field="id")
        try:
            self._check_open()
            asked = read_generate(message, self.sessions.offered)
            self._check_room(num_bytes)
            stream = self.sessions.start(session, asked)
        except IntarsiaError as error:
            self.counts["refused_requests"] += 1
            self._reply(session, error_message(error, message.id))
            return
        self.counts["requests"] += 1
        if asked.deadline_s is not None:
            self._add_deadline(asked.deadline_s, stream.key)
        request = evolve(asked.request, request_id=stream.key)
        client = session.user or session.number
        self.lifecycle.loop.post(Add(request, client, self._cost(asked), num_bytes, asked.stream))
        self.events.began(stream.key)

    def _check_open(self) -> None:
        if self.lifecycle.failure is not None:
            raise ExecutionError("the engine failed; this server takes no more requests")
        if self.lifecycle.draining:
            raise DrainingError("this server takes no new requests: it is going to stop")

    def _check_room(self, num_bytes: int) -> None:
        if self.sessions.in_flight >= self.max_requests:
            text = f"{self.sessions.in_flight} requests are in flight, as many as there may be"
            raise OverloadedError(text, retry_after_s=RETRY_S)
        self.questions.check_room(num_bytes)

    def _cost(self, asked: Generate) -> int:
        """Return the tokens that it may take: no choice is longer than the model's context, which most do not fill."""
        most = self.served.model.get("max_model_len")
        return asked.tokens if most is None else min(asked.tokens, asked.request.params.n * most)

    def _cancel(self, session: Session, message: Message, num_bytes: int) -> None:
        del num_bytes
        stream = session.streams.get(message.id)
        if stream is not None and not stream.ended:
            self.lifecycle.loop.post(Cancel(stream.key))

    def _credit(self, session: Session, message: Message, num_bytes: int) -> None:
        del num_bytes
        packed = self.sessions.credit(session, message.id, *read_credit(message))
        self._send_all(session.connection, batched(packed, self.sessions.batches))
        self.tidy()

    def _ping(self, session: Session, message: Message, num_bytes: int) -> None:
        del num_bytes
        self._reply(session, Message("pong", message.id, 0, self.lifecycle.pong(message.body)))

    def _bye(self, session: Session, message: Message, num_bytes: int) -> None:
        del message, num_bytes
        self.sessions.end(session)
        self.tidy()

    # --- questions ----------------------------------------------------------------------------------------------------

    def _tokenize(self, session: Session, message: Message, num_bytes: int) -> None:
        self._ask(session, message, "tokens", read_tokenize(message), num_bytes)

    def _detokenize(self, session: Session, message: Message, num_bytes: int) -> None:
        self._ask(session, message, "text", read_detokenize(message), num_bytes)

    def _stats(self, session: Session, message: Message, num_bytes: int) -> None:
        if self.lifecycle.started and self.lifecycle.failure is None:
            self._ask(session, message, "figures", ask_stats, num_bytes)
        else:
            self._reply(session, Message("figures", message.id, 0, {"engine": {}, "server": self.figures()}))

    def _ask(self, session: Session, message: Message, kind: str, question: Question, num_bytes: int) -> None:
        if self.lifecycle.failure is not None:
            raise ExecutionError("the engine failed; it answers nothing more")
        assert session.connection is not None
        self.questions.ask(Asked(session.connection, session.number, message.id, kind), question, num_bytes, message)

    def _models(self, session: Session, message: Message, num_bytes: int) -> None:
        del num_bytes
        self._reply(session, Message("models", message.id, 0, {"models": [dict(self.served.model)]}))

    def _explain(self, session: Session, message: Message, num_bytes: int) -> None:
        del num_bytes
        if self.explained is None:
            raise OverloadedError("the engine is starting; ask again when it is ready", retry_after_s=RETRY_S)
        self._reply(session, Message("explained", message.id, 0, self.explained))

    def _replay(self, session: Session, message: Message, num_bytes: int) -> None:
        del num_bytes
        body = checked("replay", message.body)
        if not self.events.on:
            raise UnsupportedError("replay: this server publishes no events; frontend.events says where to")
        if "from" not in body:
            raise wrong("from", None, "the number of an event")
        self._reply(session, Message("events", message.id, 0, self.events.since(body["from"])))

    def describe(self, explained: Mapping[str, Any]) -> None:
        """Tell clients from now on that the engine is made of this."""
        self.explained = explained
        self.served = evolve(self.served, composition={"hash": explained["hash"]})

    # --- from the engine ----------------------------------------------------------------------------------------------

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Send what steps brought."""
        outputs = list(outputs)
        for connection, frames in self.sessions.deliver(outputs):
            self.send(connection, frames)
        if self.events.on:
            for output in outputs:
                if output.finish_reason is not None:
                    self.events.ended(output)
        self.tidy()

    def refuse(self, refused: Refused) -> None:
        """Tell a client that its request never began, or, where something of it was said, that it ended early."""
        owner = self.sessions.owner(refused.key)
        if owner is None:
            return
        session, stream = owner
        if stream.seq:
            for connection, frames in self.sessions.lose(refused.key, refused.error):
                self.send(connection, frames)
            return
        self.counts["refused_requests"] += 1
        self.sessions.drop(session, stream)
        self._reply(session, error_message(refused.error, stream.request_id))

    def answer(self, answered: Answered) -> None:
        """Give the answer to a question, if who asked is still there."""
        asked: Asked = answered.tag
        self.questions.answered(asked)
        if self.sessions.at(asked.connection) is None:
            return
        if answered.error is not None:
            message = error_message(answered.error, asked.request_id)
        else:
            body = dict(answered.answer)
            if asked.kind == "figures":
                body["server"] = self.figures()
            message = Message(asked.kind, asked.request_id, 0, body)
        self._say(asked.connection, message)

    def fail(self, error: BaseException) -> None:
        """Tell every client that its requests are lost, and why, where that is for users to know."""
        why = f"the engine failed: {error}" if isinstance(error, IntarsiaError) else "the engine failed"
        for connection, frames in self.sessions.fail(ExecutionError(f"{why}; this request is lost")):
            self.send(connection, frames)
        self.sessions.abandoned()

    # --- time ---------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Look at the clock. Called a few times a second."""
        for connection, frames in self.sessions.sweep().send:
            self.send(connection, frames)
        now = self.sessions.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            owner = self.sessions.owner(key)
            if owner is not None:
                owner[1].overdue = True
                self.lifecycle.loop.post(Cancel(key))
        self.tidy()

    @property
    def next_deadline(self) -> float | None:
        """When the next request has to end."""
        return self._deadlines[0][0] if self._deadlines else None

    def tidy(self) -> None:
        """Cancel what nobody waits for any more."""
        for key in self.sessions.abandoned():
            self.lifecycle.loop.post(Cancel(key))

    def probe(self) -> None:
        """Say something to every client: those whose connections are closed are found out."""
        for connection in self.sessions.connections():
            self._say(connection, Message("pong", "", 0, self.lifecycle.pong({})), keep=False)

    def figures(self) -> dict[str, Any]:
        """Return the server's own figures."""
        loop = self.lifecycle.loop
        return {
            "state": self.lifecycle.state,
            "alive": self.lifecycle.alive,
            "step_age_s": self.lifecycle.step_age_s,
            "sessions": len(self.sessions),
            "in_flight": self.sessions.in_flight,
            "waiting": loop.waiting,
            "waiting_bytes": loop.waiting_bytes,
            "kept_bytes": self.sessions.num_bytes,
            **self.counts,
        }

    def _add_deadline(self, deadline_s: float, key: str) -> None:
        heapq.heappush(self._deadlines, (self.sessions.clock() + deadline_s, key))
        if len(self._deadlines) > 2 * self.sessions.in_flight + 64:
            # Far deadlines of requests that ended long ago.
            self._deadlines = [each for each in self._deadlines if self.sessions.owner(each[1]) is not None]
            heapq.heapify(self._deadlines)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _reply(self, session: Session, message: Message) -> None:
        if session.connection is not None:
            self._say(session.connection, message)

    def _say(self, connection: bytes, message: Message, *, keep: bool = True) -> None:
        try:
            frames = encode(message)
        except IntarsiaError:
            log.exception("an answer of kind %r could not be written", message.kind)
            frames = encode(error_message(InternalError("the answer could not be written"), message.id))
        self.send(connection, frames, keep=keep)

    def _send_all(self, connection: bytes | None, messages: Iterable[Frames]) -> None:
        for frames in messages:
            if connection is not None:
                self.send(connection, frames)
