"""The thread between a client and its server: it owns the socket, and moves what the connection says and hears."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import zmq
from attrs import define, field, frozen

from intarsia.errors import ConfigError, IntarsiaError
from intarsia_zmq.calls import ConnectionLostError, Events
from intarsia_zmq.connection import Connection
from intarsia_zmq.keys import KeyPair, new_key_pair, read_key_pair, read_public_key
from intarsia_zmq.limits import CLIENT_LIMITS
from intarsia_zmq.wire import Message, decode, encode

logger = logging.getLogger("intarsia.zmq")

_MIN_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 2.0
#: Messages that are read before anything else is looked at.
_BURST = 64
#: How long closing waits for the last words to leave.
_LINGER_S = 0.5
#: Handshakes that fail in a row before it counts as being refused.
_MAX_HANDSHAKES = 3
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
#: How a server that wants keys treats a client without, if this is not told more clearly.
_CLOSED_EARLY = "the handshake failed: does this server want CURVE keys?"
_WATCHED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED_HANDSHAKES


@frozen(kw_only=True)
class Address:
    """Where a server is, and the keys to it.

    Attributes:
        url: such as tcp://127.0.0.1:5555 or ipc:///run/intarsia.sock.
        server_key: the server's public CURVE key; None is a connection without encryption.
        keys: the client's own.
    """

    url: str
    server_key: bytes | None = None
    keys: KeyPair | None = None

    @classmethod
    def of(cls, url: str, server_key: str | Path | None = None, key: str | Path | None = None) -> Address:
        """Read what a user says: keys are files, the public one may be the key itself.

        Without a key of its own, a client with a `server_key` makes one up.

        Raises:
            ConfigError: names the field, the value and what would be right.
        """
        if not isinstance(url, str) or not url.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"address: {url!r} is not an address such as tcp://127.0.0.1:5555", field="address")
        if server_key is None:
            if key is not None:
                raise ConfigError("server_key: missing; a client with a key needs the server's public key", field="key")
            return cls(url=url)
        keys = new_key_pair() if key is None else read_key_pair(Path(key))
        return cls(url=url, server_key=read_public_key(server_key), keys=keys)


@define(eq=False)
class Link:
    """A connection and the one thread that works it.

    All methods may be called from any thread.

    Attributes:
        address: the server's.
        connection: worked by the thread alone.
        deliver: called in the thread with what came, for each message or tick that brings something.
    """

    address: Address
    connection: Connection
    deliver: Callable[[Events], None]
    _posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = field(factory=deque, init=False)
    _names: itertools.count[int] = field(factory=lambda: itertools.count(1), init=False)
    _woken: bool = field(default=False, init=False)
    _closing: bool = field(default=False, init=False)
    _ended: IntarsiaError | None = field(default=None, init=False)
    _context: zmq.Context[zmq.Socket[bytes]] = field(factory=zmq.Context, init=False)
    _socket: zmq.Socket[bytes] | None = field(default=None, init=False)
    _monitor: zmq.Socket[bytes] | None = field(default=None, init=False)
    _poller: zmq.Poller = field(factory=zmq.Poller, init=False)
    _retry_s: float = field(default=_MIN_RETRY_S, init=False)
    _retry_at: float = field(default=0.0, init=False)
    _handshakes: int = field(default=0, init=False)
    _blocked: bool = field(default=False, init=False)
    _wake_in: socket.socket = field(init=False)
    _wake_out: socket.socket = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="intarsia-zmq-client", daemon=True)
        try:
            self._connect()
        except BaseException:
            self._release()
            raise
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether its thread is no more: it was closed, or came upon a fault of its own."""
        return self._ended is not None

    def new_name(self) -> str:
        """Return an id that no request or question of this link has had."""
        return str(next(self._names))

    def post(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have the thread do something with the connection.

        Raises:
            ConnectionLostError: the link is closed, or its thread is no more.
        """
        if self._closing or self._ended is not None:
            raise self._ended or ConnectionLostError("the client is closed")
        self._posted.append((work, arguments))
        self._wake()
        if self._ended is not None:  # the thread ended before it saw that
            raise self._ended

    def tell(self, work: Callable[..., None], *arguments: Any) -> None:
        """As `post`, of what does not matter any more where the link is closed."""
        with contextlib.suppress(ConnectionLostError):
            self.post(work, *arguments)

    def close(self) -> None:
        """End the session and the thread. What is waited for ends with an error. Safe to call twice."""
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: IntarsiaError = ConnectionLostError("the client is closed")
        try:
            while not self._closing:
                self._turn()
            self._say_bye()
        except Exception as fault:
            logger.exception("the client's thread ends")
            error = ConnectionLostError(f"the client's thread ended: {type(fault).__name__}: {fault}")
        finally:
            self._ended = error
            self._release()
            # Twice: what was posted while the rest was told is told as well.
            for _ in range(2):
                self._drain_posted()
                self._deliver(self.connection.fail(error))

    def _turn(self) -> None:
        connection = self.connection
        if connection.broken is not None:
            self._reconnect_when_due()
        ready = dict(self._poller.poll(self._wait_ms()))
        if self._wake_in.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(64)
        self._woken = False
        self._drain_posted()
        if self._socket in ready:
            self._hear()
        if self._monitor in ready:
            self._watch()
        self._deliver(connection.tick())
        self._say()

    def _wait_ms(self) -> int:
        wait_s = self.connection.wait_s()
        if self._socket is None:
            wait_s = min(wait_s, max(0.0, self._retry_at - time.monotonic()))
        return int(wait_s * 1000) + 1

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with contextlib.suppress(BlockingIOError, OSError):  # full: it wakes anyway; closed: it has ended
                self._wake_out.send(b"x")

    def _drain_posted(self) -> None:
        posted = self._posted
        while posted:
            work, arguments = posted.popleft()
            work(*arguments)

    def _deliver(self, events: Events) -> None:
        if events:
            self.deliver(events)

    # --- the socket ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Make a socket. It connects once, or keeps trying to; a connection that is lost is not made again by it."""
        made = self._context.socket(zmq.DEALER)
        made.linger, made.ipv6 = 0, True
        made.maxmsgsize = CLIENT_LIMITS.message_bytes
        made.set(zmq.RECONNECT_IVL, 100)
        made.set(zmq.RECONNECT_IVL_MAX, 1000)
        if self.address.server_key is not None and self.address.keys is not None:
            made.curve_serverkey = self.address.server_key
            made.curve_publickey, made.curve_secretkey = self.address.keys.public, self.address.keys.secret
        self._socket, self._monitor = made, made.get_monitor_socket(_WATCHED)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(made, zmq.POLLIN)
        try:
            made.connect(self.address.url)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"address: {self.address.url!r} is not an address such as tcp://127.0.0.1:5555: {error.strerror}",
                field="address",
            ) from error
        self._blocked = False
        self.connection.connect()
        self._say()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._poller.unregister(self._monitor)
            self._poller.unregister(self._socket)
            self._socket.disable_monitor()
            self._socket.close()
            self._socket = self._monitor = None

    def _reconnect_when_due(self) -> None:
        now = time.monotonic()
        if self._socket is not None:
            logger.info("the connection to %s is lost: %s", self.address.url, self.connection.broken)
            self._disconnect()
            self._retry_at = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
        if now >= self._retry_at:
            self._connect()

    def _hear(self) -> None:
        assert self._socket is not None
        receive, take = self._socket.recv_multipart, self.connection.receive
        for _ in range(_BURST):
            try:
                frames = receive(zmq.DONTWAIT)
            except zmq.Again:
                break
            self._deliver(take(frames))
        if self.connection.is_open:
            self._retry_s, self._handshakes = _MIN_RETRY_S, 0

    def _say(self) -> None:
        """Send what there is; what the socket has no room for waits until it has."""
        outgoing, made = self.connection.outgoing, self._socket
        if made is None:
            return
        try:
            while outgoing:
                made.send_multipart(outgoing[0], zmq.DONTWAIT)
                outgoing.popleft()
        except zmq.Again:
            pass
        if bool(outgoing) != self._blocked:
            self._blocked = bool(outgoing)
            self._poller.modify(made, zmq.POLLIN | (zmq.POLLOUT if self._blocked else 0))

    def _watch(self) -> None:
        """Take what the socket's monitor says: connections that are lost, and handshakes that fail."""
        while self._monitor is not None:
            try:
                head, _ = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event = struct.unpack("=H", head[:2])[0]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes, self.connection.hint = 0, ""
            elif event & _FAILED_HANDSHAKES:
                self._handshake_failed(event)
            elif event == zmq.EVENT_DISCONNECTED:
                self._hear_last()
                if self.connection.welcome is None and not self.connection.hint:
                    self.connection.hint = _CLOSED_EARLY
                self.connection.lost("the server closed the connection, or is gone")

    def _hear_last(self) -> None:
        """What came before the end of a connection is worth reading: it need not be sent again."""
        if self.connection.broken is None:
            self._hear()

    def _handshake_failed(self, event: int) -> None:
        """Tell a refusal from a connection that was cut, which looks much the same, and end what waits where it is one.

        Who was let in before has the right keys: then only a plain refusal counts.
        """
        connection, encrypted = self.connection, self.address.server_key is not None
        refused, counts = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH, True
        if refused:
            hint = "the server does not let this client's key in"
        elif connection.welcome is not None:
            hint, counts = "", False
        elif encrypted:
            hint = "the CURVE handshake failed: is the server_key that of this server?"
        else:
            hint = _CLOSED_EARLY
            counts = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        connection.hint = hint
        connection.lost(hint or "the connection was closed before it began")
        self._handshakes += counts
        if refused or self._handshakes >= _MAX_HANDSHAKES:
            self._deliver(connection.fail(ConnectionLostError(f"{self.address.url}: {hint}")))

    def _say_bye(self) -> None:
        """End the session, and give the server a moment to hear of it.

        Where a connection closes with something unread, TCP may take back what was said on it. So a question follows
        whose answer says that there is no session any more, and everything up to that is read.
        """
        connection, was_open = self.connection, self.connection.is_open
        connection.leave()
        if was_open:
            connection.outgoing.append(encode(Message("ping")))
        self._say()
        if self._socket is not None:
            self._socket.linger = int(_LINGER_S * 1000) if connection.welcome is not None else 0
            if was_open:
                self._hear_of_the_end(self._socket)

    def _hear_of_the_end(self, connected: zmq.Socket[bytes]) -> None:
        until = time.monotonic() + _LINGER_S
        while (left_s := until - time.monotonic()) > 0 and connected.poll(int(left_s * 1000) + 1):
            try:
                heard = decode(connected.recv_multipart(zmq.DONTWAIT), CLIENT_LIMITS)
            except (IntarsiaError, zmq.Again):
                return
            if any(each.kind == "error" and each.body.get("code") == "no_session" for each in heard):
                return

    def _release(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._disconnect()
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()
        self._wake_in.close()
        self._wake_out.close()


def link(address: Address, timeout_s: float, credit: int | None, deliver: Callable[[Events], None]) -> Link:
    """Begin a connection to a server.

    Raises:
        ConfigError: the time or the window is none.
    """
    if credit is not None and credit < 1:
        raise ConfigError(f"credit: {credit!r} is not a number of deltas from 1", field="credit")
    if not 0 < timeout_s < float("inf"):
        raise ConfigError(f"timeout_s: {timeout_s!r} is not a finite number of seconds above 0", field="timeout_s")
    name = {"name": "intarsia", "version": version("intarsia")}
    return Link(address, Connection(clock=time.monotonic, timeout_s=timeout_s, client=name), deliver)
