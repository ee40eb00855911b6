"""A ROUTER socket that never waits: what a peer does not take yet is kept, in order, and bounded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import zmq
from attrs import define, field

from intarsia_zmq.wire import Frames

#: Messages that libzmq keeps for one peer, each way, besides what the transport holds.
_HWM = 128
#: Longer frames are not copied.
_COPY_BYTES = 64 << 10
#: What is kept for a peer that takes nothing.
_MAX_KEPT = 4096
#: Connections that do not begin as ZeroMQ within this are closed.
_HANDSHAKE_MS = 10_000
#: Linux takes no longer pause between what asks whether a peer is there.
_MAX_KEEPALIVE_S = 32_767
#: What libzmq's own names of connections begin with. Only a peer that chose its name has another beginning, and then
#: it could take the name of another that is away for a moment.
_OWN_NAME = b"\0"


@define(eq=False)
class _Kept:
    messages: deque[Frames] = field(factory=deque)
    num_bytes: int = 0


@define(eq=False, kw_only=True)
class Router:
    """A bound ROUTER and what waits to be sent. One thread calls it.

    Attributes:
        socket: open, not bound.
        lost: told of a connection that is closed, or whose peer takes nothing for too long.
        max_bytes: what is kept for one peer, besides what libzmq keeps.
        named: whether peers have keys that messages can be asked for.
    """

    socket: zmq.Socket[bytes]
    lost: Callable[[bytes], None]
    max_bytes: int = 64 << 20
    named: bool = False
    _kept: dict[bytes, _Kept] = field(factory=dict, init=False)

    @classmethod
    def open(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        lost: Callable[[bytes], None],
        *,
        message_bytes: int,
        heartbeat_s: float,
        max_bytes: int = 64 << 20,
        named: bool = False,
    ) -> Router:
        """Make a socket with bounds on all that it takes and keeps."""
        socket = context.socket(zmq.ROUTER)
        socket.router_mandatory = 1
        socket.sndhwm = socket.rcvhwm = _HWM
        socket.maxmsgsize = message_bytes
        socket.handshake_ivl = _HANDSHAKE_MS
        # Finds connections that are cut without a word. Not by ZMTP's heartbeats: where a peer goes while messages of
        # its wait to be read, the next heartbeat fails an assertion of libzmq (4.3.5), and ends the whole process.
        seconds = math.ceil(min(heartbeat_s, _MAX_KEEPALIVE_S))
        socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, 2
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = seconds
        socket.tcp_maxrt = 3000 * seconds
        return cls(socket=socket, lost=lost, max_bytes=max_bytes, named=named)

    @property
    def keeps(self) -> bool:
        """Whether something waits for a peer."""
        return bool(self._kept)

    def receive(self) -> tuple[bytes, Frames, str] | None:
        """Return (connection, frames, the peer's key or "") of the next message; None where none is there."""
        try:
            if not self.named:
                connection, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
                return connection, frames, ""
            parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return parts[0].bytes, [part.bytes for part in parts[1:]], _user(parts[-1])

    def send(self, connection: bytes, frames: Frames, *, keep: bool = True) -> None:
        """Send, or keep until the peer takes it; without `keep` it is dropped instead."""
        kept = self._kept.get(connection)
        if kept is None and self._sent(connection, frames):
            return
        if not keep:
            return
        if kept is None:
            kept = self._kept[connection] = _Kept()
        kept.messages.append(frames)
        kept.num_bytes += sum(map(len, frames))
        if kept.num_bytes > self.max_bytes or len(kept.messages) > _MAX_KEPT:
            self._lose(connection)

    def retry(self) -> bool:
        """Send what was kept, as far as peers take it; return whether some is left."""
        for connection, kept in list(self._kept.items()):
            while kept.messages and self._sent(connection, kept.messages[0]):
                if connection not in self._kept:
                    break
                kept.num_bytes -= sum(map(len, kept.messages.popleft()))
            if not kept.messages:
                self._kept.pop(connection, None)
        return bool(self._kept)

    def forget(self, connection: bytes) -> None:
        """Drop what waits for a connection."""
        self._kept.pop(connection, None)

    def _sent(self, connection: bytes, frames: Frames) -> bool:
        """Send now; return False where the peer takes nothing. What is for a peer that is gone counts as sent."""
        try:
            copy = len(frames) == 1 and len(frames[0]) < _COPY_BYTES
            self.socket.send_multipart([connection, *frames], zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(connection)
        return True

    def _lose(self, connection: bytes) -> None:
        self.forget(connection)
        self.lost(connection)


def _user(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def chose_its_name(connection: bytes) -> bool:
    """Whether a peer named its connection itself."""
    return not connection.startswith(_OWN_NAME)
