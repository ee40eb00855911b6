"""Links between rank 0 and every other rank: messages as msgpack frames over TCP, apart from the model's own traffic.

Plans, results, errors, checksums and heartbeats go here, so that a rank which is stuck in a collective can still be
told apart from one that is gone. Nothing is pickled.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
from attrs import define, field, frozen

from intarsia.errors import ExecutionError

#: Of one message: a plan of thousands of long sequences has a few MiB.
_MAX_BYTES: Final = 1 << 28
_HEADER: Final = struct.Struct("<I")
_CHUNK: Final = 1 << 20
#: How long a connection may take to say who it is.
_HELLO_S: Final = 10.0
_HELLO_BYTES: Final = 1 << 16


class LinkClosedError(ExecutionError):
    """The other end is gone."""


@frozen
class Message:
    """What one end says.

    Attributes:
        kind: what it is about.
        body: plain data.
    """

    kind: str
    body: Mapping[str, Any] = field(factory=dict)


@define(eq=False)
class Link:
    """One end of a connection. Any thread sends; one thread receives.

    Attributes:
        connection: a connected socket.
        patience_s: how long `send` waits for an end that takes nothing.
        max_bytes: longer messages are refused.
    """

    connection: socket.socket
    patience_s: float
    max_bytes: int = _MAX_BYTES
    _sending: threading.Lock = field(factory=threading.Lock, init=False)
    _buffer: bytearray = field(factory=bytearray, init=False)

    def __attrs_post_init__(self) -> None:
        self.connection.setblocking(False)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the socket's, for selectors."""
        return self.connection.fileno()

    def send(self, kind: str, **body: Any) -> None:
        """Send a message.

        Raises:
            LinkClosedError: the other end is gone, or took nothing for `patience_s`.
        """
        self.send_packed(pack(kind, **body))

    def send_packed(self, data: bytes) -> None:
        """Send what `pack` made; raises as `send` does."""
        view, until = memoryview(data), time.monotonic() + self.patience_s
        with self._sending:
            while view:
                try:
                    view = view[self.connection.send(view) :]
                except BlockingIOError:
                    if not _is_ready(self.connection, select.POLLOUT, until - time.monotonic()):
                        raise LinkClosedError(f"it took nothing for {self.patience_s:g} s") from None
                except (OSError, ValueError) as error:
                    raise LinkClosedError(f"its connection is closed ({error})") from None

    def send_if_free(self, data: bytes) -> None:
        """Send what `pack` made if that can be done at once: a heartbeat waits for nobody, and is sent again."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            if _is_ready(self.connection, select.POLLOUT, 0) and self.connection.send(data) < len(data):
                self.close()  # half a message: what follows could not be read
        except (OSError, ValueError):
            return  # whoever receives finds out
        finally:
            self._sending.release()

    def receive(self) -> list[Message]:
        """Return the whole messages that have come; call it where the socket has something to read.

        Raises:
            LinkClosedError: the other end is gone, or sends what is no message.
        """
        while True:
            try:
                data = self.connection.recv(_CHUNK)
            except BlockingIOError:
                break
            except (OSError, ValueError) as error:
                raise LinkClosedError(f"its connection is closed ({error})") from None
            if not data:
                if messages := self._messages():
                    return messages  # the end is found again at the next call
                raise LinkClosedError("its connection is closed")
            self._buffer += data
            if len(data) < _CHUNK:
                break
        return self._messages()

    def wait(self, timeout_s: float) -> list[Message]:
        """Return what has come, as soon as something has; empty after `timeout_s`. Raises as `receive` does."""
        return self.receive() if _is_ready(self.connection, select.POLLIN, timeout_s) else []

    def _messages(self) -> list[Message]:
        found, start, buffer = [], 0, self._buffer
        while len(buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(buffer, start)
            if size > self.max_bytes:
                raise LinkClosedError(f"it announces a message of {size} bytes")
            stop = start + _HEADER.size + size
            if len(buffer) < stop:
                break
            found.append(_read(bytes(buffer[start + _HEADER.size : stop])))
            start = stop
        del buffer[:start]
        return found

    def close(self) -> None:
        """Close it. Safe to call twice."""
        self.connection.close()


def pack(kind: str, **body: Any) -> bytes:
    """Return a message as bytes, length first: made once, sent to many."""
    data: bytes = msgpack.packb([kind, body], unicode_errors="surrogatepass")
    return _HEADER.pack(len(data)) + data


def _is_ready(waited: socket.socket, event: int, timeout_s: float) -> bool:
    """Wait until a socket can be read, or written; return whether it can. (`select` takes no large descriptors.)"""
    poll = select.poll()
    poll.register(waited, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _read(data: bytes) -> Message:
    try:
        found = msgpack.unpackb(data, unicode_errors="surrogatepass")
    except (ValueError, RecursionError) as error:
        raise LinkClosedError(f"it sends what is no message: {error}") from None
    if type(found) is not list or len(found) != 2 or type(found[0]) is not str or type(found[1]) is not dict:
        raise LinkClosedError("it sends what is no message")
    return Message(found[0], found[1])


# --- meeting ----------------------------------------------------------------------------------------------------------


def new_token() -> bytes:
    """Return bytes that nobody guesses: who knows them is one of the ranks."""
    return secrets.token_bytes(16)


@define(eq=False)
class Listener:
    """Where the other ranks connect to rank 0.

    Attributes:
        host: the one address that is listened on.
        token: what they must say.
        patience_s: of their links.
    """

    host: str
    token: bytes
    patience_s: float
    _listening: socket.socket = field(init=False)

    def __attrs_post_init__(self) -> None:
        family = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((self.host, 0), family=family)

    @property
    def port(self) -> int:
        """The port."""
        return int(self._listening.getsockname()[1])

    def fileno(self) -> int:
        """Return the socket's, for selectors."""
        return self._listening.fileno()

    def accept(self) -> tuple[int, Link, Mapping[str, Any]] | None:
        """Take a connection; return its rank, its link and what it says of itself, or None where it is no rank's.

        A stranger is dropped, and cannot hold up the others for longer than it may take to say who it is.
        """
        connection, _ = self._listening.accept()
        link, until = Link(connection, self.patience_s, _HELLO_BYTES), time.monotonic() + _HELLO_S
        try:
            messages: list[Message] = []
            while not messages and time.monotonic() < until:
                messages = link.wait(until - time.monotonic())
        except LinkClosedError:
            messages = []
        hello = messages[0] if len(messages) == 1 else Message("")
        rank, token = hello.body.get("rank"), hello.body.get("token")
        known = isinstance(token, bytes) and hmac.compare_digest(token, self.token)
        if hello.kind != "hello" or not known or type(rank) is not int:
            link.close()
            return None
        link.max_bytes = _MAX_BYTES
        return rank, link, hello.body

    def close(self) -> None:
        """Stop listening."""
        self._listening.close()


def connect(host: str, port: int, token: bytes, rank: int, patience_s: float, **facts: Any) -> Link:
    """Connect to rank 0 and say who this is.

    Raises:
        LinkClosedError: it is not there.
    """
    try:
        connection = socket.create_connection((host, port), timeout=patience_s)
    except OSError as error:
        raise LinkClosedError(f"rank 0 cannot be reached at {host} port {port}: {error}") from None
    link = Link(connection, patience_s)
    link.send("hello", rank=rank, token=token, **facts)
    return link
