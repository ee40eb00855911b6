"""What a client waits for: requests with their sequence numbers and credit, and questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from attrs import define, evolve, field, frozen

from intarsia.errors import IntarsiaError, InvalidRequestError
from intarsia.types import Output
from intarsia_zmq.errors import MalformedError
from intarsia_zmq.limits import ServerLimits, WireLimits
from intarsia_zmq.messages import Done
from intarsia_zmq.requests import Generate, write_generate
from intarsia_zmq.wire import Frames, Message, decode, encode

#: How often a request that nothing came of is sent again: it may be what the server dies of.
MAX_TRIES = 4
#: What the page says that servers take, but for the size, which the server says itself.
_SERVER_LIMITS = WireLimits(message_bytes=1 << 40)


class ConnectionLostError(IntarsiaError, ConnectionError):
    """The server is out of reach for too long, does not let this client in, or has forgotten the request."""

    code = "connection_lost"


#: What comes for a request or a question: its outputs and its end, the answer's body, or why there is none.
Event: TypeAlias = Output | Done | Mapping[str, Any] | IntarsiaError
#: Request id -> what came for it, in order.
Events: TypeAlias = dict[str, list[Event]]


def packed(message: Message, field_at_fault: str) -> Frames:
    """Return a message's frames, held against what every server takes: one that is refused unread has no answer.

    Raises:
        InvalidRequestError: it cannot be sent, or is beyond the protocol's limits.
    """
    frames = encode(message)
    try:
        decode(frames, _SERVER_LIMITS)
    except MalformedError as error:
        where = field_at_fault
        raise InvalidRequestError(f"{where}: beyond what a message may hold: {error}", field=where) from error
    return frames


def check_size(frames: Frames, limits: ServerLimits, field_at_fault: str) -> InvalidRequestError | None:
    """Return why a message is too large for this server; it would close the connection."""
    size = sum(map(len, frames))
    if size <= limits.message_bytes:
        return None
    text = f"{field_at_fault}: the message has {size} bytes; this server takes at most {limits.message_bytes}"
    return InvalidRequestError(text, field=field_at_fault)


@define(eq=False)
class Call:
    """A request of the client's.

    Attributes:
        asked: what for.
        frames: the `generate`, encoded.
        since: when it was asked for.
        seq: the last number received.
        taken: the last number that its reader has taken; the window goes on from there.
        granted: deltas may come up to this number.
        tries: how often it was sent.
        cancelled: nobody reads it any more; it ends once the server has said so.
    """

    asked: Generate
    frames: Frames
    since: float
    seq: int = field(default=0, init=False)
    taken: int = field(default=0, init=False)
    granted: int = field(default=0, init=False)
    tries: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)
    gaps: int = field(default=0, init=False)

    @classmethod
    def of(cls, asked: Generate, since: float) -> Call:
        """Make a call that is ready to be sent.

        Raises:
            InvalidRequestError: it cannot be said in a message.
        """
        return cls(asked, packed(write_generate(asked), "prompt"), since)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.asked.request.request_id

    def window(self, offered: int) -> int:
        """Return how many deltas may be on the way, of a server that offers this many."""
        return offered if self.asked.credit is None else self.asked.credit

    def begin(self, offered: int) -> Frames:
        """Return the frames of the request, to be sent: for the first time, or since it never came."""
        self.tries += 1
        assert not self.seq, "it has begun"
        self.granted = self.window(offered)
        return self.frames

    def grant(self, offered: int, *, again: bool = False) -> Frames | None:
        """Return a `credit` where half a window was read since the last; `again`: whatever was read."""
        window = self.window(offered)
        upto = (self.seq if self.cancelled else self.taken) + window
        if not again and (upto - self.granted) * 2 < max(window, 1):
            return None
        self.granted = max(upto, self.granted)
        return encode(Message("credit", self.id, 0, {"received": self.seq, "upto": self.granted}))

    def limited(self, most: int) -> Call:
        """Return the call with a window that the server allows."""
        if self.asked.credit is None or self.asked.credit <= most:
            return self
        made = Call.of(evolve(self.asked, credit=most), self.since)
        made.cancelled = self.cancelled
        return made


@frozen
class Question:
    """A question to the server.

    Attributes:
        frames: encoded.
        since: when it was asked.
        answer: the kind of message that answers it.
        timeout_s: how long it waits for the answer; None is what all of the connection do.
    """

    frames: Frames
    since: float
    answer: str
    timeout_s: float | None = None


def confirmation(request_id: str, seq: int) -> Frames:
    """Return the `credit` that confirms a request's end."""
    return encode(Message("credit", request_id, 0, {"received": seq}))
