"""A client's side of the protocol without a socket: what it is told, and what it has to say in turn."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import define, field

from intarsia.errors import IntarsiaError, OverloadedError
from intarsia_zmq.calls import (
    MAX_TRIES,
    Call,
    ConnectionLostError,
    Event,
    Events,
    Question,
    check_size,
    confirmation,
    packed,
)
from intarsia_zmq.errors import DrainingError, MalformedError, NoSessionError, read_error
from intarsia_zmq.limits import CLIENT_LIMITS
from intarsia_zmq.messages import Hello, Welcome, read_delta, read_done, read_welcome, write_hello
from intarsia_zmq.verbs import checked
from intarsia_zmq.wire import Frames, Message, decode, encode

logger = logging.getLogger("intarsia.zmq")

#: How long a server may take to answer a `hello` before another connection is tried.
_GREETING_S = 5.0
#: Gaps in the numbers of one request after which the server is not believed any more.
_MAX_GAPS = 3
#: question -> answer
ANSWERS: Final[Mapping[str, str]] = {
    "ping": "pong",
    "tokenize": "tokens",
    "detokenize": "text",
    "models": "models",
    "explain": "explained",
    "stats": "figures",
    "replay": "events",
}


@define(eq=False, kw_only=True)
class Connection:
    """One session with a server, over as many connections as it takes.

    Its owner moves messages: those in `outgoing` to the server, those of the server to `receive`, and calls `tick`
    from time to time. Where `broken` says why, the owner makes a new connection and calls `connect`. It knows no
    socket; one thread calls it.

    Attributes:
        clock: seconds, never backwards.
        timeout_s: how long a call may wait without a session, and a question for its answer.
        client: name and version, for the server's log.
        outgoing: what is to be sent, the oldest first.
        welcome: what the server said of itself; None before it ever did.
        broken: why this connection is of no use any more.
        hint: what is known of why there is no connection, for errors.
    """

    clock: Callable[[], float]
    timeout_s: float = 30.0
    client: Mapping[str, str] = field(factory=dict)
    outgoing: deque[Frames] = field(factory=deque, init=False)
    welcome: Welcome | None = field(default=None, init=False)
    broken: str | None = field(default="not yet connected", init=False)
    hint: str = field(default="", init=False)
    #: whether this connection has a session
    _open: bool = field(default=False, init=False)
    #: sent, and not ended
    _calls: dict[str, Call] = field(factory=dict, init=False)
    #: not yet sent: there is no session, or as many are in flight as may be
    _waiting: dict[str, Call] = field(factory=dict, init=False)
    _questions: dict[str, Question] = field(factory=dict, init=False)
    _events: Events = field(factory=dict, init=False)
    _heard_at: float = field(default=0.0, init=False)
    _pinged_at: float = field(default=0.0, init=False)
    #: since when there is no session
    _down_since: float = field(default=0.0, init=False)
    #: why the last connection was lost
    _why: str = field(default="", init=False)
    _refusal: IntarsiaError | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._down_since = self.clock()

    @property
    def is_open(self) -> bool:
        """Whether there is a session now."""
        return self._open

    @property
    def is_idle(self) -> bool:
        """Whether nothing is waited for, ends of cancelled requests included."""
        return not (self._calls or self._waiting or self._questions)

    # --- asking -------------------------------------------------------------------------------------------------------

    def start(self, call: Call) -> None:
        """Begin a request; its events come under its id, which no other in flight has."""
        assert call.id not in self._calls and call.id not in self._waiting
        self._waiting[call.id] = call
        self._send_waiting()

    def question(self, kind: str, number: str, body: Mapping[str, Any]) -> Question:
        """Make a question, which any thread may; its answer comes under its number.

        Raises:
            InvalidRequestError: it cannot be said in a message.
        """
        said = {**body, "question": number} if kind == "ping" else body
        frames = packed(Message(kind, number, 0, said), next(iter(body), kind))
        return Question(frames, self.clock(), ANSWERS[kind])

    def ask(self, number: str, question: Question) -> None:
        """Ask a question."""
        self._questions[number] = question
        if self._open:
            self._put(number, question)

    def cancel(self, name: str) -> None:
        """Nobody waits for this request or question any more. No further events come of it."""
        self._events.pop(name, None)
        self._questions.pop(name, None)
        self._waiting.pop(name, None)
        call = self._calls.get(name)
        if call is not None and not call.cancelled:
            call.cancelled = True
            if self._open:
                self._say_cancelled(call)

    def take(self, name: str, count: int) -> None:
        """The reader of a request has taken so many deltas more; it may have as many again."""
        call = self._calls.get(name)
        if call is not None:
            call.taken += count
            self._grant(call)

    def leave(self) -> None:
        """End the session: its requests are cancelled by the server."""
        if self._open:
            self.outgoing.append(encode(Message("bye")))
        self._open = False

    # --- connections --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """There is a new connection: greet the server, and return to the session that was."""
        if self._open:
            self._open, self._down_since = False, self.clock()
        self.outgoing.clear()
        self.broken = None
        self._heard_at = self.clock()
        token = None if self.welcome is None else self.welcome.token
        received = {call.id: call.seq for call in self._calls.values() if call.seq}
        self.outgoing.append(encode(write_hello(Hello(client=self.client, token=token, received=received))))

    def lost(self, why: str) -> None:
        """The connection is closed."""
        if self.broken is None:
            self.broken = self._why = why
        if self._open:
            self._open, self._down_since = False, self.clock()

    def fail(self, error: IntarsiaError) -> Events:
        """End everything that is waited for with an error, and return what there is to say."""
        for name in [*self._calls, *self._waiting, *self._questions]:
            self._end(name, error)
        return self._taken()

    # --- hearing ------------------------------------------------------------------------------------------------------

    def receive(self, frames: Frames) -> Events:
        """Take a message of the server's and return what it brings."""
        self._heard_at = self.clock()
        try:
            for message in decode(frames, CLIENT_LIMITS):
                if self.broken is None:
                    self._read(message)
        except IntarsiaError as error:
            self.lost(f"the server says what is no message: {error}")
        return self._taken()

    def tick(self) -> Events:
        """Look at the clock: ping, give up waiting, find out that the server is silent. Called often."""
        now = self.clock()
        if self._open and self.welcome is not None:
            served = self.welcome.served
            if now - self._heard_at >= 3 * served.heartbeat_s:
                self.lost(f"the server said nothing for {now - self._heard_at:.1f} s")
            elif now - self._pinged_at >= served.heartbeat_s:
                self._pinged_at = now
                self.outgoing.append(encode(Message("ping")))
        elif self.broken is None and now - self._heard_at >= _GREETING_S:
            self.lost(f"no welcome within {_GREETING_S:g} s")
        self._give_up(now)
        return self._taken()

    def wait_s(self) -> float:
        """Return in how many seconds `tick` has something to do at the latest."""
        if not self._open or self.welcome is None:
            return min(0.25, self.timeout_s / 4)
        due = self._pinged_at + self.welcome.served.heartbeat_s - self.clock()
        return max(0.0, min(due, self.timeout_s / 4) if self._questions else due)

    # --- within: reading ----------------------------------------------------------------------------------------------

    def _read(self, message: Message) -> None:
        kind = message.kind
        if kind == "delta" or kind == "done":
            self._read_numbered(message)
        elif kind == "error":
            self._read_error(message)
        elif kind == "welcome":
            self._read_welcome(message)
        elif kind == "pong":
            echo = message.body.get("echo")
            number = echo.get("question") if isinstance(echo, dict) else None
            if isinstance(number, str):
                self._answer(number, message)
        elif message.id in self._questions:
            self._answer(message.id, message)
        # What this version does not know is ignored.

    def _answer(self, number: str, message: Message) -> None:
        question = self._questions.get(number)
        if question is not None and question.answer == message.kind:
            try:
                self._end(number, checked(message.kind, message.body, MalformedError))
            except MalformedError as error:
                self._end(number, error)

    def _read_numbered(self, message: Message) -> None:
        """Take what a request says, once and in order."""
        call = self._calls.get(message.id)
        if call is None:
            # Its end was received, but our word of it was lost.
            self.outgoing.append(confirmation(message.id, message.seq))
            return
        if message.seq != call.seq + 1:
            self._read_out_of_order(call, message.seq)
            return
        call.seq = message.seq
        try:
            if message.kind == "done":
                self._end(call.id, read_done(message))
            elif message.kind == "error":
                self._end(call.id, read_error(message.body))
            elif call.cancelled:
                self._grant(call)
            else:
                self._events.setdefault(call.id, []).append(read_delta(message))
        except MalformedError as error:
            self._abandon(call, error)

    def _read_out_of_order(self, call: Call, seq: int) -> None:
        if seq <= call.seq:
            return  # it came before
        call.gaps += 1
        missing = f"request {call.id!r}: message {seq} came after {call.seq}"
        if call.gaps > _MAX_GAPS:
            self._abandon(call, MalformedError(f"{missing}, again and again"))
        else:
            self.lost(missing)

    def _read_error(self, message: Message) -> None:
        if message.seq:
            self._read_numbered(message)
            return
        error = read_error(message.body)
        if isinstance(error, NoSessionError):
            self.lost("the server has no session of this connection")
        elif message.id in self._questions or message.id in self._calls:
            self._end(message.id, error)  # refused
        elif not self._open:
            self._read_refusal(error)
        elif not message.id:
            logger.warning("the server answers with an error of no request: %s: %s", error.code, error)

    def _read_refusal(self, error: IntarsiaError) -> None:
        """The server does not open a session: later it may, unless it does not understand us."""
        self._refusal = error
        self.lost(f"the server opens no session: {error}")
        if not isinstance(error, OverloadedError | DrainingError):
            for name in [*self._calls, *self._waiting, *self._questions]:
                self._end(name, error)

    def _read_welcome(self, message: Message) -> None:
        if self._open:
            return
        self.welcome = read_welcome(message)
        self._open, self._refusal, self.hint = True, None, ""
        self._pinged_at = self.clock()
        alive = set(self.welcome.requests) if self.welcome.resumed else set()
        for call in reversed(list(self._calls.values())):
            self._return_to(call, alive=call.id in alive)
        for number, question in list(self._questions.items()):
            self._put(number, question)
        self._send_waiting()

    def _return_to(self, call: Call, *, alive: bool) -> None:
        """Go on with a request on a new connection, ask for it again, or lose it."""
        assert self.welcome is not None
        if alive:
            if call.cancelled:
                self._say_cancelled(call)
            else:
                self._grant(call, again=True)
        elif call.cancelled:
            del self._calls[call.id]
        elif call.seq:
            self._end(call.id, ConnectionLostError(f"request {call.id!r}: the server has forgotten it"))
        elif call.tries >= MAX_TRIES:
            times = f"it was sent {call.tries} times and the connection lost each time"
            self._end(call.id, ConnectionLostError(f"request {call.id!r}: {times}"))
        else:
            # As one that was never sent: before those that were not.
            del self._calls[call.id]
            self._waiting = {call.id: call, **self._waiting}

    # --- within: saying -----------------------------------------------------------------------------------------------

    def _put(self, number: str, question: Question) -> None:
        assert self.welcome is not None
        error = check_size(question.frames, self.welcome.served.limits, "question")
        if error is None:
            self.outgoing.append(question.frames)
        else:
            self._end(number, error)

    def _send_waiting(self) -> None:
        """Send requests as far as this client may have them in flight."""
        if not self._open or self.welcome is None:
            return
        served = self.welcome.served
        while self._waiting and len(self._calls) < served.limits.requests:
            name = next(iter(self._waiting))
            call = self._waiting[name] = self._waiting[name].limited(served.limits.credit)
            error = check_size(call.frames, served.limits, "prompt")
            if error is not None:
                self._end(name, error)
                continue
            self._calls[name] = self._waiting.pop(name)
            self.outgoing.append(call.begin(served.credit))

    def _say_cancelled(self, call: Call) -> None:
        """Ask for the end, and grant what comes before it."""
        self.outgoing.append(encode(Message("cancel", call.id)))
        self._grant(call, again=True)

    def _grant(self, call: Call, *, again: bool = False) -> None:
        if self._open and self.welcome is not None:
            credit = call.grant(self.welcome.served.credit, again=again)
            if credit is not None:
                self.outgoing.append(credit)

    def _abandon(self, call: Call, error: IntarsiaError) -> None:
        """End a request for its reader. It stays until the server says that it has none, which runs it until then."""
        if not call.cancelled:
            self._events.setdefault(call.id, []).append(error)
            call.cancelled = True
            if self._open:
                self._say_cancelled(call)

    def _end(self, name: str, event: Event) -> None:
        """The last event of a request or a question."""
        call = self._calls.pop(name, None)
        self._waiting.pop(name, None)
        self._questions.pop(name, None)
        if call is None or not call.cancelled:
            self._events.setdefault(name, []).append(event)
        if call is not None:
            if self._open and call.seq:
                self.outgoing.append(confirmation(name, call.seq))
            self._send_waiting()

    def _give_up(self, now: float) -> None:
        """End what has waited too long: for a session, or for an answer."""
        default, questions = self.timeout_s, self._questions.items()
        late = [name for name, each in questions if now - each.since >= (each.timeout_s or default)]
        if not self._open:
            waiting = self._waiting.values()
            late += [call.id for call in waiting if now - max(call.since, self._down_since) >= self.timeout_s]
            if now - self._down_since >= self.timeout_s:
                for call in self._calls.values():
                    self._abandon(call, self._unreachable())
        for name in late:
            self._end(name, self._unreachable())

    def _unreachable(self) -> IntarsiaError:
        if self._refusal is not None:
            return self._refusal
        what = "no answer" if self._open else "no connection to the server"
        why = self.hint or ("" if self._open else self._why)
        return ConnectionLostError(f"{what} within {self.timeout_s:g} s{f': {why}' if why else ''}")

    def _taken(self) -> Events:
        events, self._events = self._events, {}
        return events
