"""Clients over time: greetings, heartbeats, returning after a cut, and the requests that each of them has."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from hmac import compare_digest

from attrs import define, field, frozen

from intarsia.errors import IntarsiaError, InvalidRequestError, OverloadedError
from intarsia.types import Output
from intarsia_zmq.errors import NoSessionError, SlowReaderError
from intarsia_zmq.limits import CLIENT_LIMITS, ServerLimits, SessionLimits, WireLimits
from intarsia_zmq.messages import TOKEN_BYTES, Hello
from intarsia_zmq.requests import Generate
from intarsia_zmq.streams import Stream
from intarsia_zmq.wire import Frames, batched


@define(eq=False, kw_only=True)
class Session:
    """One client.

    Attributes:
        number: of its own; a client's name in the server.
        user: who the transport says it is, such as a CURVE key; "" where it says nothing.
        client: name and version, as it gave them.
        token: what it returns with.
        connection: the routing id that it is reached by; None while it is gone.
        heard_at: when it last said something.
        gone_at: since when it is gone.
        streams: request id -> stream, until the client has confirmed the end.
    """

    number: int
    user: str
    client: Mapping[str, str]
    token: bytes = field(repr=False)
    connection: bytes | None
    heard_at: float
    gone_at: float | None = None
    streams: dict[str, Stream] = field(factory=dict)
    #: ended and not confirmed: request id -> when it ended, the oldest first
    answered: dict[str, float] = field(factory=dict, init=False)
    _started: int = field(default=0, init=False)

    @property
    def in_flight(self) -> int:
        """How many requests have not ended."""
        return len(self.streams) - len(self.answered)

    def next_key(self) -> str:
        """Return a request id for the engine, unique among those of all clients."""
        self._started += 1
        return f"{self.number}/{self._started}"


@frozen
class Opened:
    """What a `hello` led to.

    Attributes:
        resumed: whether it is a session that was there before.
        again: what was sent before and has to be sent again, then what is due.
        replaced: the connection that the session had until now, if another.
    """

    session: Session
    resumed: bool
    again: list[Frames]
    replaced: bytes | None = None


@frozen
class Swept:
    """What time brought.

    Attributes:
        send: (connection, frames) to send.
        ended: sessions that are over.
    """

    send: list[tuple[bytes, Frames]]
    ended: list[Session]


@define(eq=False, kw_only=True)
class Sessions:
    """All clients of a server, and all their requests. It knows no socket; one thread calls it.

    Attributes:
        clock: seconds, never backwards.
        limits: of sessions and their streams.
        offered: what clients were told.
        batches: how large a message to a client may be.
    """

    clock: Callable[[], float]
    limits: SessionLimits = field(factory=SessionLimits)
    offered: ServerLimits = field(factory=ServerLimits)
    batches: WireLimits = field(default=CLIENT_LIMITS)
    _by_connection: dict[bytes, Session] = field(factory=dict, init=False)
    #: by the token's hash: looking one up takes no longer where more of it is right
    _by_token: dict[bytes, Session] = field(factory=dict, init=False)
    #: the engine's id -> whose it is
    _by_key: dict[str, tuple[Session, Stream]] = field(factory=dict, init=False)
    #: what the engine still runs and nobody waits for
    _abandoned: list[str] = field(factory=list, init=False)
    _opened: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def in_flight(self) -> int:
        """How many requests the engine, or admission before it, still has."""
        return len(self._by_key)

    @property
    def num_bytes(self) -> int:
        """About how many bytes all streams hold."""
        return sum(stream.num_bytes for session in self._by_token.values() for stream in session.streams.values())

    # --- coming and going ---------------------------------------------------------------------------------------------

    def open(self, connection: bytes, hello: Hello, user: str = "") -> Opened:
        """Begin a session on this connection, or go on with the one whose token the client has.

        A token that is unknown, or another user's, begins a new session. A session that the connection had is gone.

        Raises:
            OverloadedError: there are as many sessions as there may be.
        """
        found = self._returning(hello.token, user)
        before = self._by_connection.get(connection)
        if before is not None and before is not found:
            self.lost(connection)
        if found is not None:
            return self._resume(found, connection, hello)
        if len(self._by_token) >= self.limits.sessions:
            raise OverloadedError(
                f"{len(self._by_token)} clients have sessions, as many as there may be",
                retry_after_s=self.limits.grace_s,
            )
        self._opened += 1
        token = secrets.token_bytes(TOKEN_BYTES)
        session = Session(
            number=self._opened,
            user=user,
            client=hello.client,
            token=token,
            connection=connection,
            heard_at=self.clock(),
        )
        self._by_connection[connection] = self._by_token[_digest(token)] = session
        return Opened(session, resumed=False, again=[])

    def hear(self, connection: bytes) -> Session:
        """Return the session of a connection that says something.

        Raises:
            NoSessionError: it has none.
        """
        session = self._by_connection.get(connection)
        if session is None:
            raise NoSessionError("no session on this connection: say hello first")
        session.heard_at = self.clock()
        return session

    def at(self, connection: bytes) -> Session | None:
        """Return the session of a connection that says nothing now; None where it has none."""
        return self._by_connection.get(connection)

    def connections(self) -> list[bytes]:
        """Return the connections of all clients that are not gone, as far as is known."""
        return list(self._by_connection)

    def expel(self, allowed: Callable[[str], bool]) -> list[Session]:
        """End, at once, the sessions of users that are not allowed any more; return them."""
        expelled = [session for session in self._by_token.values() if not allowed(session.user)]
        for session in expelled:
            self.end(session)
        return expelled

    def lost(self, connection: bytes) -> None:
        """A connection is closed: its client is gone, and may return to its requests. An unknown one is ignored."""
        session = self._by_connection.pop(connection, None)
        if session is not None:
            session.connection, session.gone_at = None, self.clock()
            if not session.streams:
                self.end(session)

    def end(self, session: Session) -> None:
        """End a session at once, as a `bye` asks; its requests are among the `abandoned`."""
        if session.connection is not None:
            self._by_connection.pop(session.connection, None)
        session.connection = None
        self._by_token.pop(_digest(session.token), None)
        for stream in session.streams.values():
            self._abandon(stream)
        session.streams.clear()
        session.answered.clear()

    def abandoned(self) -> list[str]:
        """Return, once, the engine's ids of requests that nobody waits for any more: cancel them."""
        keys, self._abandoned = self._abandoned, []
        return keys

    # --- requests -----------------------------------------------------------------------------------------------------

    def start(self, session: Session, asked: Generate) -> Stream:
        """Begin a request. Its stream's `key` is the id that the engine is to know it by.

        An earlier request of the same id that has ended counts as received.

        Raises:
            InvalidRequestError: a request of this client with this id has not ended. Answered without an id, since the
                first goes on.
            OverloadedError: the client has as many requests in flight as it may.
        """
        request_id = asked.request.request_id
        earlier = session.streams.get(request_id)
        if earlier is not None and not earlier.ended:
            raise InvalidRequestError(f"id: {request_id!r} is a request of yours that has not ended", field="id")
        if session.in_flight >= self.offered.requests:
            raise OverloadedError(
                f"{session.in_flight} requests of yours are in flight, as many as there may be", retry_after_s=1.0
            )
        if earlier is not None:
            self._forget(session, request_id)
        stream = Stream(
            request_id=request_id,
            key=session.next_key(),
            num_choices=asked.request.params.n,
            whole=not asked.stream,
            upto=self.limits.credit if asked.credit is None else asked.credit,
            max_window=max(self.offered.credit, self.limits.credit),
            buffer_bytes=self.limits.buffer_bytes,
            stall_timeout_s=self.limits.stall_timeout_s,
        )
        session.streams[request_id] = stream
        self._by_key[stream.key] = (session, stream)
        return stream

    def drop(self, session: Session, stream: Stream) -> None:
        """Forget a request that never began: it was refused, and its client is told by an `error` of its own."""
        self._by_key.pop(stream.key, None)
        session.answered.pop(stream.request_id, None)
        session.streams.pop(stream.request_id, None)

    def find(self, key: str) -> Stream | None:
        """Return the stream of a request that the engine knows by this id; None where nobody waits for it."""
        found = self._by_key.get(key)
        return None if found is None else found[1]

    def owner(self, key: str) -> tuple[Session, Stream] | None:
        """Return whose request it is that the engine knows by this id; None where nobody waits for it."""
        return self._by_key.get(key)

    def credit(self, session: Session, request_id: str, received: int, upto: int) -> list[Frames]:
        """Take a `credit` and return what may be sent now. One of an unknown request is ignored: it may have ended.

        Raises:
            InvalidRequestError: it confirms what was not sent, or grants too much. Answered without an id.
        """
        stream = session.streams.get(request_id)
        if stream is None:
            return []
        stream.acknowledge(received, upto)
        if stream.settled:
            self._forget(session, request_id)
            return []
        return self._due(session, stream)

    def deliver(self, outputs: Iterable[Output]) -> list[tuple[bytes, Frames]]:
        """Give the engine's outputs to their streams; return (connection, frames) to send, one or few a client.

        Those of requests that nobody waits for are dropped. A stream that holds too much ends with an error, and is
        among the `abandoned`.
        """
        touched: dict[Session, dict[Stream, None]] = {}
        by_key = self._by_key
        for output in outputs:
            found = by_key.get(output.request_id)
            if found is not None:
                session, stream = found
                stream.take(output)
                if output.finish_reason is not None and stream.closed:
                    del by_key[stream.key]
                touched.setdefault(session, {})[stream] = None
        send = []
        for session, streams in touched.items():
            send += self._addressed(session, [frames for stream in streams for frames in self._due(session, stream)])
        return send

    def fail(self, error: IntarsiaError) -> list[tuple[bytes, Frames]]:
        """End every request in flight with an error: the engine is no more. Return what to send."""
        send = []
        for session in self._by_token.values():
            packed = []
            for stream in list(session.streams.values()):
                self._end_early(stream, error)
                packed += self._due(session, stream)
            send += self._addressed(session, packed)
        return send

    def lose(self, key: str, error: IntarsiaError) -> list[tuple[bytes, Frames]]:
        """End one request in flight with an error: nothing runs it any more. Return what to send."""
        session, stream = self._by_key.pop(key)
        stream.fail(error)
        return self._addressed(session, self._due(session, stream))

    def sweep(self) -> Swept:
        """Look at the clock: who is gone, who has stayed away too long, which requests have to end. Called often."""
        now, swept = self.clock(), Swept([], [])
        for session in list(self._by_token.values()):
            if session.connection is not None and now - session.heard_at >= self.limits.silence_s:
                self.lost(session.connection)
            if session.gone_at is not None and (not session.streams or now - session.gone_at >= self.limits.grace_s):
                self.end(session)
                swept.ended.append(session)
                continue
            packed = self._lighten(session)
            if session.connection is not None:
                self._forget_old(session, now)
                for stream in list(session.streams.values()):
                    fault = stream.fault(now)
                    if fault is not None:
                        self._end_early(stream, fault)
                        packed += self._due(session, stream)
            swept.send.extend(self._addressed(session, packed))
        return swept

    # --- within -------------------------------------------------------------------------------------------------------

    def _returning(self, token: bytes | None, user: str) -> Session | None:
        if token is None:
            return None
        found = self._by_token.get(_digest(token))
        if found is None or not compare_digest(found.token, token) or found.user != user:
            return None
        return found

    def _resume(self, session: Session, connection: bytes, hello: Hello) -> Opened:
        replaced = session.connection if session.connection != connection else None
        if replaced is not None:
            self._by_connection.pop(replaced, None)
        session.connection, session.gone_at, session.heard_at = connection, None, self.clock()
        self._by_connection[connection] = session
        again: list[Frames] = []
        for stream in list(session.streams.values()):
            try:
                again += stream.resume(hello.received.get(stream.request_id))
            except InvalidRequestError as error:
                self._end_early(stream, error)
            if stream.settled:
                self._forget(session, stream.request_id)
            else:
                again += self._due(session, stream)
        return Opened(session, resumed=True, again=list(batched(again, self.batches)), replaced=replaced)

    def _due(self, session: Session, stream: Stream) -> list[Frames]:
        """Return what a stream may send now; nothing while its client is gone."""
        if stream.overfull:
            self._end_early(stream, stream.surplus())
        if session.connection is None or stream.ended:
            return []
        packed = stream.due()
        if stream.ended:
            session.answered[stream.request_id] = self.clock()
            self._forget_surplus(session)
        return packed

    def _end_early(self, stream: Stream, error: IntarsiaError) -> None:
        stream.fail(error)
        self._abandon(stream)

    def _abandon(self, stream: Stream) -> None:
        if self._by_key.pop(stream.key, None) is not None:
            self._abandoned.append(stream.key)

    def _forget(self, session: Session, request_id: str) -> None:
        """Let go of a request that has ended."""
        session.answered.pop(request_id, None)
        del session.streams[request_id]

    def _forget_surplus(self, session: Session) -> None:
        """Keep ends that are not confirmed within bounds; the newest is kept."""
        sizes = [session.streams[request_id].num_bytes for request_id in session.answered]
        num_bytes, count = sum(sizes), len(sizes)
        for request_id, size in zip(list(session.answered), sizes, strict=True):
            if count <= 1 or (count <= self.limits.kept_answers and num_bytes <= self.limits.buffer_bytes):
                return
            self._forget(session, request_id)
            num_bytes, count = num_bytes - size, count - 1

    def _forget_old(self, session: Session, now: float) -> None:
        """Forget ends that a client has had time enough to confirm: it does not care to."""
        kept_s = self.limits.silence_s + self.limits.grace_s
        for request_id in [each for each, ended_at in session.answered.items() if now - ended_at >= kept_s]:
            self._forget(session, request_id)

    def _lighten(self, session: Session) -> list[Frames]:
        """End the largest requests of a client whose requests together hold too much; return what to say of it."""
        sizes = {stream: stream.num_bytes for stream in session.streams.values() if not stream.ended}
        num_bytes, packed = sum(sizes.values()), []
        while num_bytes > self.limits.client_bytes:
            text = f"{num_bytes} bytes of your requests wait to be read; client_bytes is {self.limits.client_bytes}"
            largest = max(sizes, key=sizes.__getitem__)
            num_bytes -= sizes.pop(largest)
            self._end_early(largest, SlowReaderError(text))
            packed += self._due(session, largest)
        return packed

    def _addressed(self, session: Session, packed: list[Frames]) -> list[tuple[bytes, Frames]]:
        connection = session.connection
        return [] if connection is None else [(connection, each) for each in batched(packed, self.batches)]


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
