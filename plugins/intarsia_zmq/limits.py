"""What a peer may send and what a session may hold."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen


def _at_least(low: float) -> Any:
    def check(_: object, attribute: Attribute[Any], value: float) -> None:
        if not low <= value < float("inf"):
            raise ValueError(f"'{attribute.name}': {value!r} is not a number from {low:g}")

    return check


def _count(default: int, low: int = 1) -> Any:
    return field(default=default, validator=_at_least(low))


def _seconds(default: float) -> Any:
    return field(default=default, validator=_at_least(0.001))


@frozen(kw_only=True)
class WireLimits:
    """How large a message may be, checked before it is decoded.

    Attributes:
        message_bytes: of all frames together.
        frames: the map and its blobs.
        nesting: maps and arrays within one another, the message's own map included.
        map_keys: of one map.
        array_items: of one array; more go as a blob.
        values: keys, numbers, texts, maps and arrays of one message.
        batch_messages: messages in one batch; 0 where a batch is none that this side takes.
        repeated_keys: let a map say a key twice, and take the last; costs less than to look.
    """

    message_bytes: int = _count(4 << 20)
    frames: int = _count(8)
    nesting: int = _count(32)
    map_keys: int = _count(4096)
    array_items: int = _count(1 << 16)
    values: int = _count(200_000)
    batch_messages: int = _count(0, 0)
    repeated_keys: bool = False


#: What a client takes from its server, which it trusts with more.
CLIENT_LIMITS = WireLimits(
    message_bytes=256 << 20,
    frames=4096,
    array_items=1 << 24,
    values=1 << 24,
    batch_messages=1 << 16,
    repeated_keys=True,
)


@frozen(kw_only=True)
class ServerLimits:
    """What `welcome` tells a client under `limits`.

    Attributes:
        message_bytes: of one message of the client.
        prompt_tokens: of one prompt.
        output_tokens: of one choice.
        requests: of one client, in flight at a time.
        credit: deltas that may be on the way of one request: the largest window.
    """

    message_bytes: int = _count(4 << 20)
    prompt_tokens: int = _count(1 << 20)
    output_tokens: int = _count(1 << 20)
    requests: int = _count(256)
    credit: int = _count(1024)


@frozen(kw_only=True)
class SessionLimits:
    """How long sessions live and what they may keep.

    Attributes:
        heartbeat_s: how often a client says something; silent for three of them, it is gone.
        grace_s: how long a client that is gone may take to return to its requests.
        sessions: at a time.
        credit: the window of a request that gives none.
        buffer_bytes: what one request may keep for its client, about: sent and not confirmed, or not yet sent.
        stall_timeout_s: how long a request with something to say may be without credit.
        client_bytes: the same of all requests of one client; beyond, its largest ends.
        kept_answers: ended requests of one client whose ends are not confirmed; beyond, the oldest are forgotten.
    """

    heartbeat_s: float = _seconds(5.0)
    grace_s: float = _seconds(30.0)
    sessions: int = _count(4096)
    credit: int = _count(256)
    buffer_bytes: int = _count(8 << 20)
    client_bytes: int = _count(64 << 20)
    stall_timeout_s: float = _seconds(60.0)
    kept_answers: int = _count(256)

    @property
    def silence_s(self) -> float:
        """How long a client may be silent."""
        return 3 * self.heartbeat_s
