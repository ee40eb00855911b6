"""What libzmq tells of connections themselves: that one was closed, or never came about."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import zmq
from attrs import define, field
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger("intarsia.zmq")

#: Ways in which a connection does not come about -> how the log calls them.
_FAILED: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it was closed before it began",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak ZeroMQ as this socket does; without keys, or with others",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not allowed",
}


@define(eq=False)
class Monitor:
    """Reads the events of one socket. One thread calls it.

    Attributes:
        socket: to be polled.
        failed: connections that did not come about.
        closed: whether one was closed since this was last set to False.
    """

    socket: zmq.Socket[bytes]
    failed: int = field(default=0, init=False)
    closed: bool = field(default=False, init=False)
    _told: set[int] = field(factory=set, init=False)

    @classmethod
    def of(cls, watched: zmq.Socket[bytes]) -> Monitor:
        """Watch a socket, before it is bound."""
        events = zmq.EVENT_DISCONNECTED
        for event in _FAILED:
            events |= event
        return cls(watched.get_monitor_socket(events))

    def take(self) -> None:
        """Take what was told."""
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self.closed = True
            elif event in _FAILED:
                self.failed += 1
                if event not in self._told:
                    self._told.add(event)
                    log.warning("a connection is refused: %s; more of these are only counted", _FAILED[event])
